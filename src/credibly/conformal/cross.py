"""CV+ and cross-conformal sets: every calibration row has a score under the fit that did not see it.

Fold k has a fit without its rows, with bands Q_k. A calibration row i of fold k(i) and score r_i gives an interval at a
new x, [Q_k(i)(-r_i), Q_k(i)(r_i)], and CV+ (Barber, Candes, Ramdas and Tibshirani 2021) returns order statistics of
their ends: with m = floor((1 - level) (n + 1)), the m-th smallest lower end and the m-th largest upper end. A label
belongs to the cross-conformal set if fewer than (n + 1) level calibration rows have a score below its own.

The ends are not computed one by one. A lower end is at most y exactly if r_i is at least a number that depends on the
fold and y alone, so a sorted list per fold gives the number of ends up to y, and bisection finds the m-th: the work per
row grows with the logarithm of n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from credibly.conformal.bands import Bands

# Halvings of the initial bracket, past the resolution of float64.
HALVINGS = 64
# Values of the bands of all folds up to which they are evaluated together: 1 MiB in float64.
TOGETHER = 2**17


def cross_interval(bands: Sequence[Bands], scores: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return the m-th smallest lower and the m-th largest upper end at N rows, (N, E) each for E targets.

    Args:
        bands: of each fold's fit at the rows.
        scores: of the calibration rows of each fold, (n_k, E) each.
        count: m.
    """
    smallest, largest = _range(scores)
    outer, inner = (torch.stack([b.at(t) for b in bands]) for t in (largest, smallest))
    upper = _end(_upper_indices(bands), scores, count, outer.amax(0), inner.amin(0))
    return cross_lower(bands, scores, count), upper


def cross_lower(bands: Sequence[Bands], scores: Sequence[Tensor], count: int) -> Tensor:
    """Return the m-th smallest lower end alone, (N, E), with the arguments of `cross_interval`."""
    mirrored = _upper_indices([b.mirrored() for b in bands])

    def below(y: Tensor) -> list[Tensor]:
        return mirrored(-y)

    smallest, largest = _range(scores)
    outer, inner = (torch.stack([b.at(-t) for b in bands]) for t in (largest, smallest))
    return _end(below, scores, count, outer.amin(0), inner.amax(0))


def _upper_indices(bands: Sequence[Bands]) -> Callable[[Tensor], list[Tensor]]:
    """Return a function of y (N, E) with its `upper_index` in the bands of each fold."""
    count = len(bands)
    # For a few rows nearly all time is that of calls, so all folds share them; for many the cache decides.
    if count * bands[0].values.numel() > TOGETHER:
        return lambda y: [b.upper_index(y) for b in bands]
    joined = Bands(torch.cat([b.nodes for b in bands], 1), torch.cat([b.values for b in bands], 1))
    return lambda y: list(joined.upper_index(y.repeat(count, 1)).chunk(count))


def cross_shifted(ends: Sequence[tuple[Tensor, Tensor]], scores: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return the same for the intervals [lower - score, upper + score] of each fold, (N, E) each."""

    def below(y: Tensor) -> list[Tensor]:
        return [lower - y for lower, _ in ends]

    def above(y: Tensor) -> list[Tensor]:
        return [y - upper for _, upper in ends]

    lower, upper = (torch.stack(part) for part in zip(*ends))
    smallest, largest = _range(scores)
    return (
        _end(below, scores, count, lower.amin(0) - largest, lower.amax(0) - smallest),
        _end(above, scores, count, upper.amax(0) + largest, upper.amin(0) + smallest),
    )


def cross_counts(scores: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
    """Return how many calibration rows have a score below that of each label, (N, E, K).

    Args:
        scores: of the calibration rows of each fold, (n_k, E) each.
        own: scores of all labels at N rows by each fold's fit, (N, E, K) each.
    """
    found = []
    for s, o in zip(scores, own):
        by_target = o.transpose(0, 1)
        below = torch.searchsorted(_ordered(s), by_target.flatten(1).contiguous())
        found.append(below.reshape(by_target.shape).transpose(0, 1))
    return torch.stack(found).sum(0)


def _end(
    needed: Callable[[Tensor], list[Tensor]], scores: Sequence[Tensor], count: int, outer: Tensor, inner: Tensor
) -> Tensor:
    """Return the point closest to `outer` that at least `count` of the intervals contain on this side, by bisection.

    Args:
        needed: the score from which on the interval of a calibration row reaches y, per fold.
        scores: of the calibration rows of each fold.
        count: number of intervals to reach.
        outer: where the widest interval ends.
        inner: a point that all intervals reach.
    """
    ordered = [_ordered(s) for s in scores]
    for _ in range(HALVINGS):
        middle = 0.5 * (outer + inner)
        reached = torch.zeros_like(middle, dtype=torch.int64)
        for s, need in zip(ordered, needed(middle)):
            reached += s.shape[1] - torch.searchsorted(s, need.T.contiguous()).T
        enough = reached >= count
        outer, inner = torch.where(enough, outer, middle), torch.where(enough, middle, inner)
    return inner


def _ordered(scores: Tensor) -> Tensor:
    """Return scores (n, E) sorted by target, (E, n)."""
    return scores.T.sort(-1).values.contiguous()


def _range(scores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest score of each target, (E,)."""
    joined = torch.cat(list(scores))
    return joined.amin(0), joined.amax(0)
