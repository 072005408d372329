"""Splits of the rows of a table into those that are fitted and those that are predicted: at random, by group, by time.

Every metric of a run comes from rows that the fit behind it has not seen. By default each row is in one of five folds,
and predicted by a fit to the other four. Rows of one group stay together, and rows of later times are predicted from
earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from credibly.errors import InputError

Array = npt.NDArray[Any]

FOLDS = 5
# With times: fraction of the latest rows that is predicted, and of each part that a choice predicts from earlier rows.
LATEST, PART = 0.2, 0.15


@dataclass(frozen=True, eq=False)
class Rows:
    """The constraints on a split, one value per row.

    Attributes:
        count: number of rows.
        strata: classes that every part has in proportion; None for none.
        groups: rows with the same label stay together; None for none.
        times: rows are predicted from earlier ones; None for none.
    """

    count: int
    strata: Array | None = None
    groups: Array | None = None
    times: Array | None = None

    def at(self, rows: Array) -> Rows:
        """Return the same for some of the rows."""
        parts = (None if v is None else v[rows] for v in (self.strata, self.groups, self.times))
        return Rows(len(rows), *parts)


def check_groups(option: str, name: str, groups: Array, least: int = FOLDS) -> None:
    """Raise if there are too few groups to hold some of them out."""
    distinct = len(np.unique(groups))
    if distinct < least:
        found = f"{name!r} has {distinct} group{'s' if distinct > 1 else ''} in {len(groups):,} rows"
        advice = "Name a column of the units to be predicted, such as customers, or leave the option out"
        raise InputError(option, f"{found}, at least {least} are needed", advice)


def folds_of(rows: Rows, seed: int, folds: int = FOLDS) -> list[tuple[Array, Array]]:
    """Return (fitted, predicted) row indices of each fold, sorted; one pair, predicting the latest rows, with times."""
    if rows.times is not None:
        return [held_out_split(rows, LATEST, seed)]
    order = np.random.default_rng([seed, 0xF01D]).permutation(rows.count)
    fold = np.empty(rows.count, dtype=np.int64)
    if rows.groups is not None:
        fold = _group_folds(rows.groups, folds, order)
    else:
        strata = np.zeros(rows.count) if rows.strata is None else rows.strata
        # Deal out the rows of one stratum after the other, without restarting at the first fold for each.
        dealt = order[np.argsort(strata[order], kind="stable")]
        fold[dealt] = np.arange(rows.count) % folds
    return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(folds)]


def choice_folds(rows: Rows, seed: int, folds: int = FOLDS) -> list[tuple[Array, Array]]:
    """Return the (fitted, predicted) row indices of the folds that a choice is made by.

    Without times these are `folds_of`. With times, up to `folds` parts are predicted in turn, the latest first, each
    from all rows before it: what extrapolates well once may do so by chance. The first rows are never predicted.
    """
    if rows.times is None:
        return folds_of(rows, seed, folds)
    ends = np.sort(rows.times)
    found, before = [], np.inf
    for k in range(1, min(folds, round((1 - PART) / PART) - 1) + 1):
        first = ends[min(rows.count - 1, round((1 - k * PART) * rows.count))]
        fitted, predicted = rows.times < first, (rows.times >= first) & (rows.times < before)
        if fitted.any() and predicted.any():
            found.append((np.flatnonzero(fitted), np.flatnonzero(predicted)))
            before = first
    return found or [held_out_split(rows, LATEST, seed)]


def held_out_split(rows: Rows, fraction: float, seed: int) -> tuple[Array, Array]:
    """Return sorted indices of fitted and held-out rows; every stratum keeps a fitted row."""
    held = np.zeros(rows.count, dtype=bool)
    if rows.times is not None:
        first = np.sort(rows.times)[rows.count - max(1, round(fraction * rows.count))] if fraction else np.inf
        held = rows.times >= first
        if held.all():
            raise InputError("--time", "has too few distinct times to hold the latest ones out", "Leave --time out")
    elif rows.groups is not None:
        order = np.random.default_rng([seed, 0x5917]).permutation(np.unique(rows.groups))
        wanted, count = round(fraction * rows.count), 0
        for label in order[:-1]:
            own = rows.groups == label
            if count + own.sum() / 2 <= wanted:
                held |= own
                count += int(own.sum())
    else:
        order = np.random.default_rng([seed, 0x5917]).permutation(rows.count)
        strata = [order]
        if rows.strata is not None:
            strata = [order[rows.strata[order] == label] for label in np.unique(rows.strata)]
        for part in strata:
            held[part[: min(round(fraction * len(part)), len(part) - 1)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def requested_split(rows: Rows, fraction: float, seed: int) -> tuple[Array, Array]:
    """Return `held_out_split` of a fraction given as --holdout. Raise if it is so small that no row is held out."""
    fitted, held = held_out_split(rows, fraction, seed)
    if fraction and not len(held):
        if rows.groups is not None:
            # A group is held out if at least half of it is wanted. The smallest one may be the last in random order.
            second = int(np.sort(np.unique(rows.groups, return_counts=True)[1])[1])
            least, why = (second + 1) // 2 / rows.count, ", whose groups stay together"
        else:
            largest = rows.count if rows.strata is None else int(np.unique(rows.strata, return_counts=True)[1].max())
            least, why = 1 / largest, "" if rows.strata is None else ", the same fraction of each class"
        found = f"{fraction:g} would hold out none of {rows.count:,} rows{why}"
        advice = f"Pass at least {np.ceil(1000 * least) / 1000:g}, or 0 to fit all rows without held-out ones"
        raise InputError("--holdout", found, advice)
    return fitted, held


def _group_folds(groups: Array, folds: int, order: Array) -> Array:
    """Return the fold of each row: groups, largest first, go to the fold with the fewest rows so far."""
    labels, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # Groups of the same size in random order.
    shuffled = np.random.default_rng(order[:1]).permutation(len(labels))
    fold, filled = np.empty(len(labels), dtype=np.int64), np.zeros(folds, dtype=np.int64)
    for label in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        fold[label] = filled.argmin()
        filled[fold[label]] += sizes[label]
    found: Array = fold[inverse]
    return found
