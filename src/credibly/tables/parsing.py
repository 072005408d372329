"""The cells of a column: what counts as missing, as a number, as text. One reading of them for fitting and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Notes: TypeAlias = list[tuple[int, str]]

# Cells that say that there is no value. Compared as they are, after white space is taken off both ends.
MISSING = (
    "", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "-nan", "-NaN", "null", "NULL", "Null", "None", "none", "?",
)  # fmt: skip

NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|(?i:inf|infinity))$"


def is_number(kind: Any) -> bool:
    """Whether a type of column is one of numbers; a column without any value is."""
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind))


def numbers(column: pa.Array, decimal: str = ".") -> tuple[pa.Array, Notes]:
    """A column as float64, and (row, what was found) where a cell holds something that is no number; null there.

    Infinite values stay; NaN is null.
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
    """A float64 column with null in place of infinite values, and where those were."""
    fine = pc.is_finite(column)
    if pc.all(fine).as_py() in (True, None):
        return column, []
    rows = np.flatnonzero(~np.asarray(fine.fill_null(True)))
    return pc.if_else(fine, column, None), [(int(r), f"{column[int(r)].as_py()} is not finite") for r in rows]


def texts(column: pa.Array) -> pa.Array:
    """A column as text without white space at its ends, null where it says that there is no value.

    Whole numbers lose their decimal point, so that 3 is the same label in a CSV file and in a Parquet file.
    """
    column = _plain(column)
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column)
        whole = pc.fill_null(pc.equal(column, pc.trunc(column)), False)
        near = pc.and_(whole, pc.fill_null(pc.less(pc.abs(column), 2.0**53), False))
        plain = pc.if_else(near, column, None).cast(pa.int64(), safe=False).cast(pa.string())
        return pc.if_else(near, plain, column.cast(pa.string()))
    if not pa.types.is_string(kind):
        return column.cast(pa.string())
    column = pc.utf8_trim_whitespace(column)
    marks = pc.is_in(column, value_set=pa.array(MISSING))
    return pc.if_else(marks, None, column) if pc.any(marks).as_py() else column


def positions(column: Any, labels: Sequence[str]) -> Any:
    """Where each text of a column is among the labels; null where it is none of them.

    True, TRUE and true are one label where there is no other than true and false: files differ in how they write them.
    """
    lower = [label.lower() for label in labels]
    if set(lower) <= {"true", "false"} and len(set(lower)) == len(lower):
        column, labels = pc.utf8_lower(column), lower
    return pc.index_in(column, value_set=pa.array(labels, pa.string()), skip_nulls=True)


def whole_column(table: Any, name: str) -> Any:
    """One column as a single array; None where the table has none of that name."""
    index = table.schema.get_field_index(name)
    if index < 0:
        return None
    column = table.column(index)
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(_alike(column))


def _alike(column: pa.ChunkedArray) -> list[pa.Array]:
    chunks = column.unify_dictionaries().chunks
    return chunks or [pa.nulls(0, column.type)]


def _plain(column: pa.Array) -> pa.Array:
    """Without dictionary encoding, and with the ordinary string type in place of its variants."""
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
    """A cell as messages have it: in quotes, and not too long."""
    return repr(cell if len(cell) <= limit else cell[: limit - 3] + "...")
