"""Writing of JSON lines, column by column: Python formats only the cells whose notation differs from Arrow's."""

from __future__ import annotations

import json
import math
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from credibly.tables.cells.parsing import whole_column
from credibly.tables.files.record_files import as_text

# Within these absolute values, Arrow and Python write the same shortest decimals, except for ".0".
SMALL, LARGE = 1e-4, 1e9
# Text of any length in all.
TEXT = pa.large_string()


class JsonLinesWriter:
    """Writer of a JSON object per row. Missing values are null, and infinite ones the text "inf", which JSON lacks."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write_table(self, table: pa.Table) -> None:
        """Append rows."""
        self._file.write(json_lines(table))

    def close(self) -> None:
        """Do nothing: the file belongs to the caller."""


def json_lines(table: pa.Table) -> bytes:
    """Return a JSON object per row, each with a line break; dates and the like are text."""
    if not table.num_rows or not table.num_columns:
        return b"{}\n" * int(table.num_rows)
    parts: list[Any] = []
    for name in table.column_names:
        key = f"{', ' if parts else '{'}{_dumped(name)}: "
        parts += [_scalar(key), _cells(whole_column(table, name))]
    rows = _joined(*parts, _scalar("}\n"))
    # Arrow stores texts one after another.
    found: bytes = rows.buffers()[2].to_pybytes()
    return found


def _cells(column: Any) -> Any:
    """Return the cells of a column as JSON texts."""
    kind = column.type
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        found = _floats(column)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        found = column.cast(TEXT)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        found = _strings(column)
    else:
        return pa.array([_dumped(value) for value in column.to_pylist()], TEXT)
    return pc.fill_null(found, _scalar("null"))


def _strings(column: Any) -> Any:
    # Most columns of text have few distinct cells.
    values = pc.unique(column)
    made = pa.array([None if value is None else _dumped(value) for value in values.to_pylist()], TEXT)
    return made.take(pc.index_in(column, value_set=values))


def _floats(column: Any) -> Any:
    """Return floats as Python writes them; those of single precision have its short decimals."""
    plain = column.cast(TEXT)
    size = pc.abs(column)
    usual = pc.or_(pc.equal(size, 0), pc.and_(pc.greater_equal(size, SMALL), pc.less(size, LARGE)))
    found, integral = plain, pc.invert(pc.match_substring(plain, "."))
    if pc.any(integral).as_py():
        found = pc.if_else(integral, _joined(plain, _scalar(".0")), plain)
    if not pc.all(usual).as_py():
        rare = pc.invert(pc.fill_null(usual, True))
        made = [_dumped(float(cell)) for cell in plain.filter(rare).to_pylist()]
        found = pc.replace_with_mask(found, rare, pa.array(made, TEXT))
    return found


def _joined(*parts: Any) -> Any:
    return pc.binary_join_element_wise(*parts, _scalar(""))


def _scalar(text: str) -> Any:
    return pa.scalar(text, TEXT)


def _dumped(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)
    return json.dumps(value, ensure_ascii=False, default=as_text)
