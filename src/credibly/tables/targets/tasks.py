"""Targets that are neither plain numbers nor plain classes: counts, proportions, ordered classes, censored times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from credibly.errors import InputError
from credibly.tables.cells.parsing import is_number, numbers, texts
from credibly.tables.columns.encoders import Array

# Tasks whose predictions are probabilities of classes.
LABELLED = ("classification", "ordinal")
# Integers look like counts if 0 occurs, most are below TYPICAL_COUNT, all below LARGEST_COUNT, and they are
# right-skewed: ages, years, prices and scores are not.
TYPICAL_COUNT = 50
LARGEST_COUNT = 10_000
# Levels in an error message.
SHOWN = 8
EVENTS = {"1": True, "0": False, "true": True, "false": False, "yes": True, "no": False}


def looks_like_counts(values: Array, times: Array) -> bool:
    """Return whether distinct values, each with the number of its rows, look like counts."""
    if (values < 0).any() or (values != np.trunc(values)).any() or values.max() > LARGEST_COUNT or 0 not in values:
        return False
    order = np.argsort(values)
    median = float(values[order][np.searchsorted(times[order].cumsum(), times.sum() / 2)])
    return median <= TYPICAL_COUNT and float(np.average(values, weights=times)) > median


def looks_like_proportions(values: Array) -> bool:
    """Return whether distinct values lie between 0 and 1, some of them strictly."""
    return bool(((values >= 0) & (values <= 1)).all() and ((values > 0) & (values < 1)).any())


def check_task_values(name: str, values: Array, task: str) -> None:
    """Raise if distinct numeric values cannot be what the requested task needs."""
    wrong: Array
    if task == "counts":
        wrong = values[(values < 0) | (values != np.trunc(values))]
        need, advice = "counts are non-negative integers", "Pass --task regression"
    elif task == "proportion":
        wrong = values[(values < 0) | (values > 1)]
        need, advice = "proportions are between 0 and 1", "Divide percentages by 100, or pass --task regression"
    elif task == "survival":
        wrong = values[values <= 0]
        need, advice = "times are positive", "Use a small time instead of 0, or remove those rows"
    else:
        return
    if len(wrong):
        raise InputError("--task", f"{need}, but {name!r} holds {float(wrong[0]):g}", advice)


def ordered_levels(name: str, values: Any, order: Sequence[str]) -> tuple[str, ...]:
    """Return the levels of an ordinal target from low to high: the order given, or numbers by value.

    Args:
        name: of the column.
        values: its distinct values.
        order: levels from low to high as text; () for the order of the numbers.
    """
    levels = texts(values.take(pc.sort_indices(values))).to_pylist()
    shown = ", ".join(levels[:SHOWN]) + (", ..." if len(levels) > SHOWN else "")
    if not order:
        if is_number(values.type):
            return tuple(levels)
        raise InputError(
            "--order", f"ordered classes of text need an order, {name!r} holds {shown}", "Pass --order low,medium,high"
        )
    if len(set(order)) != len(order):
        raise InputError("--order", f"must name every level once, got {', '.join(order)}")
    missing = [level for level in levels if level not in order]
    if missing:
        raise InputError("--order", f"{missing[0]!r} of {name!r} is not in it", f"The levels are {shown}")
    return tuple(order)


def _recoding(column: Any) -> str:
    """Return advice on recoding a numeric column, with other codes than 0 and 1, to one that marks events."""
    codes = sorted(pc.unique(column.drop_null()).to_pylist())
    if codes == [1.0, 2.0]:
        return "If 1 is censored and 2 an event, as in R, subtract 1 from the column"
    return "Write 1 where the event of interest was observed, and 0 in all other rows"


def event_values(name: str, cells: Any) -> Any:
    """Return events as an Arrow array of booleans, null where missing. Raise on cells that are not events."""
    if pa.types.is_boolean(cells.type):
        return cells
    if is_number(cells.type):
        column = numbers(cells)[0]
        known = pc.is_in(column, pa.array([0.0, 1.0])).to_numpy(zero_copy_only=False) | ~np.asarray(column.is_valid())
        if not known.all():
            found = f"{name!r} must hold 1 for an event and 0 for none, got {column[int(np.argmin(known))].as_py():g}"
            raise InputError("--event", found, _recoding(column))
        return pc.equal(column, 1.0)
    marks = [None if text is None else EVENTS.get(text.strip().lower(), text) for text in texts(cells).to_pylist()]
    other = [mark for mark in marks if isinstance(mark, str)]
    if other:
        raise InputError("--event", f"{name!r} must hold 1 or 0, true or false, yes or no, got {other[0]!r}")
    return pa.array(marks, pa.bool_())
