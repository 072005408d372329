"""The target column: determines the task and the classes, and rejects targets that cannot be predicted; and weights."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from credibly.core.checks import check_choice
from credibly.errors import InputError
from credibly.tables.cells.conventions import conventions_of
from credibly.tables.cells.date_formats import DATE
from credibly.tables.cells.parsing import is_number, numbers, positions, texts, whole_column
from credibly.tables.columns.encoders import Array
from credibly.tables.targets.tasks import (
    LABELLED,
    check_task_values,
    event_values,
    looks_like_counts,
    looks_like_proportions,
    ordered_levels,
)

TASKS = ("auto", "regression", "classification", "counts", "ordinal", "proportion", "survival")
DATE_ADVICE = "Convert it to a number, such as days since a start date"
MIN_ROWS = 10
MAX_CLASSES = 100
# Integers are class labels if there are two distinct ones, or at most FEW with an average of at least ROWS_EACH rows
# each.
FEW = 10
ROWS_EACH = 20


@dataclass(frozen=True, eq=False)
class Target:
    """A target column.

    Attributes:
        task: one of TASKS but "auto".
        reason: why, as a sentence.
        classes: class labels as text, in the order of their indices; None unless the task predicts classes.
        rows: indices of the rows that have a target.
        notes: remarks for the user, such as the number of rows without a target.
    """

    task: str
    reason: str
    classes: tuple[str, ...] | None
    rows: Array
    notes: tuple[str, ...]


def inspect_target(
    name: str, cells: Any, task: str = "auto", *, order: Sequence[str] = (), event: tuple[str, Any] | None = None
) -> Target:
    """Determine the task. Raise if the column cannot be predicted.

    Args:
        name, cells: the target column.
        task: one of TASKS.
        order: levels of an ordinal target from low to high; () for numbers, which have an order.
        event: name and cells of the column that marks observed events, for survival.
    """
    check_choice("--task", task, TASKS)
    task = _with_options(task, order, event)
    if pa.types.is_temporal(cells.type) and not is_number(cells.type):
        raise InputError("--target", f"{name!r} holds dates or times", DATE_ADVICE)
    numeric = is_number(cells.type)
    # Adding 0 makes -0 and 0 one label.
    column = pc.add(numbers(cells)[0], 0.0) if numeric else texts(cells)
    if event is not None:
        column = pc.if_else(event_values(*event).is_valid(), column, None)
    rows = np.flatnonzero(np.asarray(column.is_valid()))
    present = column.drop_null()
    notes = _check_rows(name, len(column), len(present))
    counts = pc.value_counts(present)
    values, times = counts.field(0), counts.field(1)
    if len(values) == 1:
        found = f"{name!r} is {values[0].as_py()!r} in every row"
        raise InputError("--target", found, "Choose a column with at least two distinct values")
    if numeric:
        decided, reason = _decide_numeric(name, values, times, task)
        if decided == "survival":
            assert event is not None
            notes += (_events_note(*event, rows),)
        if decided not in LABELLED:
            return Target(decided, reason, None, rows, notes)
    else:
        decided, reason = _decide_text(name, present, values, task)
    if len(values) > MAX_CLASSES:
        found = f"{name!r} has {len(values):,} distinct values"
        if numeric:
            raise InputError("--task", f"{found}, too many for {decided}", "Pass --task regression")
        advice = "It looks like an identifier or free text: choose another column, or group its values"
        advice += f" into at most {MAX_CLASSES} classes"
        raise InputError("--target", found, advice)
    by_value = pc.sort_indices(values)
    classes = tuple(texts(values.take(by_value)).to_pylist())
    alone = [repr(c) for c, n in zip(classes, times.take(by_value).to_pylist()) if n == 1]
    if alone:
        notes += (f"only one row has the class {', '.join(alone[:5])}{' and others' if len(alone) > 5 else ''}",)
    if decided == "ordinal":
        classes = ordered_levels(name, values, order)
    return Target(decided, reason, classes, rows, notes)


def inspect_targets(names: Sequence[str], cells: Sequence[Any], task: str = "auto") -> Target:
    """Check several targets, which can only be numbers. Rows need all of them."""
    check_choice("--task", task, TASKS)
    if task not in ("auto", "regression"):
        raise InputError("--task", f"{task} has one target, got {len(names)}", "Pass --task regression, or one target")
    each = [inspect_target(name, column, "regression") for name, column in zip(names, cells)]
    rows = each[0].rows
    for one in each[1:]:
        rows = np.intersect1d(rows, one.rows)
    if len(rows) < MIN_ROWS:
        raise InputError("table", f"{len(rows)} rows have all of {', '.join(names)}", f"Pass at least {MIN_ROWS}")
    reason = f"regression of {len(names)} targets: {', '.join(names)}"
    return Target("regression", reason, None, rows, tuple(dict.fromkeys(n for one in each for n in one.notes)))


def target_names(target: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the target columns: one of that very name, or else those in a comma-separated list."""
    if target in names or "," not in target:
        check_column("--target", target, list(names))
        return (target,)
    found = tuple(dict.fromkeys(name.strip() for name in target.split(",") if name.strip()))
    for name in found:
        check_column("--target", name, list(names))
    return found


