"""The prior of the flat vector, (C, D) -> (C,): elementwise priors by name pattern, with fan-in scaling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.networks.layout import Entry, Layout
from credibly.priors.elementwise import Normal, Prior, Shrink
from credibly.priors.gaussian import BoundGaussianPrior, GaussianPrior

_ADVICE = (
    "Pass one of credibly.priors.elementwise (Normal, Laplace, StudentT, ScaleMixture), a subclass of Prior, "
    "or posterior.as_prior()"
)


@dataclass(frozen=True)
class Segment:
    """Coordinates start to stop of the flat vector, their prior and the factor of its scale."""

    start: int
    stop: int
    prior: Prior
    shrink: Shrink


class BoundPrior:
    """The prior of the flat vector: contiguous segments, each with one elementwise prior.

    The first `groups` segments (by default all) belong to the network, the others to the likelihood's own parameters.
    """

    def __init__(
        self, segments: list[Segment], dim: int, device: torch.device, dtype: torch.dtype, groups: int | None = None
    ) -> None:
        self.segments = tuple(segments)
        self.groups = len(segments) if groups is None else groups
        self.dim = dim
        self.device = device
        self.dtype = dtype

    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the normalised log density: (C, D) -> (C,)."""
        if len(self.segments) == 1:
            return self.segments[0].prior.total_log_prob(theta, self.segments[0].shrink)
        parts = [s.prior.total_log_prob(theta[..., s.start : s.stop], s.shrink) for s in self.segments]
        return torch.stack(parts).sum(0)

    def expected_log_prob(
        self, loc: Tensor, variance: Tensor, draws: Tensor, stretch: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """Return E_q log p(w), (M,), for Gaussians q with means `loc` and variances `variance`, (M, D) each.

        Normal priors have a closed form; others are averaged over draws (M, K, D) of q. `stretch` (M, groups)
        multiplies the scale of each of the network's segments, if that is learned. The off-diagonal covariance of q,
        `factor`, is irrelevant: the coordinates of this prior are independent.
        """
        parts = []
        for i, segment in enumerate(self.segments):
            here = slice(segment.start, segment.stop)
            scale = segment.shrink
            if stretch is not None and i < self.groups:
                scale = scale * stretch[:, i : i + 1]
            if isinstance(segment.prior, Normal):
                trace = (variance[:, here] / (segment.prior.scale * scale) ** 2).sum(-1)
                parts.append(segment.prior.total_log_prob(loc[:, here], scale) - 0.5 * trace)
            else:
                per_draw = scale.unsqueeze(1) if isinstance(scale, Tensor) and scale.ndim == 2 else scale
                parts.append(segment.prior.log_prob(draws[..., here], per_draw).sum(-1).mean(1))
        return torch.stack(parts).sum(0)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw samples (count, D)."""
        parts = [
            s.prior.sample((count, s.stop - s.start), generator, dtype=self.dtype, shrink=s.shrink)
            for s in self.segments
        ]
        return torch.cat(parts, -1)

    @property
    def std(self) -> Tensor:
        """Standard deviation of every coordinate, (D,)."""
        ones = torch.ones(self.dim, device=self.device, dtype=self.dtype)
        return torch.cat([ones[s.start : s.stop] * s.prior.std * s.shrink for s in self.segments])

    @property
    def same_std(self) -> Tensor | None:
        """The standard deviation of all coordinates, (), if it is one positive number; None otherwise."""
        one = torch.ones((), device=self.device, dtype=self.dtype)
        values = [one * s.prior.std * s.shrink for s in self.segments]
        same = all(v.ndim == 0 and bool(v == values[0]) for v in values)
        return values[0] if same and 0 < float(values[0]) < math.inf else None

    @property
    def loc(self) -> Tensor:
        """Mode of every coordinate, (D,)."""
        ones = torch.ones(self.dim, device=self.device, dtype=self.dtype)
        return torch.cat([ones[s.start : s.stop] * s.prior.centre for s in self.segments])

    @property
    def is_normal(self) -> bool:
        """Whether every coordinate has a Normal prior."""
        return all(isinstance(s.prior, Normal) for s in self.segments)

    @property
    def closed_form(self) -> bool:
        """Whether `expected_log_prob` needs no draws."""
        return self.is_normal


def bind(
    prior: Prior | Mapping[str, Prior] | GaussianPrior,
    layout: Layout,
    extra: Mapping[str, Prior | tuple[Prior, ...]] | None = None,
) -> BoundPrior | BoundGaussianPrior:
    """Return the prior of a layout's flat vector.

    Args:
        prior: one prior for all parameters, or {name pattern: prior}, where the first matching pattern applies. A
            `GaussianPrior` covers the full vector, including the layout's extra tensors.
        layout: the parameters in the flat vector.
        extra: priors of the layout's extra tensors, by name: one for all elements, or one per element.
    """
    if isinstance(prior, GaussianPrior):
        return prior.bind(layout)
    merged = _merge(segments_of(prior, layout, extra), layout)
    count = sum(s.stop <= layout.network_dim for s in merged)
    return BoundPrior(merged, layout.dim, layout.device, layout.dtype, count)


def segments_of(
    prior: Prior | Mapping[str, Prior], layout: Layout, extra: Mapping[str, Prior | tuple[Prior, ...]] | None = None
) -> list[Segment]:
    """Return one segment per tensor of the network, and one per element of the extra tensors. Raise on bad priors."""
    groups = dict(prior) if isinstance(prior, Mapping) else {"*": prior}
    for pattern, member in groups.items():
        if isinstance(member, type):
            found = f"must be a prior, got the class {member.__name__} for {pattern!r}"
            raise InputError("prior", found, f"Pass an instance, such as {member.__name__}()")
        missing = [m for m in ("log_prob", "sample") if not callable(getattr(member, m, None))]
        if missing:
            found = f"{type(member).__name__} for {pattern!r} has no method {' and no '.join(missing)}"
            raise InputError("prior", found, _ADVICE)
        absent = [a for a in ("fan_in", "total_log_prob") if not hasattr(member, a)]
        if absent:
            found = f"{type(member).__name__} for {pattern!r} has no {' and no '.join(absent)}"
            raise InputError("prior", found, _ADVICE)
    used = set()
    segments: list[Segment] = []
    for entry, chosen_pattern in assigned(groups, layout):
        used.add(chosen_pattern)
        chosen = groups[chosen_pattern]
        shrink = entry.fan_in**-0.5 if chosen.fan_in else 1.0
        segments.append(Segment(entry.start, entry.stop, chosen, shrink))
    for entry in layout.entries:
        if entry.name in layout.extra:
            own = (extra or {})[entry.name]
            each = own if isinstance(own, tuple) else (own,) * (entry.stop - entry.start)
            segments += [Segment(entry.start + i, entry.start + i + 1, member, 1.0) for i, member in enumerate(each)]
    unused = [p for p in groups if p not in used]
    if unused and not (len(unused) == 1 and unused[0] == "*"):
        names = [e.name for e in layout.entries if e.name not in layout.extra]
        raise InputError(
            "prior",
            f"pattern {unused[0]!r} matches no random parameter that an earlier pattern does not",
            f"The names are {', '.join(names[:12])}",
        )
    return segments


def assigned(groups: Mapping[str, Prior], layout: Layout) -> Iterator[tuple[Entry, str]]:
    """Yield the network's parameters, each with the first pattern that matches it. Raise if none does."""
    for entry in layout.entries:
        if entry.name not in layout.extra:
            pattern = next((p for p in groups if fnmatchcase(entry.name, p)), None)
            if pattern is None:
                raise InputError(
                    "prior", f"no pattern matches parameter {entry.name!r}", 'Add one, or "*" for all others'
                )
            yield entry, pattern


def _merge(segments: list[Segment], layout: Layout) -> list[Segment]:
    """Merge neighbours with the same prior into one segment; different fan-in factors become a vector.

    The network's and the likelihood's coordinates are never merged.
    """
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and runs[-1][-1].prior == segment.prior and segment.start != layout.network_dim:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    merged = []
    for run in runs:
        shrinks = {float(s.shrink) for s in run}
        shrink: Shrink = shrinks.pop()
        if shrinks:
            shrink = torch.cat([torch.full((s.stop - s.start,), float(s.shrink), dtype=layout.dtype) for s in run]).to(
                layout.device
            )
        merged.append(Segment(run[0].start, run[-1].stop, run[0].prior, shrink))
    return merged
