"""Information measures of distributions, in nats: in closed form if there is one, else by Monte Carlo with its error.

A distribution is a `torch.distributions.Distribution`, or a tensor of probabilities whose last axis runs over the
outcomes. Leading axes are a batch and broadcast; the outcomes do not. 0 log 0 is 0. Closed forms are differentiable;
Monte Carlo values have no gradient. The global random state is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributions as td

from credibly.core.checks import check_integer
from credibly.errors import InputError

_CHUNK_VALUES = 2**22  # values of Monte Carlo draws held at a time


class Estimate(NamedTuple):
    """A value and the standard error of its Monte Carlo estimate, 0 if the value is exact."""

    value: Tensor
    standard_error: Tensor


class _Table(NamedTuple):
    """Probabilities and their logarithms, (..., K). Both, as a probability may underflow where its log does not."""

    p: Tensor
    log_p: Tensor


def self_information(p: td.Distribution | Tensor, outcome: Tensor | float) -> Estimate:
    """Return I(x) = -log p(x), infinite where p(x) = 0.

    Args:
        p: a distribution, or probabilities (..., K).
        outcome: a value of the distribution, or for probabilities the index of an outcome, 0..K-1, shape (...).
    """
    table, event = _table("p", p), _untyped(p).event_shape if isinstance(p, td.Distribution) else ()
    x = torch.as_tensor(outcome)
    if x.numel() == 0 or (x.is_floating_point() and bool(x.isnan().any())):
        raise InputError("outcome", "must not be empty or NaN")
    if tuple(x.shape[x.dim() - len(event) :]) != tuple(event):
        raise InputError("outcome", f"must end in the event shape {tuple(event)}, got {tuple(x.shape)}")
    if table is None:
        return _without_error(-_log_prob(p, x))
    if isinstance(p, td.OneHotCategorical):
        if not bool((((x == 0) | (x == 1)).all(-1) & (x.sum(-1) == 1)).all()):
            raise InputError("outcome", "must be one-hot")
        x = x.argmax(-1)
    return _without_error(-_pick(table.log_p, x))


def entropy(p: td.Distribution | Tensor, *, samples: int = 10_000, seed: int = 0) -> Estimate:
    """Return H(P) = -E_P[log p(x)], for densities the differential entropy, in the batch shape of p.

    Args:
        p: a distribution, or probabilities (..., K).
        samples: number of draws of p if there is no closed form.
        seed: seed of those draws.
    """
    _check_samples(samples)
    table = _table("p", p)
    if table is not None:
        return _without_error(_cross(table, table).clamp(min=0))
    closed = _closed_entropy(p)
    if closed is not None:
        return _without_error(closed)
    return _monte_carlo(p, lambda x: -_untyped(p).log_prob(x), samples, seed)


def kl_divergence(
    p: td.Distribution | Tensor, q: td.Distribution | Tensor, *, samples: int = 10_000, seed: int = 0
) -> Estimate:
    """Return D_KL(P || Q) = E_P[log p(x) - log q(x)] >= 0, infinite if P has mass where Q has none.

    A Monte Carlo value is unbiased, so it may be slightly negative, and it is infinite only if a draw of P lands where
    Q has no mass. The arguments are those of `cross_entropy`.
    """
    _check_samples(samples)
    tables = _pair(p, q)
    if tables is not None:
        t, u = tables
        terms = torch.where(torch.isneginf(u.log_p), torch.inf, t.p * (t.log_p - u.log_p))
        return _without_error(torch.where(torch.isneginf(t.log_p), 0, terms).sum(-1).clamp(min=0))
    closed = _closed_kl(p, q)
    if closed is not None:
        return _without_error(closed.clamp(min=0))  # closed forms may round to slightly below 0 where P = Q
    return _monte_carlo(p, lambda x: _untyped(p).log_prob(x) - _log_prob(q, x), samples, seed, like=q)


def cross_entropy(
    p: td.Distribution | Tensor, q: td.Distribution | Tensor, *, samples: int = 10_000, seed: int = 0
) -> Estimate:
    """Return H(P, Q) = -E_P[log q(x)] = H(P) + D_KL(P || Q), in the broadcast batch shape of p and q.

    It is the sum of `entropy` and `kl_divergence` with the same draws of P: the identity also holds for Monte Carlo
    values of the same seed, and a term with a closed form adds no error.

    Args:
        p: a distribution, or probabilities (..., K).
        q: another over the same outcomes.
        samples: number of draws of p if there is no closed form.
        seed: seed of those draws.
    """
    _check_samples(samples)
    tables = _pair(p, q)
    if tables is not None:
        return _without_error(_cross(*tables).clamp(min=0))
    h, kl = _closed_entropy(p), _closed_kl(p, q)
    if h is None and kl is None:
        return _monte_carlo(p, lambda x: -_log_prob(q, x), samples, seed, like=q)
    a = entropy(p, samples=samples, seed=seed)
    b = kl_divergence(p, q, samples=samples, seed=seed)
    return Estimate(a.value + b.value, a.standard_error + b.standard_error)  # one of the two errors is 0


def mutual_information(joint: Tensor) -> Estimate:
    """Return I(A; B) = sum_ab p(a,b) log[p(a,b) / (p(a) p(b))], (...), of a joint probability table (..., A, B)."""
    if isinstance(joint, Tensor) and joint.dim() < 2:
        raise InputError("joint", f"must have shape (..., A, B), got {tuple(joint.shape)}")
    joint = check_probabilities("joint", joint, axes=2)
    a, b = joint.sum(-1, keepdim=True), joint.sum(-2, keepdim=True)
    # Separate logs: p(a) p(b) may underflow where neither factor does.
    terms = torch.xlogy(joint, joint) - torch.xlogy(joint, a) - torch.xlogy(joint, b)
    return _without_error(terms.sum((-2, -1)).clamp(min=0))


def mutual_information_of_draws(probabilities: Tensor) -> Estimate:
    """Return H[mean_s p_s] - mean_s H[p_s] = mean_s D_KL(p_s || mean_s p_s), (...), of probabilities (draws, ..., K).

    The standard error is that of the average over the draws, treated as independent; infinite for a single draw.
    """
    if isinstance(probabilities, Tensor) and probabilities.dim() < 2:
        raise InputError("probabilities", f"must have shape (draws, ..., K), got {tuple(probabilities.shape)}")
    p = check_probabilities("probabilities", probabilities)
    mean = p.mean(0).clamp(min=torch.finfo(p.dtype).tiny)  # the mean of tiny positive values may underflow to 0
    kl = (torch.xlogy(p, p) - torch.xlogy(p, mean)).sum(-1)
    # The error of the mean vanishes to first order: mean_s D_KL(p_s || m) is smallest at m = mean_s p_s.
    value = kl.mean(0).clamp(min=0)
    error = kl.std(0) / math.sqrt(len(p)) if len(p) > 1 else torch.full_like(value, torch.inf)
    return Estimate(value, error)


def log_mean_exp(x: Tensor, dim: int | tuple[int, ...] = 0) -> Tensor:
    """Return log mean exp(x) over dim without overflow, such as the log of an average of densities."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0 or not dims:
        raise InputError("x", "must be a non-empty floating-point tensor, with at least one axis in dim")
    return torch.logsumexp(x, dims) - math.log(math.prod(x.shape[d] for d in dims))


