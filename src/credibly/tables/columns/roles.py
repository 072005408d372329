"""Columns with a role in the split of the rows: groups that stay together, and times that are predicted in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from credibly.errors import InputError
from credibly.tables.cells.conventions import Conventions, conventions_of
from credibly.tables.cells.date_formats import dates, day_first
from credibly.tables.cells.parsing import is_number, numbers, shown, texts, whole_column
from credibly.tables.columns.encoders import Array
from credibly.tables.splitting import check_groups
from credibly.tables.targets.checks import check_column


def group_values(table: Any, name: str, rows: Array) -> Array:
    """Return a group number per row, (N,) int64; each row without a group is its own group."""
    check_column("--group", name, table.column_names)
    cells = whole_column(table.take(pa.array(rows)), name)
    column = texts(cells)
    codes = column.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    missing = np.asarray(column.is_null())
    found = np.where(missing, -1, np.nan_to_num(np.asarray(codes, dtype=np.float64))).astype(np.int64)
    check_groups("--group", name, found[~missing])
    found[missing] = found.max() + 1 + np.arange(int(missing.sum()))
    return found


def time_values(table: Any, name: str, rows: Array) -> Array:
    """Return the time of each row as a number, (N,) float64. Raise on cells that are not times."""
    check_column("--time", name, table.column_names)
    cells = whole_column(table.take(pa.array(rows)), name)
    known = conventions_of(table)
    if is_number(cells.type):
        values = numbers(cells)[0].to_numpy(zero_copy_only=False)
    else:
        stamps = dates(cells, known.days_first.get(name, False) or _day_first(cells))[0]
        values = np.where(np.isnat(stamps), np.nan, stamps.astype(np.int64).astype(np.float64))
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        row = known.file_row(int(rows[wrong[0]]))
        text = texts(cells)[int(wrong[0])].as_py()
        held = _unread(known, name, row) or "no time" if text is None else shown(text)
        count = f", and no time in {len(wrong):,} rows in all" if len(wrong) > 1 else ""
        advice = "Name a column of numbers or dates, and fix or remove rows without one"
        raise InputError("--time", f"{name!r} holds {held} in row {row}{count}", advice)
    if values.min() == values.max():
        raise InputError("--time", f"{name!r} is the same in all rows", "Name another column, or leave --time out")
    return np.asarray(values, dtype=np.float64)


def _unread(known: Conventions, name: str, row: int) -> str:
    """Return the quoted text of a cell that was treated as missing when the file was read; empty if it was missing."""
    start = f"row {row}: {name} = "
    notes = [note.removeprefix(start) for note in known.notes if note.startswith(start)]
    return notes[0].rpartition(" is not a ")[0] if notes else ""


def _day_first(cells: Any) -> bool:
    return not pa.types.is_temporal(cells.type) and day_first(texts(cells))[0]
