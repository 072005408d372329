"""Columns with a role in the split of the rows: groups that stay together, and times that are predicted in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from credibly.errors import InputError
from credibly.tables.cells.conventions import conventions_of
from credibly.tables.cells.date_formats import dates, day_first
from credibly.tables.cells.parsing import is_number, numbers, texts, whole_column
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
    if is_number(cells.type):
        values = numbers(cells)[0].to_numpy(zero_copy_only=False)
    else:
        known = conventions_of(table)
        stamps = dates(cells, known.days_first.get(name, False) or _day_first(cells))[0]
        values = np.where(np.isnat(stamps), np.nan, stamps.astype(np.int64).astype(np.float64))
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        shown = texts(cells)[int(wrong[0])].as_py()
        found = f"{name!r} holds {'no time' if shown is None else repr(shown)} in row {int(rows[wrong[0]]) + 1}"
        advice = "Name a column of numbers or dates, and fix or remove rows without one"
        raise InputError("--time", f"{found}, and in {len(wrong):,} rows in all", advice)
    if values.min() == values.max():
        raise InputError("--time", f"{name!r} is the same in all rows", "Name another column, or leave --time out")
    return np.asarray(values, dtype=np.float64)


def _day_first(cells: Any) -> bool:
    return not pa.types.is_temporal(cells.type) and day_first(texts(cells))[0]