def check_probabilities(argument: str, p: Any, axes: int = 1) -> Tensor:
    """Return p in float32 or wider; raise unless its last `axes` axes hold probabilities that sum to 1."""
    if not isinstance(p, Tensor) or not p.is_floating_point() or p.dim() < axes or p.numel() == 0:
        found = f"{tuple(p.shape)} of {p.dtype}" if isinstance(p, Tensor) else type(p).__name__
        raise InputError(argument, f"must be a non-empty floating-point tensor of probabilities, got {found}")
    result: Tensor = p.to(torch.promote_types(p.dtype, torch.float32))
    if not bool((result >= 0).all()):  # false for NaN too
        raise InputError(argument, "has negative or NaN values", "Pass probabilities, not logits: apply softmax first")
    error = float((result.detach().sum(tuple(range(-axes, 0))) - 1).abs().max())
    if not error <= max(1e-5, 8 * torch.finfo(p.dtype).eps):
        raise InputError(argument, f"must sum to 1, the sum is off by up to {error:.3g}")
    return result


def _without_error(value: Tensor) -> Estimate:
    return Estimate(value, torch.zeros_like(value).detach())


def _untyped(p: object) -> Any:
    """Return the object untyped: torch's distributions have few annotations."""
    return p


def _cross(t: _Table, u: _Table) -> Tensor:
    terms = torch.where(torch.isneginf(u.log_p), torch.inf, -t.p * u.log_p)
    return torch.where(torch.isneginf(t.log_p), 0, terms).sum(-1)


