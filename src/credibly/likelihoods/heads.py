"""Several heads with several likelihoods: a network that returns a dict of outputs, and a dict of targets.

    log p(y | f(x, w)) = sum_h weight_h log p_h(y_h | f_h(x, w))

Internally, the outputs of all heads are concatenated in one tensor (C, N, W), and the targets in one (N, T), so all
code for one likelihood works for several. Predictions are split into one `Predictive` per head again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from credibly.core.checks import check_positive
from credibly.core.inputs import to_values
from credibly.core.placement import exact_dtype
from credibly.core.specs import kind_name, to_spec
from credibly.errors import InputError
from credibly.likelihoods.base import Extra, Likelihood, Parameter


class Part(NamedTuple):
    """One head: its likelihood, the columns and shape of its outputs and of its targets, and its weight."""

    likelihood: Likelihood
    columns: slice
    shape: tuple[int, ...]
    target_columns: slice
    target_shape: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Heads(Likelihood):
    """One likelihood per head of a network that returns a dict of outputs; y is a dict of targets with the same names.

    Given the weights of the network, the heads are independent. `posterior.predict(x)["name"]` is the predictive of a
    head.

    Args:
        heads: {name: likelihood}.
        weights: {name: factor of the head's log likelihood}; 1 for heads that are not named. Other values than 1
            temper a head: its targets then have more or less weight than the model gives them.
    """

    heads: Mapping[str, Likelihood]
    weights: Mapping[str, float] = field(default_factory=dict)
    # Set when the problem is built: shapes of one row of the outputs and of the prepared targets.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True, repr=False)
    target_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True, repr=False)

    support: ClassVar[str] = "heads"
    ordered: ClassVar[bool] = False
    noise_sign: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for own in ("heads", "weights", "shapes", "target_shapes"):
            # A stored description has the heads as pairs.
            object.__setattr__(self, own, dict(getattr(self, own)))
        if not self.heads or not all(isinstance(head, Likelihood) for head in self.heads.values()):
            raise InputError("heads", f"must be a dict of names and likelihoods, got {self.heads!r}")
        for name, head in self.heads.items():
            if not isinstance(name, str) or "." in name or isinstance(head, Heads):
                raise InputError(
                    "heads", f"must have names without a dot and single likelihoods, got {name!r}: {head!r}"
                )
        for name, weight in self.weights.items():
            check_positive(f"weights[{name!r}]", weight)
            if name not in self.heads:
                raise InputError("weights", f"has {name!r}, the heads are {', '.join(self.heads)}")

    @property
    def wide(self) -> bool:  # type: ignore[override]
        """Whether a head needs float64."""
        return any(head.wide for head in self.heads.values())

    # -- binding -------------------------------------------------------------------------------------------------------
    def with_targets(self, outputs: Mapping[str, Tensor], y: Any, dtype: torch.dtype) -> tuple[Self, Tensor]:
        """Return the likelihood bound to a trial of outputs by name, and all prepared targets in one tensor (N, T)."""
        if not isinstance(y, Mapping):
            found = f"must be a dict of targets for {', '.join(self.heads)}, got {type(y).__name__}"
            raise InputError("y", found, "Pass one target per head")
        for argument, given in (("net", outputs), ("y", y)):
            if set(given) != set(self.heads):
                found = f"has the heads {', '.join(map(str, given)) or 'none'}, the likelihood {', '.join(self.heads)}"
                raise InputError(argument, found, "They need the same names")
        bound, columns, target_shapes = {}, [], {}
        # In the order of the network, in which its outputs are concatenated.
        for name in outputs:
            head, device = self.heads[name], outputs[name].device
            try:
                values = to_values(y[name], "y")
                own = head.bind(outputs[name], values.to(device))
                prepared = own.prepare(values.to(device), dtype)
            except InputError as error:
                raise InputError(f"{error.argument} of head {name!r}", error.found, error.advice) from error
            bound[name], target_shapes[name] = own, tuple(prepared.shape[1:])
            columns.append(prepared.reshape(len(prepared), -1).to(exact_dtype(dtype)))
        lengths = {name: len(column) for name, column in zip(bound, columns)}
        if len(set(lengths.values())) > 1:
            raise InputError("y", f"has {lengths} rows", "All heads need the same number of rows")
        shapes = {name: tuple(outputs[name].shape[1:]) for name in bound}
        return replace(self, heads=bound, shapes=shapes, target_shapes=target_shapes), torch.cat(columns, -1)

    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Check that shapes are known: `with_targets` binds the heads."""
        if not self.shapes:
            raise InputError("likelihood", "is of several heads, and the targets are not", "Pass a dict of targets")
        return self

    def prepare(self, y: Tensor | Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        """Return targets (N, T) that `with_targets` has prepared, or those of a batch by name."""
        return y.to(exact_dtype(dtype)) if isinstance(y, Tensor) else self.prepared(y, dtype, torch.device("cpu"))

    def prepared(self, y: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return targets by name as one tensor (N, T)."""
        if not isinstance(y, Mapping) or set(y) != set(self.heads):
            raise InputError("y", f"must be a dict of targets for {', '.join(self.heads)}")
        columns = []
        for name, part in self.parts():
            values = to_values(y[name], f"y of head {name!r}")
            own = part.likelihood.prepare(values.to(device), dtype)
            if tuple(own.shape[1:]) != part.target_shape:
                raise InputError("y", f"has shape {tuple(values.shape)} for {name}, one row {part.target_shape}")
            columns.append(own.reshape(len(own), -1).to(exact_dtype(dtype)))
        return torch.cat(columns, -1)

    def scaled_to(self, y: Tensor, weight: Tensor | None) -> Self:
        """Set the defaults of all heads that depend on the units of their targets."""
        scaled = {name: p.likelihood.scaled_to(self.target_of(p, y), weight) for name, p in self.parts()}
        return replace(self, heads=scaled)

    def parameters(self) -> dict[str, Parameter]:
        """Return the own parameters of all heads, as "head.parameter"."""
        return {f"{name}.{own}": p for name, head in self.heads.items() for own, p in head.parameters().items()}

    def spec(self) -> dict[str, Any]:
        """Return the description of a run folder, with heads as pairs of name and description."""
        own = ("heads", "weights", "shapes", "target_shapes")
        pairs = {name: [[key, to_spec(value)] for key, value in getattr(self, name).items()] for name in own}
        return {"kind": kind_name(type(self)), **pairs}

    def restored(self, spec: Mapping[str, Any]) -> Self:
        """Return the heads as they were bound in a stored run."""
        theirs = dict(spec.get("heads") or ())
        if spec.get("kind") != kind_name(type(self)) or set(theirs) != set(self.heads):
            found = f"has the heads {list(self.heads)}, that of the run {list(theirs) or spec.get('kind')}"
            raise InputError("likelihood", found, "Pass the likelihood of the fit")
        heads = {name: self.heads[name].restored(own) for name, own in theirs.items()}
        shapes, targets = ({n: tuple(s) for n, s in spec[key]} for key in ("shapes", "target_shapes"))
        return replace(self, heads=heads, shapes=shapes, target_shapes=targets)

    # -- parts ---------------------------------------------------------------------------------------------------------
    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yield the heads by name, with the columns of their outputs and targets."""
        first = start = 0
        for name, head in self.heads.items():
            shape, target = tuple(self.shapes[name]), tuple(self.target_shapes[name])
            last, stop = first + math.prod(shape), start + math.prod(target)
            weight = float(self.weights.get(name, 1.0))
            yield name, Part(head, slice(first, last), shape, slice(start, stop), target, weight)
            first, start = last, stop

    def output_of(self, part: Part, output: Tensor) -> Tensor:
        """Return the arranged outputs (C, N, ..., K) of a head, from those of all (C, N, W)."""
        own = output[..., part.columns].reshape(*output.shape[:-1], *part.shape)
        return part.likelihood.arrange(own, output.ndim - 2)

    def target_of(self, part: Part, y: Tensor) -> Tensor:
        """Return a head's prepared targets from those of all heads, (..., T)."""
        own = y[..., part.target_columns].reshape(*y.shape[:-1], *part.target_shape)
        return own.to(torch.int64) if part.likelihood.support == "class" else own

    def extra_of(self, name: str, extra: Extra) -> dict[str, Tensor]:
        """Return the own parameters of a head."""
        return {key.removeprefix(f"{name}."): v for key, v in extra.items() if key.startswith(f"{name}.")}

    def _each(self, output: Tensor, extra: Extra, function: Callable[[Part, Tensor, Extra], Tensor]) -> list[Tensor]:
        """Return function(part, outputs, extra) for every head, flattened to (C, N, elements)."""
        lead = output.shape[:2]
        found = (function(p, self.output_of(p, output), self.extra_of(name, extra)) for name, p in self.parts())
        return [value.reshape(*lead, -1) for value in found]

    # -- the density ---------------------------------------------------------------------------------------------------
    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the weighted sum of the heads' log densities per row, (C, N)."""
        rows = self._each(output, extra, lambda p, o, e: p.weight * p.likelihood.log_prob(o, self.target_of(p, y), e))
        return torch.stack([row.sum(-1) for row in rows]).sum(0)

    def predictive_log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the sum of the heads' log densities per row, without weights, (C, N)."""
        rows = self._each(output, extra, lambda p, o, e: p.likelihood.predictive_log_prob(o, self.target_of(p, y), e))
        return torch.stack([row.sum(-1) for row in rows]).sum(0)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return means and variances of all heads, concatenated, (C, N, elements)."""
        both = (self._each(output, extra, lambda p, o, e, i=i: p.likelihood.moments(o, e)[i]) for i in (0, 1))  # type: ignore[misc]
        mean, variance = (torch.cat(columns, -1) for columns in both)
        return mean, variance

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the sum of the heads' entropies per row, (C, N)."""
        rows = self._each(output, extra, lambda p, o, e: p.likelihood.entropy(o, e))
        return torch.stack([row.sum(-1) for row in rows]).sum(0)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw targets of all heads, concatenated, (C, N, T)."""
        drawn = self._each(output, extra, lambda p, o, e: p.likelihood.sample(o, e, generator))
        return torch.cat([values.to(output.dtype) for values in drawn], -1)
