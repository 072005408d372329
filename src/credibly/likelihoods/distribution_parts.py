"""Moments, entropies, CDFs and quantiles of a `torch.distributions` object, in closed form or else from samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, VonMises, constraints

from credibly.errors import InputError
from credibly.likelihoods.base import Parameter, row_shape

BLOCK_VALUES = 2**22  # samples in memory at a time
MOST_COUNTS = 4096  # probabilities of counts up to this one are summed; beyond it, a CDF is that of samples


@contextmanager
def unvalidated() -> Iterator[None]:
    """Switch the validation of distributions off inside the block.

    It raises on NaN, which a sampler may pass through on a divergent trajectory and has to reject itself.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def start_value(parameter: Parameter, like: Tensor) -> Tensor:
    """Return the starting value of a parameter, in its shape."""
    return torch.as_tensor(parameter.init, dtype=like.dtype, device=like.device).expand(parameter.shape)


def name_of(make: Callable[..., Distribution]) -> str:
    """Return the name of a function, for messages and records."""
    return str(getattr(make, "__qualname__", type(make).__qualname__)).rpartition("<locals>.")[2]


def support_kind(d: Distribution) -> str:
    """Return "class", "binary", "count" or "real"."""
    base: Any = d.base_dist if isinstance(d, Independent) else d
    if isinstance(base, Categorical):
        return "class"
    if isinstance(base, Bernoulli):
        return "binary"
    # The CDF of an element of a vector, such as the counts of a Multinomial, is no sum of probabilities of vectors.
    discrete = not d.event_shape and constraints.is_dependent(base.support) is False and base.support.is_discrete
    return "count" if discrete else "real"


def bounds(d: Distribution) -> tuple[Tensor | float | None, Tensor | float | None]:
    """Return the ends of the support; None for an unbounded side."""
    support: Any = d.support
    support = getattr(support, "base_constraint", support)
    return getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)


def target_form(d: Distribution, output: Tensor, y: Tensor, support: str, name: str) -> tuple[str, bool]:
    """Return the position of targets in the distribution of outputs (rows, ..., W), and whether y lacks their axis.

    The forms are "plain" (no axis of their own), "axis" (the last of the batch) and "event" (a vector per row).
    """
    rest, event, own = d.batch_shape[1:], d.event_shape, y.shape[1:]
    elementwise = output.shape[1:-1]
    if d.batch_shape[:1] == output.shape[:1] and len(event) <= 1:
        if len(event) == 1 and own == (*rest, *event) and support == "real":
            return "event", False
        if not event and own == rest and rest == elementwise:
            return "plain", support != "class"
        if not event and support != "class" and rest[:-1] == elementwise and own == rest:
            return "axis", False
        if not event and support != "class" and rest == (*elementwise, 1) and own == elementwise:
            return "axis", True
    raise InputError(
        "y",
        f"has shape {row_shape(y)}; {name} returns a distribution of batch {tuple(d.batch_shape)} and event "
        f"{tuple(event)} for {len(output)} rows",
        "Return one distribution per element of y, with rows first",
    )


def within_support(d: Distribution, y: Tensor) -> None:
    """Raise if a target lies outside a support that is the same for all rows."""
    low, high = bounds(d)
    for end, sign in ((low, 1), (high, -1)):
        if isinstance(end, (int, float)) and bool((sign * y < sign * end).any()):
            found = f"has values outside the support of {type(d).__name__}, such as "
            raise InputError("y", f"{found}{float(y[sign * y < sign * end][0]):g}", f"Its support ends at {end:g}")
    discrete = getattr(d.support, "is_discrete", False)
    if discrete and y.is_floating_point() and bool((y != y.round()).any()):
        raise InputError("y", f"has values that are not integers, and {type(d).__name__} is discrete")


# -- closed forms ------------------------------------------------------------------------------------------------------
def _mean(d: Distribution) -> Tensor:
    """Return the mean, or the median if the mean does not exist."""
    mean = d.mean
    if not bool(torch.isnan(mean).any()):
        return mean
    try:
        return torch.where(torch.isnan(mean), d.icdf(torch.full_like(mean, 0.5)), mean)
    except NotImplementedError:
        return mean


def _variance(d: Distribution) -> Tensor:
    """Return the variance; of an angle, the mean squared distance from its mean direction, in radians.

    torch's variance of a von Mises distribution is the circular one, 1 - E cos(y - loc), which is about half of that.
    """
    base: Any = d.base_dist if isinstance(d, Independent) else d
    if not isinstance(base, VonMises):
        return d.variance
    kappa = base.concentration.unsqueeze(-1)
    # Relative to its mode the density is at most exp(-2 kappa t^2 / pi^2): 2e-13 at the end, unless that is pi.
    end = (12 * kappa.rsqrt()).clamp_max(math.pi)
    t = end * torch.linspace(-1, 1, 513, dtype=kappa.dtype, device=kappa.device)
    weight = (-2 * kappa * (t / 2).sin().square()).exp()
    # The trapezoidal rule: its relative error is below 1e-5, and largest for small kappa.
    weight = torch.cat([weight[..., :1] / 2, weight[..., 1:-1], weight[..., -1:] / 2], -1)
    return (t.square() * weight).sum(-1) / weight.sum(-1)