def _pick(log_p: Tensor, outcome: Tensor) -> Tensor:
    """Return log_p (..., K) at the outcomes (...), which broadcast against its batch."""
    outcome = outcome.to(log_p.device)
    index = outcome.long()
    if bool(((index != outcome) | (index < 0) | (index >= log_p.shape[-1])).any()):
        found = f"got values from {outcome.min().item()} to {outcome.max().item()}"
        raise InputError("outcome", f"must be an integer from 0 to {log_p.shape[-1] - 1}, {found}")
    shape = _broadcast("outcome", index.shape, log_p.shape[:-1])
    return log_p.expand(*shape, log_p.shape[-1]).gather(-1, index.expand(shape)[..., None])[..., 0]


def _table(argument: str, p: Any) -> _Table | None:
    """Return the probabilities of a tensor or a categorical distribution; None for any other distribution."""
    if not isinstance(p, td.Distribution):
        p = check_probabilities(argument, p)
        return _Table(p, p.log())
    if not isinstance(p, td.Categorical | td.OneHotCategorical | td.Bernoulli):
        return None
    # Torch clamps the logits of probabilities 0 and 1, so there the probabilities are used. Everywhere else the logits
    # are at least as precise.
    logits, probs, binary = _untyped(p).logits, _untyped(p).probs, isinstance(p, td.Bernoulli)
    ends = _untyped(td.utils).probs_to_logits(probs.new_tensor([0.0, 1.0]), is_binary=binary)
    clamped = torch.isclose(logits[..., None], ends, rtol=4 * torch.finfo(probs.dtype).eps, atol=0).any(-1)
    if not binary:
        return _Table(probs, torch.where(clamped, probs.log(), logits))
    off = torch.where(clamped, torch.log1p(-probs), torch.nn.functional.logsigmoid(-logits))
    log_p = torch.stack([off, torch.where(clamped, probs.log(), torch.nn.functional.logsigmoid(logits))], -1)
    return _Table(log_p.exp(), log_p)


def _pair(p: Any, q: Any) -> tuple[_Table, _Table] | None:
    """Return both as tables, or None if neither is one. Raise unless they are over the same outcomes."""
    t, u = _table("p", p), _table("q", q)
    if t is not None and u is not None:
        if t.p.shape[-1] != u.p.shape[-1]:
            raise InputError("q", f"has {u.p.shape[-1]} outcomes, p has {t.p.shape[-1]}")
        _broadcast("q", u.p.shape, t.p.shape)
        return t, u
    if isinstance(p, Tensor) or isinstance(q, Tensor):
        raise InputError("q", "cannot compare a table of probabilities with a distribution that is not categorical")
    if p.event_shape != q.event_shape or _discrete(p) != _discrete(q):
        events = [f"{type(d).__name__} with event shape {tuple(d.event_shape)}" for d in (q, p)]
        raise InputError("q", f"is a {events[0]}, p is a {events[1]}", "They must be over the same outcomes")
    _broadcast("q", q.batch_shape, p.batch_shape)
    return None


def _broadcast(argument: str, a: torch.Size, b: torch.Size) -> torch.Size:
    try:
        return torch.Size(_untyped(torch).broadcast_shapes(a, b))
    except RuntimeError:
        raise InputError(argument, f"has shape {tuple(a)}, which does not broadcast against {tuple(b)}") from None


def _discrete(p: Any) -> bool:
    if isinstance(p, td.MixtureSameFamily):  # its own `support` does not report this
        return _discrete(p.component_distribution)
    try:
        return bool(p.support.is_discrete)
    except NotImplementedError:
        return False


def _closed_entropy(p: Any) -> Tensor | None:
    if isinstance(p, td.Independent):
        base = _closed_entropy(p.base_dist)
        return None if base is None else _sum_last(base, p.reinterpreted_batch_ndims)
    table = _table("p", p)
    return _cross(table, table) if table is not None else _usable(p.entropy)


