"""Reading of tables, whole or as a stream: CSV (also .tsv and .csv.gz) and Parquet. Every error is an `InputError`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from credibly.core.files import TABLE_SUFFIXES, table_suffix
from credibly.errors import InputError
from credibly.tables import csv_files
from credibly.tables.parsing import Notes, finite, is_number, numbers, texts, whole_column

SUFFIXES = TABLE_SUFFIXES


def read_table(path: str | os.PathLike[str], *, text: Collection[str] = ()) -> pa.Table:
    """Read a whole file: numbers as float64, everything else as text. Dates in a Parquet file stay dates.

    A CSV column is numeric if every cell in it is a number or missing. Columns in `text` are read as text regardless,
    so that the codes 007 and 7 differ.
    """
    file = _checked(path)
    if _is_parquet(file):
        return _parquet_table(file, frozenset(text))
    form = _dialect(file)
    found = list(csv_files.blocks(file, form, form.names))
    table = pa.Table.from_batches(found) if found else None
    if table is None or not table.num_rows:
        raise csv_files.no_rows(file)
    columns = {}
    for name in form.names:
        cells = whole_column(table, name)
        values, wrong = (None, [(0, "")]) if name in text else numbers(cells, form.decimal)
        columns[name] = texts(cells) if wrong else values
    return pa.table(columns)


def header(path: str | os.PathLike[str]) -> list[str]:
    """Return the column names of a file."""
    file = _checked(path)
    return list(_parquet(file).schema_arrow.names if _is_parquet(file) else _dialect(file).names)


def count_rows(path: str | os.PathLike[str]) -> int | None:
    """Return the number of rows of a Parquet file, or None for a CSV file, which would have to be read for that."""
    file = _checked(path)
    return int(_parquet(file).metadata.num_rows) if _is_parquet(file) else None


def batches(
    path: str | os.PathLike[str],
    columns: Collection[str],
    numeric: Collection[str],
    rows: int = 65536,
    mine: tuple[int, int] = (0, 1),
) -> Iterator[tuple[pa.RecordBatch, Notes]]:
    """Stream a file in batches of the given number of rows (the last may be shorter), in constant memory.

    Args:
        path: the file.
        columns: columns to read. Those that the file lacks are left out; compare with `header`.
        numeric: the numeric ones among them: float64, null where a cell is missing, infinite or not a number. The
            others are text.
        rows: rows per batch.
        mine: (rank, size) yields every size-th batch, starting with batch number rank.

    Returns:
        Each batch with (row within the batch, note) for the cells that do not fit their column.
    """
    file = _checked(path)
    if rows < 1:
        raise InputError("rows", f"must be positive, got {rows}")
    # A batch without columns has no rows: if no column is wanted, read the first one to keep the row count.
    if _is_parquet(file):
        names = _parquet(file).schema_arrow.names
        wanted = [n for n in names if n in set(columns)]
        decimal, stream = ".", _parquet_batches(file, wanted or names[:1], rows)
    else:
        form = _dialect(file)
        wanted = [n for n in form.names if n in set(columns)]
        decimal, stream = form.decimal, csv_files.blocks(file, form, wanted or form.names[:1], numeric)
    first, step = mine
    own = islice(_regrouped(stream, rows, file), first, None, step)
    return _typed(own, wanted, frozenset(numeric), decimal)


def verbatim_batches(
    path: str | os.PathLike[str], columns: Collection[str], rows: int = 65536, mine: tuple[int, int] = (0, 1)
) -> Iterator[pa.RecordBatch]:
    """Stream columns as they are in the file, in the batches of `batches`: text of a CSV, types of a Parquet file."""
    file = _checked(path)
    if _is_parquet(file):
        stream = _parquet_batches(file, list(columns), rows)
    else:
        stream = csv_files.blocks(file, _dialect(file), columns, missing=("",))
    first, step = mine
    return islice(_regrouped(stream, rows, file), first, None, step)


def _typed(
    stream: Iterator[pa.RecordBatch], wanted: list[str], numeric: frozenset[str], decimal: str
) -> Iterator[tuple[pa.RecordBatch, Notes]]:
    for batch in stream:
        notes: Notes = []
        columns = {}
        for name in wanted:
            cells = batch.column(name)
            if name in numeric:
                values, wrong = numbers(cells, decimal)
                columns[name], infinite = finite(values)
                notes += [(row, f"{name} = {note}") for row, note in wrong + infinite]
            else:
                columns[name] = texts(cells)
        made = pa.RecordBatch.from_pydict(columns) if columns else batch
        yield made, sorted(notes)


def _regrouped(stream: Iterator[pa.RecordBatch], rows: int, file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of a given length."""
    held: list[pa.RecordBatch] = []
    count, seen = 0, False
    for batch in stream:
        while batch.num_rows:
            part = batch.slice(0, rows - count)
            held.append(part)
            count += part.num_rows
            batch = batch.slice(part.num_rows)
            if count == rows:
                yield _joined(held)
                held, count, seen = [], 0, True
    if held:
        yield _joined(held)
    elif not seen:
        raise csv_files.no_rows(file)


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(held) == 1:
        return held[0]
    # A numeric column turns into text at the first block with a cell that is not a number.
    if held[0].schema != held[-1].schema:
        held = [_as_text(batch, held[-1].schema) for batch in held]
    return pa.Table.from_batches(held).combine_chunks().to_batches()[0]