def _cdf(d: Distribution, value: Tensor) -> Tensor:
    """Return the CDF, also outside the support."""
    base: Any = d.base_dist if isinstance(d, Independent) else d
    low, high = bounds(base)
    inside = value
    if low is not None:
        inside = torch.maximum(inside, _just_inside(low, value, 1))
    if high is not None:
        inside = torch.minimum(inside, _just_inside(high, value, -1))
    found: Tensor = base.cdf(inside)
    if low is not None:
        found = torch.where(value <= low, 0.0, found) if not base.support.is_discrete else found
    if high is not None:
        found = torch.where(value >= high, 1.0, found)
    return found


def _just_inside(end: Tensor | float, value: Tensor, sign: int) -> Tensor:
    at = torch.as_tensor(end, dtype=value.dtype, device=value.device)
    return at + sign * torch.finfo(value.dtype).eps * at.abs().clamp_min(torch.finfo(value.dtype).tiny ** 0.5)


CLOSED_FORMS: dict[str, Callable[..., Tensor]] = {
    "mean": _mean,
    "variance": _variance,
    "entropy": lambda d: d.entropy(),
    "cdf": _cdf,
}


def missing_parts(d: Distribution, support: str) -> tuple[str, ...]:
    """Return which of the closed forms a distribution does not have."""
    missing = []
    for name, function in CLOSED_FORMS.items():
        try:
            value = function(d, d.sample()) if name == "cdf" else function(d)
        except (NotImplementedError, AttributeError, TypeError):
            missing.append(name)
            continue
        if name in ("mean", "variance") and bool(torch.isnan(value).any()):
            missing.append(name)
    if support == "count" and "cdf" in missing:
        missing[missing.index("cdf")] = "summed cdf"
    # One set of samples serves both moments.
    return tuple(sorted({*missing, "mean", "variance"} if "mean" in missing else missing))


# -- from samples ------------------------------------------------------------------------------------------------------
def _draw(d: Distribution, count: int) -> Tensor:
    return d.rsample((count,)) if d.has_rsample else d.sample((count,))


def _chunks(d: Distribution, count: int) -> Iterator[Tensor]:
    size = max(1, BLOCK_VALUES // max(1, int(torch.Size(d.batch_shape + d.event_shape).numel())))
    for first in range(0, count, size):
        yield _draw(d, min(size, count - first))


def sampled_moments(d: Distribution, count: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance of `count` samples."""
    shift: Tensor | None = None
    first = second = torch.zeros((), dtype=torch.float64)
    for drawn in _chunks(d, count):
        # Differences from a rough mean keep the digits that a difference of large squares would lose.
        shift = drawn.detach().mean(0) if shift is None else shift
        away = (drawn - shift).double()
        first, second = first.to(away.device) + away.sum(0), second.to(away.device) + away.square().sum(0)
    assert shift is not None
    mean = first / count
    variance = (second / count - mean.square()).clamp_min(0) * (count / (count - 1))
    return (shift + mean).to(shift.dtype), variance.to(shift.dtype)


def sampled_entropy(d: Distribution, count: int) -> tuple[Tensor, Tensor]:
    """Return the entropy, -E log p, and the variance of -log p, from `count` samples."""
    surprise = torch.cat([-d.log_prob(drawn) for drawn in _chunks(d, count)])
    return surprise.mean(0, dtype=torch.float64).to(surprise.dtype), surprise.var(0)


def sampled_cdf(d: Distribution, value: Tensor, count: int, *, counts: bool) -> Tensor:
    """Return P(y <= value): a sum over counts if they are few, else the fraction of samples."""
    if counts and float(value.max()) <= MOST_COUNTS:
        return _summed(d, value)
    total = torch.zeros_like(value)
    for drawn in _chunks(d, count):
        total = total + (drawn.detach() <= value).sum(0).to(value.dtype)
    return total / count


def _summed(d: Distribution, value: Tensor) -> Tensor:
    """Return the sum of the probabilities of 0 to floor(value)."""
    last = torch.floor(value)
    total = torch.zeros_like(value, dtype=torch.float64)
    top = int(last.max())
    size = max(1, BLOCK_VALUES // max(1, value.numel()))
    for first in range(0, top + 1, size):
        k = torch.arange(first, min(top, first + size - 1) + 1, dtype=value.dtype, device=value.device)
        k = k.reshape(-1, *(1,) * value.ndim).expand(-1, *value.shape)
        p = d.log_prob(k).double().exp().nan_to_num(nan=0.0)
        total = total + torch.where(k <= last, p, 0.0).sum(0)
    return total.clamp_max(1.0).to(value.dtype)


def sampled_quantiles(draw: Callable[[Tensor], Tensor], each: int, output: Tensor, levels: Sequence[float]) -> Tensor:
    """Return quantiles (levels, N, ..., K) of `each` samples per draw, pooled over draws.

    `draw` returns samples (each, C, rows, ..., K) for the outputs (C, rows, ..., W) of some rows.
    """
    size = max(1, BLOCK_VALUES // (each * max(1, output[:, :1].numel())))
    found = []
    for rows in output.split(size, 1):
        order = draw(rows).flatten(0, 1).to(output.dtype).sort(0).values
        found.append(order[[min(len(order) - 1, max(0, round(q * len(order) - 0.5))) for q in levels]])
    return torch.cat(found, 1)
