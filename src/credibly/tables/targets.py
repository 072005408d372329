"""The target column: whether it is a regression or a classification, its labels, and what makes it unusable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from credibly.errors import InputError
from credibly.tables.columns import DATE, Array
from credibly.tables.parsing import is_number, numbers, positions, texts

TASKS = ("auto", "regression", "classification")
MIN_ROWS = 10
MAX_CLASSES = 100
# Whole numbers are labels where there are two of them, or at most FEW with at least ROWS_EACH rows to each on average.
FEW = 10
ROWS_EACH = 20


@dataclass(frozen=True, eq=False)
class Target:
    """What a target column is.

    Attributes:
        task: "regression" or "classification". reason: why, as a sentence.
        classes: the labels as text, in the order of their numbers; None for a regression.
        rows: those with a target.
        notes: what there is to tell, such as rows without a target.
    """

    task: str
    reason: str
    classes: tuple[str, ...] | None
    rows: Array
    notes: tuple[str, ...]


def inspect_target(name: str, cells: Any, task: str = "auto") -> Target:
    """Decides the task and refuses what cannot be predicted."""
    if task not in TASKS:
        raise InputError("--task", f"found {task!r}", f"Pass one of {', '.join(TASKS)}")
    if pa.types.is_temporal(cells.type):
        raise InputError(
            "--target", f"{name!r} holds dates or times", "Turn it into a number, such as days since a start"
        )
    numeric = is_number(cells.type)
    column = pc.add(numbers(cells)[0], 0.0) if numeric else texts(cells)  # -0 and 0 are one label
    rows = np.flatnonzero(np.asarray(column.is_valid()))
    present = column.drop_null()
    notes = _check_rows(name, len(column), len(present))
    counts = pc.value_counts(present)
    values, times = counts.field(0), counts.field(1)
    if len(values) == 1:
        found = f"{name!r} is {values[0].as_py()!r} in every row"
        raise InputError("--target", found, "Choose a column with at least two different values")
    if numeric:
        decided, reason = _decide(name, values, len(present), task)
        if decided == "regression":
            return Target(decided, reason, None, rows, notes)
    else:
        decided, reason = _text(name, present, values, task)
    if len(values) > MAX_CLASSES:
        found = f"{name!r} has {len(values):,} different {'values' if numeric else 'texts'}"
        if numeric:
            raise InputError("--task", f"{found}, too many for classes", "Pass --task regression")
        advice = f"It looks like an identifier or free text: choose another column, or group it into at most {MAX_CLASSES} classes"
        raise InputError("--target", found, advice)
    order = pc.sort_indices(values)
    classes = tuple(texts(values.take(order)).to_pylist())
    alone = [repr(c) for c, n in zip(classes, times.take(order).to_pylist()) if n == 1]
    if alone:
        notes += (f"only one row has the class {', '.join(alone[:5])}{' and others' if len(alone) > 5 else ''}",)
    return Target(decided, reason, classes, rows, notes)


def _check_rows(name: str, total: int, usable: int) -> tuple[str, ...]:
    gone = total - usable
    if 2 * gone > total:
        found = f"{name!r} is missing in {gone:,} of {total:,} rows"
        raise InputError("--target", found, "Choose a column that most rows have, or take the other rows out first")
    if usable < MIN_ROWS:
        found = f"{usable} usable rows" if usable != 1 else "1 usable row"
        raise InputError("table", found, f"Pass at least {MIN_ROWS}; a few hundred make for useful intervals")
    return (f"{gone:,} of {total:,} rows have no {name!r} and are left out",) if gone else ()


def _decide(name: str, values: Any, rows: int, task: str) -> tuple[str, str]:
    """Of a column of numbers; `values` are the different ones."""
    known = values.to_numpy(zero_copy_only=False)
    if not np.isfinite(known).all():
        raise InputError("--target", f"{name!r} holds infinite values", "Take those rows out, or choose another column")
    if task != "auto":
        return task, f"{task}, as asked for"
    whole = bool((known == np.trunc(known)).all())
    distinct = len(known)
    if whole and (distinct == 2 or (distinct <= FEW and rows >= ROWS_EACH * distinct)):
        reason = f"{name} has only {distinct} different whole numbers in {rows:,} rows; pass --task regression if they measure something"
        return "classification", f"classification: {reason}"
    return "regression", f"regression: {name} is a number with {distinct:,} different values"


def _text(name: str, present: Any, values: Any, task: str) -> tuple[str, str]:
    some = values.slice(0, 3).to_pylist()
    if task == "regression":
        strange, _ = numbers(present)
        odd = next((c for c, n in zip(present.to_pylist(), strange.to_pylist()) if n is None), some[0])
        found = f"regression of {name!r}, which holds text such as {odd!r}"
        raise InputError("--task", found, "Pass --task classification, or mend the cells that are no numbers")
    if pc.sum(pc.match_substring_regex(present, DATE)).as_py() >= 0.95 * len(present):
        found = f"{name!r} holds dates such as {some[0]!r}"
        raise InputError("--target", found, "Turn it into a number, such as days since a start")
    if task == "classification":
        return task, f"{task}, as asked for"
    return "classification", f"classification: {name} holds text such as {', '.join(repr(s) for s in some)}"


def class_numbers(name: str, cells: Any, classes: Sequence[str]) -> Array:
    """Labels as class numbers, (N,) int64; labels that are no class are refused."""
    column = texts(cells)
    found = positions(column, classes)
    if found.null_count:
        if column.null_count:
            raise _missing(name, column.null_count)
        strange = sorted({label for label, at in zip(column.to_pylist(), found.to_pylist()) if at is None})
        shown = ", ".join(repr(s) for s in strange[:5]) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
        known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise InputError("--target", f"{name!r} holds labels that training did not have: {shown}", f"Known are {known}")
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


def real_values(name: str, cells: Any) -> Array:
    """Numbers in their own units, (N,) float64; what is missing, infinite or no number is refused."""
    column, wrong = numbers(cells)
    if wrong:
        raise InputError(
            "--target", f"{name!r} in row {wrong[0][0] + 1}: {wrong[0][1]}", "Mend it, or take the row out"
        )
    if column.null_count:
        raise _missing(name, column.null_count)
    values = np.array(column.to_numpy(zero_copy_only=False))
    if not np.isfinite(values).all():
        raise InputError("--target", f"{name!r} holds infinite values", "Take those rows out")
    return values


def _missing(name: str, count: int) -> InputError:
    return InputError("--target", f"{name!r} is missing in {count:,} rows", "Take those rows out; see usable_rows")