def _as_text(batch: pa.RecordBatch, schema: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([column.cast(kind) for column, kind in zip(batch, schema.types)], schema=schema)


# -- files -------------------------------------------------------------------------------------------------------------
def suffix_of(path: Path) -> str:
    """Return the suffix that determines the format, such as ".csv.gz", or "" if it is none of SUFFIXES."""
    return table_suffix(path)


def _is_parquet(path: Path) -> bool:
    return suffix_of(path) == ".parquet"


def _checked(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if file.is_dir():
        raise InputError("table", f"{os.fspath(path)!r} is a folder", "Pass a CSV or Parquet file")
    if not file.exists():
        raise InputError("table", f"no such file: {os.fspath(path)!r}")
    if not suffix_of(file):
        raise InputError("table", f"{file.name!r} has an unknown suffix", f"Pass one of {', '.join(SUFFIXES)}")
    try:
        with open(file, "rb") as handle:
            if not handle.read(1):
                raise InputError("table", f"{file.name!r} is empty", "Pass a file with a header line and rows")
    except OSError as error:
        raise InputError("table", f"cannot read {os.fspath(path)!r} ({error.strerror})") from None
    return file


def _dialect(file: Path) -> csv_files.Dialect:
    form = csv_files.dialect(file)
    _check_names(file, form.names)
    return form


def _check_names(file: Path, names: Collection[str]) -> None:
    for number, name in enumerate(names, 1):
        if not name.strip():
            found = f"column {number} of {file.name!r} has no name"
            advice = "Name every column in the header (from pandas, write with index=False)"
            raise InputError("table", found, advice)
    twice = [repr(name) for name, count in Counter(names).items() if count > 1]
    if twice:
        found = f"{file.name!r} has more than one column named {', '.join(twice[:5])}"
        raise InputError("table", found, "Make the names unique")


# -- Parquet -----------------------------------------------------------------------------------------------------------
def _parquet(file: Path) -> Any:
    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    schema = parquet.schema_arrow
    _check_names(file, schema.names)
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            found = f"column {field.name!r} of {file.name!r} holds {kind}"
            raise InputError("table", found, "Leave it out of the file, or split it into columns of numbers and text")
    return parquet


def _parquet_table(file: Path, text: frozenset[str]) -> pa.Table:
    parquet = _parquet(file)
    try:
        table = parquet.read()
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None
    if not table.num_rows:
        raise csv_files.no_rows(file)
    columns = {}
    for name in table.column_names:
        cells = whole_column(table, name)
        kind = cells.type
        if name not in text and (pa.types.is_temporal(kind) or is_number(kind)):
            columns[name] = cells if pa.types.is_temporal(kind) else numbers(cells)[0]
        else:
            columns[name] = texts(cells)
    return pa.table(columns)


def _parquet_batches(file: Path, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    parquet = _parquet(file)
    try:
        yield from parquet.iter_batches(batch_size=rows, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> InputError:
    reason = str(error).splitlines()[0][:200]
    return InputError("table", f"cannot read {file.name!r} as Parquet ({reason})", "Write it again, unencrypted")
