"""Plausible values for missing cells: those of the most similar training rows.

The missing inputs of a row are copied, all from the same row, from each of its nearest donors among a sample of the
training rows. With o observed and m missing inputs, and z the standardised inputs, the distance to a donor is

    (z_o - d_o)' (z_o - d_o) / o  +  (a - b)' S^-1 (a - b) / m,

where a and b are the missing inputs of the row and of the donor as predicted from the observed ones by linear
regression, and S is the covariance of its residuals. The second term is that of predictive mean matching: it weighs
the observed inputs by how well they predict the missing ones. Averaging predictions over the donors approximates

    p(y | x_o) = integral p(y | x_o, x_m) p(x_m | x_o) dx_m.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Completions of a row. With 20, intervals of rows with three gaps cover too little; 60 are less similar, and wider.
COMPLETIONS = 40
# Steps of this fraction of the unit interval, modulo 1, are spread evenly over it however many there are.
GOLDEN = (5**0.5 - 1) / 2
# Maximum number of donors: enough that the nearest ones are close, few enough that the search is fast.
DONORS = 2_000
# Added to the variances of standardised inputs: collinear ones, such as the levels of a category, have no unique
# regression.
RIDGE = 0.01
# Inputs are clipped here for distances, so that one absurd cell does not dominate.
CLIP = 10.0
# Distance of donors that lack a needed input themselves, which are used only if there are no others.
LAST = 1e6
# Distances held at a time: 2 MiB, which fits the cache.
CHUNK_VALUES = 2**18
# Completed values held at a time: 32 MiB.
FILL_VALUES = 2**22


class Donors:
    """Training rows from which the missing inputs of other rows are completed.

    Args:
        rows: standardised inputs (R, P), with NaN for missing values. More than `DONORS` are sampled.
        seed: determines the sample and the order in which equally distant donors are used.
    """

    def __init__(self, rows: Array, *, seed: int = 0) -> None:
        order = np.random.default_rng([seed, 0xD0]).permutation(len(rows))[:DONORS]
        values = np.asarray(rows, dtype=np.float64)[order]
        self.observed = ~np.isnan(values)
        known = np.where(self.observed, values, 0.0).sum(0) / np.maximum(self.observed.sum(0), 1)
        self.mean: Array = known
        self._use(np.where(self.observed, values, known))
        gaps = np.flatnonzero(~self.observed.all(1))
        if len(gaps):
            filled = self.rows.copy()
            filled[gaps] = self.complete(values[gaps], 1)[:, 0]
            self._use(filled)

    def _use(self, rows: Array) -> None:
        self.rows = rows
        self._points = np.clip(rows, -CLIP, CLIP)
        covariance = np.atleast_2d(np.cov(self._points.T, bias=True)) + RIDGE * np.eye(rows.shape[1])
        self._precision = np.linalg.inv(covariance)

    def complete(self, x: Array, count: int = COMPLETIONS) -> Array:
        """Return completions (N, M, P) of rows (N, P) with NaN, M the smaller of `count` and the number of donors."""
        missing = np.isnan(x)[:, None]
        return np.where(missing, self.rows[self.nearest(x, count)], x[:, None])

    def fill(self, x: Array) -> Array:
        """Return rows with NaN replaced by the mean over their completions; x itself if there are none."""
        rows = np.flatnonzero(np.isnan(x).any(1))
        if not len(rows):
            return x
        filled = x.copy()
        step = max(1, FILL_VALUES // (COMPLETIONS * x.shape[1]))
        for some in np.split(rows, range(step, len(rows), step)):
            filled[some] = np.where(np.isnan(x[some]), self.complete(x[some]).mean(1), x[some])
        return filled

    def nearest(self, x: Array, count: int = COMPLETIONS) -> Array:
        """Return the nearest donors of rows with NaN, (N, M) int16, ordered as in `_interleaved`; 0 for other rows."""
        found: Array = np.zeros((len(x), min(count, len(self.rows))), dtype=np.int16)
        for rows, missing in patterns(np.isnan(x)):
            found[rows] = self._nearest(np.asarray(x[rows], dtype=np.float64), missing, found.shape[1])
        return found

    def _nearest(self, x: Array, missing: Array, count: int) -> Array:
        """Return the nearest donors of rows that all lack the same inputs, (N, count)."""
        kept = np.ones(x.shape[1])
        kept[missing] = 0
        scale = 1 / max(1.0, kept.sum())
        # With Q the precision matrix of the inputs, the regression has the slopes -Q_om Q_mm^-1 and S = Q_mm^-1. With
        # Q_mm = L L', distances between predictions z_o' slopes L = -z_o' Q_om L^-T are those of the module.
        root = np.linalg.cholesky(self._precision[np.ix_(missing, missing)])
        slopes = -self._precision[:, missing] @ np.linalg.inv(root).T * kept[:, None] / np.sqrt(len(missing))
        points, predicted = self._points * (scale * kept), self._points @ slopes
        lengths = (self._points * points).sum(1) + (predicted**2).sum(1)
        lengths += np.where(self.observed[:, missing].all(1), 0.0, LAST)
        ranks = _ranks(self.rows[:, missing])
        index = np.arange(len(points), dtype=np.int64)
        result: Array = np.empty((len(x), count), dtype=np.int64)
        step = max(1, CHUNK_VALUES // len(points))
        for start in range(0, len(x), step):
            part = x[start : start + step]
            own = np.where(np.isnan(part), 0.0, np.clip(part, -CLIP, CLIP))
            ahead = own @ slopes
            distance = lengths - 2 * (own @ points.T + ahead @ predicted.T)
            distance += (scale * (own**2).sum(1) + (ahead**2).sum(1))[:, None]
            # The bits of a positive float32 order as the number does. With the index behind them, equal distances are
            # ordered by it.
            bits = np.maximum(distance, 0.0).astype(np.float32).view(np.int32)
            chosen = np.partition((bits.astype(np.int64) << 32) + index, count - 1, axis=1)[:, :count] & 0xFFFFFFFF
            ordered = np.take_along_axis(chosen, ranks[chosen].argsort(1), 1)
            result[start : start + step] = ordered[:, _interleaved(count)]
        return result


def training_inputs(x: Array) -> Array:
    """Return training rows with NaN replaced by the mean over their completions from other training rows.

    The target is not used, so rows may be held out of the result without having seen it.
    """
    return Donors(x).fill(x) if np.isnan(x).any() else x


def patterns(gaps: Array) -> Iterator[tuple[Array, Array]]:
    """Yield (rows, columns) for every set of columns that some rows lack, and those rows. Complete rows have none."""
    rows = np.flatnonzero(gaps.any(1))
    if not len(rows):
        return
    packed = np.packbits(gaps[rows], axis=1)
    _, first, inverse = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(inverse.reshape(-1)))
    for pattern, members in zip(first, np.split(order, ends[:-1])):
        yield rows[members], np.flatnonzero(gaps[rows[pattern]])


def _ranks(values: Array) -> Array:
    """Return the ranks of rows along their first principal component."""
    centred = values - values.mean(0)
    direction = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    return np.argsort(np.argsort(centred @ direction, kind="stable"))


def _interleaved(count: int) -> Array:
    """Return an order of `count` ranks in which the first few are spread evenly over all of them, however few.

    Ensembles have fewer members than there are completions, and use the first ones.
    """
    return np.argsort(np.argsort((0.5 + GOLDEN * np.arange(count)) % 1))
