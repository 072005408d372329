"""Predictions of a network with several heads: one `Predictive` per head, from the same draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NoReturn

import torch
from torch import Tensor

from credibly.core.autodiff import requires_grad
from credibly.core.checks import check_integer
from credibly.core.inputs import Inputs, map_inputs
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.likelihoods.heads import Heads, Part
from credibly.predictive.base import Predictive
from credibly.predictive.display import predictive_table
from credibly.predictive.rescaling import WithLikelihood
from credibly.predictive.source import DrawSource


class HeadsPredictive(Predictive):
    """Predictions of several heads: `predictive["name"]` is the `Predictive` of one head, `log_prob` is joint."""

    likelihood: Heads

    @property
    def heads(self) -> dict[str, Predictive]:
        """The predictions of every head, by name."""
        return {name: self[name] for name in self.likelihood.heads}

    def __getitem__(self, name: str) -> Predictive:
        part = dict(self.likelihood.parts()).get(name)
        if part is None:
            raise InputError("head", f"must be one of {', '.join(self.likelihood.heads)}, got {name!r}")
        found = self._predictive_of(name, OneHead(self._source, self.likelihood, name, part))
        if self._fits() and not requires_grad(self._x):
            # One forward pass serves all heads.
            for outputs in self.map_blocks(lambda output, extra, start: output):
                found._cached = self.likelihood.output_of(part, outputs)
        return found

    def _predictive_of(self, name: str, source: OneHead) -> Predictive:
        return Predictive(source, self._x)

    def __iter__(self) -> Iterator[str]:
        return iter(self.likelihood.heads)

    def prepared(self, y: object) -> Tensor:
        """Return targets by head as one tensor (N, T)."""
        if not isinstance(y, Mapping):
            raise InputError("y", f"must be a dict of targets for {', '.join(self)}, got {type(y).__name__}")
        sample = self._source.outputs(map_inputs(lambda t: t[:1], self._x), 0, 1)
        target = self.likelihood.prepared(y, self._result_dtype(sample), sample.device)
        if len(target) != self.rows:
            raise InputError("y", f"has {len(target)} rows, these predictions have {self.rows}")
        return target

    def sample(self, count: int = 1, *, seed: int = 0) -> Any:
        """Draw samples of all heads jointly, {name: (count, N, ...)}; each uses one draw of the weights."""
        check_integer("count", count)
        picks = torch.randint(self.draws, (count,), generator=stream(check_seed(seed), "predictive draws"))
        found: dict[str, Tensor] = {}
        for name, one in self.heads.items():

            def block(output: Tensor, extra: dict[str, Tensor], start: int, one: Predictive = one) -> Tensor:
                generator = stream(seed, f"predictive noise {name}", start, device=output.device)  # noqa: B023
                chosen = picks.to(output.device)
                own = {k: v[chosen] for k, v in extra.items()}
                return one.likelihood.sample(output[chosen], own, generator)

            drawn = torch.cat(list(one.map_blocks(block)), 1)
            found[name] = drawn if one.likelihood.support == "class" else one.likelihood.restore(drawn, 1)
        return found

    def subset(self, rows: Tensor) -> HeadsPredictive:
        """Return the predictions of the same draws at the given rows."""
        return HeadsPredictive(self._source, map_inputs(lambda t: t[rows.to(t.device)], self._x))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        names = list(self.likelihood.heads)
        raise InputError(
            "predictive", f"is of the heads {', '.join(names)}", f"Ask one of them, as in predictive[{names[0]!r}].mean"
        )

    _mean = _summary = probabilities = mean = property(_refuse)
    quantile = interval = cdf = prediction_set = ood_score = _refuse

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(name)}</p>{predictive_table(one)}" for name, one in self.heads.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows} rows, {self.draws} draws, {', '.join(self.likelihood.heads)})"


class OneHead(WithLikelihood):
    """A source with the outputs and own parameters of one head."""

    def __init__(self, inner: DrawSource, heads: Heads, name: str, part: Part) -> None:
        super().__init__(inner, part.likelihood)
        self.heads, self.name, self.part = heads, name, part

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the arranged outputs of the head."""
        return self.heads.output_of(self.part, self.inner.outputs(x, start, stop, first_row))

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the own parameters of the head."""
        return self.heads.extra_of(self.name, self.inner.extra(start, stop))


def predictive_of(source: DrawSource, x: Inputs) -> Predictive:
    """Return the predictive of a source: with one likelihood, or with several heads."""
    return (HeadsPredictive if isinstance(source.likelihood, Heads) else Predictive)(source, x)
