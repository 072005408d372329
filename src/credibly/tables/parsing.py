"""Parsing of cells: what counts as missing, as a number and as text, the same for fitting and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# (row, what is unusual about one of its cells)
Notes: TypeAlias = list[tuple[int, str]]

# Markers of a missing value, compared case-sensitively after white space is stripped.
MISSING = (
    "", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "-nan", "-NaN", "null", "NULL", "Null",
    "None", "none", "?",
)  # fmt: skip

NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity))$"


def is_number(kind: Any) -> bool:
    """Return whether an Arrow type is numeric. The null type, of a column without values, counts as numeric."""
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind))


def numbers(column: pa.Array, decimal: str = ".") -> tuple[pa.Array, Notes]:
    """Return a column as float64 and (row, note) for every cell that is not a number.

    Those cells and NaN become null; infinite values stay.
    """
    column = _plain(column)
    kind = column.type
    if pa.types.is_string(kind):
        return _parsed(column, decimal)
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    if pa.types.is_boolean(kind) or is_number(kind):
        column = column.cast(pa.float64(), safe=False)
        unknown = pc.is_nan(column)
        return (pc.if_else(unknown, None, column) if pc.any(unknown).as_py() else column), []
    rows = np.flatnonzero(np.asarray(column.is_valid()))
    return pa.nulls(len(column), pa.float64()), [(int(r), f"{column[int(r)].as_py()} is not a number") for r in rows]


def finite(column: pa.Array) -> tuple[pa.Array, Notes]:
    """Return a float64 column with infinite values replaced by null, and (row, note) for each of them."""
    fine = pc.is_finite(column)
    if pc.all(fine).as_py() in (True, None):
        return column, []
    rows = np.flatnonzero(~np.asarray(fine.fill_null(True)))
    return pc.if_else(fine, column, None), [(int(r), f"{column[int(r)].as_py()} is not finite") for r in rows]


def texts(column: pa.Array) -> pa.Array:
    """Return a column as stripped text, null where a cell is missing.

    Integers stored as floats lose their decimal point, so 3 is the same label in a CSV and in a Parquet file.
    """
    column = _plain(column)
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column)
        integral = pc.fill_null(pc.equal(column, pc.trunc(column)), False)
        exact = pc.and_(integral, pc.fill_null(pc.less(pc.abs(column), 2.0**53), False))
        plain = pc.if_else(exact, column, None).cast(pa.int64(), safe=False).cast(pa.string())
        return pc.if_else(exact, plain, column.cast(pa.string()))
    if not pa.types.is_string(kind):
        return column.cast(pa.string())
    column = pc.utf8_trim_whitespace(column)
    marks = pc.is_in(column, value_set=pa.array(MISSING))
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


def _parsed(column: pa.Array, decimal: str) -> tuple[pa.Array, Notes]:
    if decimal != ".":
        column = pc.replace_substring(column, decimal, ".")
    try:
        return numbers(column.cast(pa.float64()))
    except pa.ArrowInvalid:
        pass
    column = texts(column)
    fits = pc.fill_null(pc.match_substring_regex(column, NUMBER), False)
    values, _ = numbers(pc.if_else(fits, column, None).cast(pa.float64()))
    rows = np.flatnonzero(~np.asarray(fits) & np.asarray(column.is_valid()))
    return values, [(int(r), f"{shown(column[int(r)].as_py())} is not a number") for r in rows]


def shown(cell: str, limit: int = 40) -> str:
    """Return a cell as messages show it: quoted and truncated."""
    return repr(cell if len(cell) <= limit else cell[: limit - 3] + "...")
