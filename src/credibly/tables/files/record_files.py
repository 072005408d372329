"""Excel workbooks and JSON lines, read whole as text that is then interpreted like that of CSV; writes workbooks."""

from __future__ import annotations

import datetime
import io
import json
import math
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import IO, Any, TypeAlias

import pyarrow as pa

from credibly.errors import InputError
from credibly.tables.files.sources import Source, check_expansion

# Types of cells in a numeric column that need no conversion from text; booleans count as words.
_NUMBERS = {float, int, type(None)}
# Types in which copied columns are kept; other cells are kept as text.
_KEPT = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    datetime.datetime: pa.timestamp("us"),
    datetime.date: pa.date32(),
    datetime.time: pa.time64("us"),
}
# Names, rows of cells, and remarks for the user.
Cells: TypeAlias = tuple[list[str], Iterable[Iterable[Any]], tuple[str, ...]]
INSTALL = 'pip install "credibly[excel]"'
EXCEL_ROWS = 1 << 20


def read_text(source: Source) -> tuple[pa.Table, tuple[str, ...]]:
    """Return the cells of a file as text, null where they are empty, and remarks for the user."""
    facts = source.path.stat()
    return _read_text(source, facts.st_mtime_ns, facts.st_size)


# Cached, since a prediction reads the header, the number of rows and the rows in separate calls.
@lru_cache(maxsize=1)
def _read_text(source: Source, _modified: int, _size: int) -> tuple[pa.Table, tuple[str, ...]]:
    names, columns, notes = _cells(source)
    found = [pa.array([None if cell is None else as_text(cell) for cell in cells], pa.string()) for cells in columns]
    # Names are checked by the caller: a table may hold one twice.
    return pa.Table.from_arrays(found, names=names), notes


def read_values(source: Source, wanted: Sequence[str]) -> pa.Table:
    """Return columns of a file with the types of their cells; as text where the cells of a column differ in type."""
    names, columns, _ = _cells(source)
    return pa.table({name: _values(columns[names.index(name)]) for name in wanted})


def _cells(source: Source) -> tuple[list[str], list[list[Any]], tuple[str, ...]]:
    """Return the names and the cells of the columns of a file, and remarks for the user."""
    names, rows, notes = _workbook(source) if source.suffix == ".xlsx" else _json_lines(source)
    columns: list[list[Any]] = [[] for _ in names]
    for row in rows:
        cells = list(row)[: len(names)]
        for column, cell in zip(columns, cells + [None] * (len(names) - len(cells))):
            column.append(cell)
    return [name.strip() for name in names], columns, notes


def _values(cells: list[Any]) -> pa.Array:
    """Return the cells of a column in the type that all of them have, else as text."""
    kinds = {type(cell) for cell in cells if cell is not None}
    if len(kinds) == 1 or kinds == {int, float}:
        with suppress(pa.ArrowException, OverflowError):
            return pa.array(cells, _KEPT.get(float if len(kinds) > 1 else kinds.pop(), pa.string()))
    return pa.array([None if cell is None else as_text(cell) for cell in cells], pa.string())