def _closed_kl(p: Any, q: Any) -> Tensor | None:
    if isinstance(p, td.Independent) and isinstance(q, td.Independent):
        if p.reinterpreted_batch_ndims != q.reinterpreted_batch_ndims:
            return None
        base = _closed_kl(p.base_dist, q.base_dist)
        return None if base is None else _sum_last(base, p.reinterpreted_batch_ndims)
    if _table("p", p) is not None and _table("q", q) is not None:
        return kl_divergence(p, q).value
    if {type(p), type(q)} == {td.Uniform, td.ContinuousBernoulli}:
        return None  # torch's formula returns infinity where the supports share an endpoint, as on [0, 1] itself
    return _usable(lambda: td.kl_divergence(p, q))


def _sum_last(x: Tensor, dims: int) -> Tensor:
    return x.sum(tuple(range(-dims, 0))) if dims else x


def _usable(closed_form: Callable[[], Tensor]) -> Tensor | None:
    """Return the closed form, or None if torch has none or it breaks down, as Binomial's does at probability 1."""
    try:
        value = closed_form()
    except NotImplementedError:
        return None
    return None if bool((value.isnan() | value.isneginf()).any()) else value


def _log_prob(q: Any, x: Tensor) -> Tensor:
    """Return log q(x), -inf outside the support, where torch would raise."""
    try:
        inside = q.support.check(x)
    except NotImplementedError:
        inside = torch.ones((), dtype=torch.bool)
    if bool(inside.all()):
        return torch.as_tensor(q.log_prob(x))
    with _seeded(0):
        inner = q.sample()  # any point inside the support, as a placeholder for those outside
    at = torch.where(inside.reshape(inside.shape + (1,) * len(q.event_shape)), x, inner)
    return torch.where(inside, q.log_prob(at), -torch.inf)


def _check_samples(samples: int) -> None:
    check_integer("samples", samples, least=2, advice="A standard error needs two draws")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators inside the context and restore the global random state after it."""
    # torch.manual_seed would also seed a GPU that is initialised later, after the context has ended. So devices are
    # seeded one by one, and GPUs only if CUDA is initialised.
    initialised = _untyped(torch.cuda).is_initialized()
    with torch.random.fork_rng(list(range(torch.cuda.device_count())) if initialised else []):
        torch.default_generator.manual_seed(seed)
        if initialised:
            torch.cuda.manual_seed_all(seed)
        yield


def _monte_carlo(p: Any, f: Callable[[Tensor], Tensor], samples: int, seed: int, like: Any = None) -> Estimate:
    """Return the mean of f(x) over draws x of p, in chunks whose size depends on p alone: the seed fixes the draws."""
    size = math.prod(p.batch_shape + p.event_shape)
    if isinstance(p, td.MixtureSameFamily):
        size *= p.mixture_distribution.logits.shape[-1]
    chunk = max(1, min(samples, _CHUNK_VALUES // max(1, size)))
    extra = 0 if like is None else max(0, len(like.batch_shape) - len(p.batch_shape))
    done, mean, squares, infinite = 0, torch.zeros(()), torch.zeros(()), torch.zeros((), dtype=torch.bool)
    with torch.no_grad(), _seeded(seed):
        while done < samples:
            n = min(chunk, samples - done)
            x = p.sample((n,))
            values = f(x.reshape((n,) + (1,) * extra + x.shape[1:]))  # draws stay first if q has more axes
            if done == 0:
                mean, squares = torch.zeros_like(values[0]), torch.zeros_like(values[0])
                infinite = torch.zeros_like(values[0], dtype=torch.bool)
            infinite |= torch.isposinf(values).any(0)
            values = values.masked_fill(torch.isposinf(values), 0)
            step = values.mean(0) - mean
            squares += (values - values.mean(0)).square().sum(0) + step.square() * (done * n / (done + n))
            mean += step * (n / (done + n))
            done += n
    # A draw of infinite value makes the mean infinite without error.
    error = (squares / (samples - 1) / samples).sqrt().masked_fill(infinite, 0)
    return Estimate(mean.masked_fill(infinite, torch.inf), error)
