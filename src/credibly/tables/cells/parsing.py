"""Parsing of cells: what counts as missing, as a number and as text, the same for fitting and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from credibly.tables.cells import number_formats

# (row, what is unusual about one of its cells)
Notes: TypeAlias = list[tuple[int, str]]

# Markers of a missing value in any column, compared case-sensitively after white space is stripped.
MISSING = (
    "", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "N.A.", "n.a.", "nan", "NaN", "NAN", "-nan", "-NaN", "NaT",
    "null", "NULL", "Null", "(null)", "\\N", "?", "#VALUE!", "#DIV/0!", "#REF!", "#NAME?", "#NUM!", "#NULL!",
)  # fmt: skip
# Words that mark a missing value among numbers or dates, in any case; among other words they are a category.
PLACEHOLDERS = (
    "-", "--", "---", "–", "—", ".", "..", "...", "na", "n.a", "none", "nil", "missing", "unknown", "unk", "blank",
    "empty", "not available", "not applicable", "no data", "n/d", "n.d.", "tbd",
)  # fmt: skip


def is_number(kind: Any) -> bool:
    """Return whether an Arrow type is numeric. Times of day and durations count, and the type of a column of nulls."""
    types = pa.types
    plain = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind)
    return bool(plain or types.is_time(kind) or types.is_duration(kind))


def numbers(column: pa.Array, decimal: str = ".", na: Sequence[str] = ()) -> tuple[pa.Array, Notes]:
    """Return a column as float64 and (row, note) for every cell that is not a number.

    Those cells, markers of missing values and NaN become null; infinite values stay. Times of day are in hours,
    durations in seconds.

    Args:
        column: the cells.
        decimal: decimal mark of text, "." or ",". The other one may separate thousands.
        na: further markers of missing values. Those that are numbers are compared as numbers.
    """
    column = _plain(column)
    kind = column.type
    notes: Notes = []
    if pa.types.is_string(kind):
        column, wrong = parse_text(column, decimal, na)
        notes = [(row, f"{shown(cell)} is not a number") for row, cell in wrong]
    elif pa.types.is_boolean(kind):
        column = column.cast(pa.int8()).cast(pa.float64())
    elif pa.types.is_time(kind):
        column = pc.divide(column.cast(pa.time64("us"), safe=False).cast(pa.int64()).cast(pa.float64()), 3.6e9)
    elif pa.types.is_duration(kind):
        column = pc.divide(column.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.float64()), 1e6)
    elif is_number(kind):
        column = column.cast(pa.float64(), safe=False)
    else:
        rows = np.flatnonzero(np.asarray(column.is_valid()))
        notes = [(int(r), f"{column[int(r)].as_py()} is not a number") for r in rows]
        column = pa.nulls(len(column), pa.float64())
    unknown = pc.is_nan(column)
    codes = [value for value in map(_as_float, na) if value is not None]
    if codes:
        unknown = pc.or_(unknown, pc.is_in(column, value_set=pa.array(codes, pa.float64())))
    return (pc.if_else(unknown, None, column) if pc.any(unknown).as_py() else column), notes


def parse_text(column: pa.Array, decimal: str = ".", na: Sequence[str] = ()) -> tuple[pa.Array, list[tuple[int, str]]]:
    """Return text as float64, null where it is missing or not a number, and (row, cell) of what is not a number."""
    # A point in a file with decimal commas may separate thousands.
    if decimal == "." or not pc.any(pc.match_substring(column, ".")).as_py():
        plain = column if decimal == "." else pc.replace_substring(column, decimal, ".")
        try:
            return plain.cast(pa.float64()), []
        except pa.ArrowInvalid:
            pass
    column = texts(column, na)
    values, good = number_formats.parse(column, decimal)
    rows = np.flatnonzero(~good & np.asarray(column.is_valid()))
    cells = column.take(pa.array(rows))
    rows = rows[~np.asarray(is_placeholder(cells))]
    # Copies, as nulls are marked by NaN here.
    return pa.array(values, from_pandas=True), [(int(row), column[int(row)].as_py()) for row in rows]


def is_placeholder(column: Any) -> Any:
    """Return which texts mark a missing value among numbers or dates."""
    return pc.is_in(pc.utf8_lower(column), value_set=pa.array(PLACEHOLDERS))


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def finite(column: pa.Array) -> tuple[pa.Array, Notes]:
    """Return a float64 column with infinite values replaced by null, and (row, note) for each of them."""
    fine = pc.is_finite(column)
    if pc.all(fine).as_py() in (True, None):
        return column, []
    rows = np.flatnonzero(~np.asarray(fine.fill_null(True)))
    return pc.if_else(fine, column, None), [(int(r), f"{column[int(r)].as_py()} is not finite") for r in rows]


def texts(column: pa.Array, na: Sequence[str] = ()) -> pa.Array:
    """Return a column as stripped text, null where a cell is missing or one of the further markers `na`.

    Integers stored as floats lose their decimal point, so 3 is the same label in a CSV and in a Parquet file.
    """
    column = _plain(column)
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column)
        integral = pc.fill_null(pc.equal(column, pc.trunc(column)), False)
        exact = pc.and_(integral, pc.fill_null(pc.less(pc.abs(column), 2.0**53), False))
        plain = pc.if_else(exact, column, None).cast(pa.int64(), safe=False).cast(pa.string())
        column = pc.if_else(exact, plain, column.cast(pa.string()))
    elif not pa.types.is_string(kind):
        column = column.cast(pa.string())
    else:
        column = pc.utf8_trim_whitespace(column)
    marks = pc.is_in(column, value_set=pa.array([*(MISSING if pa.types.is_string(kind) else ()), *na], pa.string()))
    return pc.if_else(marks, None, column) if pc.any(marks).as_py() else column


def positions(column: Any, labels: Sequence[str]) -> Any:
    """Return the index of each text among the labels, null where it is not one of them.

    If the only labels are true and false, case is ignored: files differ in how they write booleans.
    """
    lower = [label.lower() for label in labels]
    if set(lower) <= {"true", "false"} and len(set(lower)) == len(lower):
        column, labels = pc.utf8_lower(column), lower
    return pc.index_in(column, value_set=pa.array(labels, pa.string()), skip_nulls=True)


def whole_column(table: Any, name: str) -> Any:
    """Return one column as a single array, or None if the table has no column of that name."""
    index = table.schema.get_field_index(name)
    if index < 0:
        return None
    column = table.column(index)
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(_unified_chunks(column))


def _unified_chunks(column: pa.ChunkedArray) -> list[pa.Array]:
    chunks = column.unify_dictionaries().chunks
    return chunks or [pa.nulls(0, column.type)]


def _plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionary encoding and with its string variants cast to the plain string type."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        column = column.cast(pa.string())
    return column


def shown(cell: str, limit: int = 40) -> str:
    """Return a cell as messages show it: quoted and truncated."""
    return repr(cell if len(cell) <= limit else cell[: limit - 3] + "...")