def _json_lines(source: Source) -> Cells:
    """Read a file with a JSON object per line. The columns are the keys of all of them, in order of appearance."""
    records: list[dict[str, Any]] = []
    with source.open() as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise _bad_line(source, number, f"is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise _bad_line(source, number, f"is {type(record).__name__}, not an object")
            for key, value in record.items():
                if isinstance(value, (dict, list)):
                    raise _bad_line(source, number, f"has nested values in {key!r}")
            records.append(record)
    names = list(dict.fromkeys(name for record in records for name in record))
    return names, ([record.get(name) for name in names] for record in records), ()


def record_columns(
    records: Sequence[Mapping[str, Any]], columns: Collection[str], numeric: Collection[str]
) -> dict[str, pa.Array]:
    """Return columns of records: text as in a file of JSON lines, except for numeric columns of numbers, as float64.

    A column that no record has is left out. Raise on nested values, which are not cells.
    """
    found: dict[str, pa.Array] = {}
    for name, cells in _by_column(records, list(columns)).items():
        kinds = set(map(type, cells))
        if kinds <= {type(None)} and not any(name in record for record in records):
            continue
        if name in numeric and kinds <= _NUMBERS:
            with suppress(pa.ArrowInvalid, OverflowError):
                found[name] = pa.array(cells, pa.float64(), from_pandas=False)
                continue
        for row, cell in enumerate(cells):
            if isinstance(cell, (dict, list)):
                what = "an object" if isinstance(cell, dict) else "a list"
                raise InputError(f"rows[{row}].{name}", f"must be a number, text or null, got {what}")
        try:
            found[name] = pa.array([None if cell is None else as_text(cell) for cell in cells], pa.string())
        except UnicodeEncodeError:
            raise InputError(name, "must be valid Unicode, got a lone surrogate") from None
    return found


def _by_column(records: Sequence[Mapping[str, Any]], names: list[str]) -> dict[str, Sequence[Any]]:
    """Return the values of each name over the records, None where a record lacks it."""
    if len(names) > 1:
        # Several times faster than one look-up after another, if all records are complete.
        with suppress(KeyError):
            return dict(zip(names, zip(*map(itemgetter(*names), records)), strict=True))
    return {name: [record.get(name) for record in records] for name in names}


def _bad_line(source: Source, number: int, found: str) -> InputError:
    advice = 'Write an object of numbers and text per line, such as {"age": 31, "city": "Oslo"}'
    return InputError("table", f"line {number} of {source.name!r} {found}", advice)


def excel_library(argument: str, name: str) -> Any:
    """Return openpyxl. Raise with the command that installs it if it is absent."""
    try:
        import openpyxl
    except ImportError:
        found = f"{name!r} is an Excel workbook, and openpyxl is not installed"
        raise InputError(argument, found, f"Install it with {INSTALL}, or use CSV") from None
    return openpyxl


def _workbook(source: Source) -> Cells:
    """Read the first sheet with cells of an Excel workbook."""
    openpyxl = excel_library("table", source.name)
    handle = source.random_access()
    try:
        with zipfile.ZipFile(handle) as archive:
            check_expansion(source.path, archive.infolist())
        book = openpyxl.load_workbook(handle, read_only=True, data_only=True)
        filled: list[tuple[str, list[tuple[Any, ...]]]] = []
        others: list[str] = []
        for sheet in book.worksheets:
            if filled:
                others.append(sheet.title)
                continue
            # The stored size of a sheet may be wrong.
            sheet.reset_dimensions()
            rows = [row for row in sheet.iter_rows(values_only=True) if any(cell is not None for cell in row)]
            if rows:
                filled.append((sheet.title, rows))
    except InputError:
        raise
    # On a malformed workbook, the library raises whatever error it runs into.
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InputError(
            "table", f"cannot read {source.name!r} as Excel ({reason})", "Save it again as .xlsx"
        ) from None
    finally:
        handle.close()
    if not filled:
        raise InputError("table", f"{source.name!r} is empty", "Pass a workbook with a header row and rows")
    title, rows = filled[0]
    names = ["" if name is None else as_text(name) for name in rows[0]]
    width = max(number for row in rows for number, cell in enumerate(row, 1) if cell is not None)
    names += [""] * (width - len(names))
    notes = (f"read from the sheet {title!r}, the first of {1 + len(others)}",) if others else ()
    return names[:width], rows[1:], notes


def as_text(cell: Any) -> str:
    """Return a cell as a CSV file would write it."""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        return str(int(cell))
    if isinstance(cell, (datetime.datetime, datetime.date, datetime.time)):
        return cell.isoformat(" ") if isinstance(cell, datetime.datetime) else cell.isoformat()
    if isinstance(cell, datetime.timedelta):
        return repr(cell.total_seconds())
    return str(cell)


class WorkbookWriter:
    """Writer of an Excel workbook with one sheet. The file is written by `save`, at the end."""

    def __init__(self, file: IO[bytes], names: list[str]) -> None:
        self._file = file
        self._book = excel_library("--out", "the output").Workbook(write_only=True)
        self._sheet = self._book.create_sheet("predictions")
        self._count = 0
        self._append(names)

    def write_table(self, table: pa.Table) -> None:
        """Append rows."""
        for row in _rows(table):
            self._append([_finite(value) for value in row.values()])

    def save(self) -> None:
        """Write the file."""
        # In memory first: the library seeks in its file, and an error while it does would leave it open.
        whole = io.BytesIO()
        self._book.save(whole)
        self._file.write(whole.getvalue())

    def close(self) -> None:
        """Release what the library holds."""
        if not self._sheet.closed:
            self._sheet.close()

    def _append(self, values: list[Any]) -> None:
        from openpyxl.cell import WriteOnlyCell
        from openpyxl.utils.exceptions import IllegalCharacterError

        self._count += 1
        if self._count > EXCEL_ROWS:
            raise InputError("--out", f"an Excel sheet has at most {EXCEL_ROWS:,} rows", "Choose .csv or .parquet")
        cells = []
        for value in values:
            cell = WriteOnlyCell(self._sheet)
            try:
                cell.value = value
            except IllegalCharacterError:
                cell.value = repr(value)
            if isinstance(value, str):
                # Text stays text, also if it begins like a formula.
                cell.data_type = "s"
            cells.append(cell)
        self._sheet.append(cells)


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    # Short decimals for float32, as CSV has them.
    shortest = [c.cast(pa.string()).cast(pa.float64()) if pa.types.is_float32(c.type) else c for c in table.columns]
    found: list[dict[str, Any]] = pa.Table.from_arrays(shortest, names=table.column_names).to_pylist()
    return found


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
