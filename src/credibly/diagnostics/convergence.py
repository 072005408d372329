"""How well chains have mixed, coordinate by coordinate: R-hat, effective sample size, Monte-Carlo error, E-BFMI.

The definitions are those of Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021). arviz-stats has the same ones but visits
coordinates one at a time in Python; here blocks of columns share one sort and one Fourier transform, which is several times as
fast, runs on the device that holds the draws, and gives the same numbers (the tests hold both to 1e-10).

Draws are (chain, draw, ...) and results (...), in float64. Every chain is cut into halves (an odd draw in the middle is left
out), so that one chain is enough. A coordinate with NaN among its draws gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.errors import InputError

Draws = TypeVar("Draws", Tensor, npt.NDArray[Any])

BLOCK_VALUES = {"cpu": 2**16, "cuda": 2**25}  # draws looked at together: what caches hold, or what fills a GPU
TAILS = (0.05, 0.95)  # the quantiles whose estimates are called the tails
MIN_DRAWS = 4  # halves of two


class Measures(NamedTuple):
    """What the draws of k coordinates say: R-hat and three kinds of ESS, (k,); and what is wrong with the draws themselves."""

    rhat: Tensor
    bulk: Tensor
    tail: Tensor
    mean: Tensor
    finite: Tensor  # no NaN, no infinity, (k,)
    constant: Tensor  # one value in all half-chains, (k,)
    still: Tensor  # one value in all draws of this chain, (k, chain)


def rhat(draws: Draws) -> Draws:
    """Rank-normalised split R-hat: 1 where the halves of all chains agree in place and in spread, above 1 where not.

    R = sqrt(((n - 1)/n W + B/n) / W), with W the mean variance within a half-chain of n draws and B/n the variance of the
    half-chains' means, of normal scores of the ranks; the larger of this for x and for |x - median|. Chains that do not move
    and differ give infinity; a coordinate with one value throughout gives NaN.
    """
    return _each("draws", draws, lambda block: block.rhat)


def ess(draws: Draws, kind: Literal["bulk", "tail", "mean"] = "bulk") -> Draws:
    """Effective sample size: how many independent draws would estimate as well as these do.

    ESS = S / (1 + 2 sum_t rho_t), rho_t the autocorrelation at lag t over all half-chains, summed while pairs of
    neighbours are positive and made to fall (Geyer's initial monotone sequence). At most S log10(S).

    Args:
        draws: (chain, draw, ...).
        kind: "bulk" for normal scores of the ranks; "tail" for the worse of the 5 % and 95 % quantiles; "mean" for the draws as
            they are, which belongs to the error of the mean.
    """
    if kind not in ("bulk", "tail", "mean"):
        raise InputError("kind", f"found {kind!r}", 'Pass "bulk", "tail" or "mean"')
    return _each("draws", draws, lambda block: getattr(block, kind))


def mcse(draws: Draws, kind: Literal["mean", "sd"] = "mean") -> Draws:
    """Monte-Carlo standard error of the mean, sd / sqrt(ESS), or of the sd, sqrt((E d^4 - (E d^2)^2) / (4 ESS E d^2)).

    d is the deviation from the mean over all draws, ESS that of kind "mean".
    """
    if kind not in ("mean", "sd"):
        raise InputError("kind", f"found {kind!r}", 'Pass "mean" or "sd"')

    def error(block: _Columns) -> Tensor:
        square = (block.values - block.values.mean(1, keepdim=True)).square()
        variance = square.mean(1)
        if kind == "mean":
            return (variance * (block.size / (block.size - 1)) / block.mean).sqrt()
        return ((square.square().mean(1) - variance.square()) / block.mean / variance / 4).sqrt()

    return _each("draws", draws, error)


def e_bfmi(energy: Draws) -> Draws:
    """Energy (chain, draw) to the estimated fraction of missing information (chain,): mean (E_t - E_t-1)^2 / Var E.

    About 1 or more where each new momentum reaches the whole range of energies; below 0.3 it takes many to get there.
    """
    values = _check("energy", energy)
    if values.ndim != 2:
        raise InputError("energy", f"has shape {tuple(values.shape)}", "Pass one energy for each draw, (chain, draw)")
    result = values.double().diff(dim=1).square().mean(1) / values.double().var(1)
    if isinstance(energy, Tensor):
        return result
    return result.numpy()


def measure(draws: Tensor | npt.NDArray[Any]) -> Measures:
    """R-hat and every ESS of draws (chain, draw, k) at once, from one sort of each coordinate."""
    values = _check("draws", draws)
    columns = values.reshape(*values.shape[:2], -1)
    parts = []
    for b in _blocks(columns):
        finite = b.low.isfinite() & b.high.isfinite()
        constant = b.halves.amin((1, 2)) == b.halves.amax((1, 2))
        still = b.raw.amin(2) == b.raw.amax(2)
        parts.append(Measures(b.rhat, b.bulk, b.tail, b.mean, finite, constant, still))
    return Measures(*(torch.cat(column) for column in zip(*parts)))


class _Columns:
    """Draws of some coordinates, (k, chain, draw). What several measures need is computed once, when first asked for."""

    def __init__(self, draws: Tensor) -> None:
        count = draws.shape[2] // 2
        self.raw = draws
        self.values = draws.double().flatten(1)
        self.size = self.values.shape[1]
        self.halves = torch.cat([draws[..., :count], draws[..., draws.shape[2] - count :]], 1)
        self.split = self.halves.shape
        self.low, self.high = self.values.amin(1), self.values.amax(1)  # NaN where there is one

    @cached_property
    def order(self) -> Tensor:
        return _argsort(self.halves.flatten(1))  # before float64: numpy sorts float32 in less time

    @cached_property
    def rising(self) -> Tensor:
        return self.halves.flatten(1).gather(1, self.order).double()

    @cached_property
    def scores(self) -> Tensor:
        return self._normal(self.rising, self.order)

    @cached_property
    def rhat(self) -> Tensor:
        middle = self.rising.shape[1] // 2
        median = (self.rising[:, middle - 1] + self.rising[:, middle]) / 2
        # Distances fall up to the median and rise from there: two runs, which a merge sort joins in one go.
        distance = (self.rising - median[:, None]).abs()
        order = _argsort(distance, runs=True)
        folded = self._normal(distance.gather(1, order), self.order.gather(1, order))
        return self._known(torch.fmax(_plain_rhat(self.scores), _plain_rhat(folded)))

    @cached_property
    def bulk(self) -> Tensor:
        return self._known(_effective(self.scores))

    @cached_property
    def mean(self) -> Tensor:
        return self._known(_effective(self.halves.double()))

    @cached_property
    def tail(self) -> Tensor:
        low, high = (_effective((self.halves <= self._quantile(q)[:, None, None]).double()) for q in TAILS)
        return self._known(torch.minimum(low, high))

    def _quantile(self, level: float) -> Tensor:
        """Linear interpolation between neighbours in order, rounded as numpy.quantile does; of all draws, not of halves."""
        at = (self.size - 1) * level
        below = math.floor(at)
        near = self._places(below, min(below + 1, self.size - 1)).double()
        low, step, share = near[:, 0], near[:, 1] - near[:, 0], at - below
        return low + step * share if share < 0.5 else near[:, 1] - step * (1 - share)

    def _places(self, *places: int) -> Tensor:
        """The draws at these places of the rising order, (k, places)."""
        if "rising" in self.__dict__ and self.rising.shape[1] == self.size:
            return self.rising[:, places]
        if self.raw.device.type == "cpu":
            return torch.from_numpy(np.partition(self.raw.flatten(1).numpy(), places, axis=1))[:, places]
        return self.values.sort(1).values[:, places]

    def _known(self, result: Tensor) -> Tensor:
        return result.masked_fill(self.low.isnan(), math.nan)

    def _normal(self, rising: Tensor, order: Tensor) -> Tensor:
        """Normal scores Phi^-1((rank - 3/8) / (S + 1/4)) of split draws; equal draws share their mean rank."""
        size = rising.shape[1]
        steps = torch.arange(2 * size + 1, dtype=torch.float64, device=rising.device) / 2
        table = torch.special.ndtri((steps - 0.375) / (size + 0.25))  # mean ranks are whole or half: look them up
        place = torch.arange(size, device=rising.device)
        new = rising[:, 1:] != rising[:, :-1]
        if bool(new.all()):
            scores = table[2 * place + 2].expand_as(rising)
        else:
            edge = torch.ones_like(new[:, :1])
            first = (place * torch.cat([edge, new], 1)).cummax(1).values
            last = size - 1 - (place * torch.cat([edge, new.flip(1)], 1)).cummax(1).values.flip(1)
            scores = table[first + last + 2]
        return torch.empty_like(rising).scatter_(1, order, scores).reshape(self.split)


def _plain_rhat(z: Tensor) -> Tensor:
    """sqrt(((n - 1)/n W + B/n) / W) of (k, m, n)."""
    n = z.shape[2]
    means = z.mean(2)
    within = (z - means[..., None]).square().sum((1, 2)) / (z.shape[1] * (n - 1))
    # Scores that differ at all give more than 6/S^3; less is rounding in the mean of equal ones.
    within = within.masked_fill(within < 1e-28, 0.0)
    return ((n - 1) / n + means.var(1) / within).sqrt()


def _effective(y: Tensor) -> Tensor:
    """S / tau of (k, m, n) by Geyer's initial monotone sequence, S = m n."""
    k, m, n = y.shape
    size = m * n
    means = y.mean(2)
    length = _fast_length(2 * n)
    wave = torch.fft.rfft(y - means[..., None], n=length)
    # Chains are averaged before the inverse transform, so one transform back serves all of them.
    power = (wave.real.square() + wave.imag.square()).sum(1)
    autocovariance = torch.fft.irfft(power, n=length)[:, :n] / size
    total = autocovariance[:, :1] + means.var(1)[:, None]
    rho = 1 - (autocovariance[:, :1] * (n / (n - 1)) - autocovariance) / total
    rho[:, 0] = 1
    last = max(0, (n - 3) // 2)
    pairs = rho[:, : 2 * last + 2].reshape(k, last + 1, 2).sum(2)
    stop = (pairs[:, :last] > 0).cumprod(1).sum(1)
    reach = int(stop.max())
    counted = torch.arange(reach, device=y.device) < stop[:, None]
    area = pairs[:, :reach].cummin(1).values.where(counted, 0.0).sum(1)
    # Of the pair that ends the sum, the even lag still counts where it is positive.
    at = stop[:, None]
    even = rho.gather(1, 2 * at)[:, 0]
    even = even.where((pairs.gather(1, at)[:, 0] >= 0) | (even > 0), 0.0)
    tau = (2 * area - 1 + even).clamp_min(1 / math.log10(size))
    result: Tensor = (size / tau).masked_fill(rho[:, 1].isnan(), math.nan)
    return result.masked_fill(y.amax((1, 2)) - y.amin((1, 2)) < 1e-15, size)


def _argsort(values: Tensor, *, runs: bool = False) -> Tensor:
    """Order along the last axis. On the CPU numpy's sort is vectorised, and its stable one merges sorted runs."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), axis=-1, kind="stable" if runs else None))
    return values.argsort(-1)


def _fast_length(least: int) -> int:
    """The smallest 2^a 3^b 5^c that is no less: lengths that Fourier transforms like."""
    best = 1 << (least - 1).bit_length()
    for three in (3**i for i in range(12)):
        for odd in (three * 5**i for i in range(8)):
            if odd < best:
                best = min(best, odd << max(0, (-(-least // odd) - 1).bit_length()))
    return best


def _check(name: str, draws: Any) -> Tensor:
    """Draws (chain, draw, ...) as a tensor, or InputError."""
    if not isinstance(draws, (Tensor, np.ndarray)):
        raise InputError(name, f"is a {type(draws).__name__}", "Pass a tensor or an array of shape (chain, draw, ...)")
    values = draws.detach() if isinstance(draws, Tensor) else _wrapped(name, draws)
    if values.is_complex():
        raise InputError(name, f"has dtype {values.dtype}", "Pass real numbers")
    if values.ndim < 2 or values.numel() == 0:
        raise InputError(name, f"has shape {tuple(values.shape)}", "Pass (chain, draw, ...) with nothing empty")
    if values.shape[1] < MIN_DRAWS:
        found = f"has {values.shape[1]} draws a chain (shape {tuple(values.shape)})"
        raise InputError(
            name, found, f"Pass (chain, draw, ...) with at least {MIN_DRAWS} draws: chains are cut in halves"
        )
    if values.device.type not in BLOCK_VALUES:
        values = values.cpu()  # devices without float64
    return values if values.dtype in (torch.float32, torch.float64) else values.double()


def _wrapped(name: str, array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InputError(name, f"has dtype {array.dtype}", "Pass real numbers")
    return torch.tensor(array) if not array.flags.writeable else torch.as_tensor(array)


def _blocks(columns: Tensor) -> Iterator[_Columns]:
    chains, draws, count = columns.shape
    step = max(1, BLOCK_VALUES[columns.device.type] // (chains * draws))
    for start in range(0, count, step):
        yield _Columns(columns[..., start : start + step].permute(2, 0, 1).contiguous())


def _each(name: str, draws: Draws, f: Callable[[_Columns], Tensor]) -> Draws:
    values = _check(name, draws)
    columns = values.reshape(*values.shape[:2], -1)
    result = torch.cat([f(block) for block in _blocks(columns)]).reshape(values.shape[2:])
    if isinstance(draws, Tensor):
        return result
    return result.numpy()
