"""Warnings about inputs that give the target away: copies of it, codes for its classes, and thresholds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from credibly.tables.columns.screened import Array, ScreenedColumns

# Correlation with the target from which an input is called a copy of it.
COPY = 0.9999
# Number of rows of every class from which a column that separates them is called a leak.
LEAST_ROWS = 10
# The end of every such warning, by which a report recognises it.
UNLESS = "unless it is known before"


def leak_in(warning: str) -> str | None:
    """Return what a warning of `leaks` found, without the advice; None for another warning."""
    found, _, advice = warning.partition("; pass --drop ")
    return found if UNLESS in advice else None


def leaks(columns: ScreenedColumns, names: list[str]) -> Iterator[str]:
    """Yield warnings about inputs that give the target away."""
    if columns.preparation.classes is None:
        for target, name in product(columns.targets, names):
            x, y = columns.numbers(name), columns.numbers(target)
            assert y is not None
            r = 0.0 if x is None else _correlation(x, y)
            if x is not None and abs(r) > COPY:
                both = np.isfinite(x)
                same = bool((x[both] == y[both]).all())
                how = "is a copy of" if same else f"has a correlation of {r:.6f} with"
                yield f"{name} {how} the target {target}; pass --drop {name} {UNLESS} {target} is"
        return
    (target,) = columns.targets
    classes, count = columns.codes(target), columns.distinct(target)
    if 2 * count > len(classes):
        return
    for name in names:
        # As many values as classes, and as many pairs of them: one to one.
        if columns.distinct(name) == count and len(np.unique(columns.codes(name) * count + classes)) == count:
            yield (
                f"every value of {name} matches one class of the target {target}; pass --drop {name} {UNLESS}"
                f" {target} is"
            )
        else:
            x = columns.numbers(name)
            if x is not None and _separates(x, classes):
                yield (
                    f"{name} alone separates the classes of the target {target} without an exception; pass --drop"
                    f" {name} {UNLESS} {target} is"
                )


def _separates(x: Array, classes: Array) -> bool:
    """Return whether every class has an interval of values to itself, which is no accident if it has enough rows."""
    present = np.isfinite(x)
    order = np.argsort(x[present], kind="stable")
    x, classes = x[present][order], classes[present][order]
    sizes = np.bincount(classes)
    sizes = sizes[sizes > 0]
    if len(sizes) < 2 or sizes.min() < LEAST_ROWS:
        return False
    ends = np.flatnonzero(np.diff(classes))
    return len(ends) == len(sizes) - 1 and bool((x[ends] < x[ends + 1]).all())


def _correlation(x: Array, y: Array) -> float:
    """Return the correlation over the rows that have both; 0 with fewer than 10 of them."""
    both = np.isfinite(x)
    x, y = x[both], y[both]
    if len(x) < 10:
        return 0.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # Dividing by the largest value first: squares of very large numbers overflow.
        a, b = x - x.mean(), y - y.mean()
        a, b = a / np.abs(a).max(initial=0.0), b / np.abs(b).max(initial=0.0)
        r = float(a @ b / np.sqrt((a @ a) * (b @ b)))
    return r if np.isfinite(r) else 0.0