def _with_options(task: str, order: Sequence[str], event: tuple[str, Any] | None) -> str:
    """Return the task that --order or --event stand for. Raise if they do not fit the one requested."""
    for option, given, meant in (("--order", bool(order), "ordinal"), ("--event", event is not None, "survival")):
        if given and task not in ("auto", meant):
            raise InputError(option, f"is for --task {meant}, got --task {task}")
        task = meant if given else task
    if task == "survival" and event is None:
        found = "survival needs to know which events were observed"
        raise InputError("--event", found, "Pass --event COLUMN, which holds 1 for an event and 0 for a censored time")
    return task


def _events_note(name: str, cells: Any, rows: Array) -> str:
    seen = event_values(name, cells).take(pa.array(rows))
    observed = int(pc.sum(seen).as_py() or 0)
    if not observed:
        raise InputError(
            "--event", f"{name!r} marks no event in {len(rows):,} rows", "Check which value means an event"
        )
    return f"{observed:,} events in {len(rows):,} rows, the others are censored"


def _check_rows(name: str, total: int, usable: int) -> tuple[str, ...]:
    missing = total - usable
    if 2 * missing > total:
        found = f"{name!r} is missing in {missing:,} of {total:,} rows"
        raise InputError("--target", found, "Remove those rows, or choose a column that most rows have")
    if usable < MIN_ROWS:
        found = f"{usable} usable rows" if usable != 1 else "1 usable row"
        raise InputError("table", found, f"Pass at least {MIN_ROWS}; useful intervals need a few hundred")
    return (f"{missing:,} of {total:,} rows have no {name!r} and are left out",) if missing else ()


def _decide_numeric(name: str, values: Any, times: Any, task: str) -> tuple[str, str]:
    """Return the task and the reason for a numeric column with the given distinct values and their numbers of rows."""
    known = values.to_numpy(zero_copy_only=False)
    rows = times.to_numpy(zero_copy_only=False)
    if not np.isfinite(known).all():
        found = f"{name!r} is infinite in {int(rows[~np.isfinite(known)].sum()):,} of {int(rows.sum()):,} rows"
        raise InputError("--target", found, "Remove those rows, or choose another column")
    check_task_values(name, known, task)
    if task != "auto":
        return task, f"{task}, as requested"
    integral = bool((known == np.trunc(known)).all())
    distinct, total = len(known), int(rows.sum())
    if integral and (distinct == 2 or (distinct <= FEW and total >= ROWS_EACH * distinct)):
        reason = f"{name} has only {distinct} distinct integers in {total:,} rows"
        other = "" if distinct == 2 else ", counts if they count something, ordinal if they are ordered levels"
        return "classification", f"classification: {reason}; pass --task regression if they are a quantity{other}"
    if looks_like_counts(known, rows):
        reason = f"{name} holds integers from 0 to {known.max():,.0f}, most of them small"
        return "counts", f"counts: {reason}; pass --task regression if they are not counts"
    reason = f"regression: {name} is numeric with {distinct:,} distinct values"
    if looks_like_proportions(known):
        reason += " from 0 to 1; pass --task proportion to keep predictions there"
    return "regression", reason


def _decide_text(name: str, present: Any, values: Any, task: str) -> tuple[str, str]:
    """Return the task and the reason for a text column with the given distinct values."""
    some = values.slice(0, 3).to_pylist()
    if task not in ("auto", *LABELLED):
        parsed, _ = numbers(present)
        text = next((c for c, n in zip(present.to_pylist(), parsed.to_pylist()) if n is None), some[0])
        found = f"{task} needs numbers, but {name!r} holds text such as {text!r}"
        raise InputError("--task", found, "Pass --task classification, or fix the cells that are not numbers")
    if pc.sum(pc.match_substring_regex(present, DATE)).as_py() >= 0.95 * len(present):
        raise InputError("--target", f"{name!r} holds dates such as {some[0]!r}", DATE_ADVICE)
    if task in LABELLED:
        return task, f"{task}, as requested"
    return "classification", f"classification: {name} holds text such as {', '.join(repr(s) for s in some)}"


def class_numbers(name: str, cells: Any, classes: Sequence[str]) -> Array:
    """Return labels as class indices, (N,) int64. Raise on missing and unknown labels."""
    column = texts(cells)
    found = positions(column, classes)
    if found.null_count:
        if column.null_count:
            raise _missing(name, column.null_count)
        unknown = sorted({label for label, at in zip(column.to_pylist(), found.to_pylist()) if at is None})
        shown = ", ".join(repr(s) for s in unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise InputError("--target", f"{name!r} holds labels unseen in training: {shown}", f"The classes are {known}")
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


def real_values(name: str, cells: Any) -> Array:
    """Return targets in their own units, (N,) float64. Raise on cells that are missing, infinite or not numbers."""
    column, wrong = numbers(cells)
    if wrong:
        raise InputError("--target", f"{name!r} in row {wrong[0][0] + 1}: {wrong[0][1]}", "Fix or remove that row")
    if column.null_count:
        raise _missing(name, column.null_count)
    values = np.array(column.to_numpy(zero_copy_only=False))
    infinite = int((~np.isfinite(values)).sum())
    if infinite:
        raise InputError("--target", f"{name!r} is infinite in {_rows(infinite)}", "Remove those rows")
    return values


def check_column(option: str, name: str, names: list[str]) -> None:
    """Raise, with the nearest name, unless there is such a column."""
    if name in names:
        return
    near = difflib.get_close_matches(name, names, 1, 0.5) or [n for n in names if n.lower() == name.lower()]
    advice = f"Did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise InputError(option, f"no column {name!r}", f"{advice}The table has {listed}")


def weight_column(table: Any, name: str, rows: Array) -> Array:
    """Return the weights of all rows, (N,) float64, 0 for others than the given ones.

    Raise on cells of those rows that are not weights.
    """
    option, known = "--weight", conventions_of(table)
    column, unread = numbers(whole_column(table.take(pa.array(rows)), name))
    if unread:
        row = known.file_row(int(rows[unread[0][0]]))
        raise InputError(option, f"{name!r} in row {row}: {unread[0][1]}", "Fix or remove that row")
    if column.null_count:
        raise InputError(option, f"{name!r} is missing in {_rows(column.null_count)}", "Fill in or remove those rows")
    values = np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(wrong) or not values.any():
        held = f"{values[wrong[0]]:g} in row {known.file_row(int(rows[wrong[0]]))}" if len(wrong) else "0 in every row"
        need = f"{name!r} must hold finite non-negative weights, at least one of them positive"
        raise InputError(option, f"{need}, got {held}", "Fix or remove those rows")
    found = np.zeros(table.num_rows)
    found[rows] = values
    return found


def _missing(name: str, count: int) -> InputError:
    return InputError("--target", f"{name!r} is missing in {_rows(count)}", "Remove those rows; see usable_rows")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
