"""Tables from files, whole or as a stream: CSV (also .tsv and .csv.gz) and Parquet. Every refusal is an InputError."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from credibly.errors import InputError
from credibly.tables import csv_files
from credibly.tables.parsing import Notes, finite, is_number, numbers, texts, whole_column

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".parquet")


def read_table(path: str | os.PathLike[str], *, text: Collection[str] = ()) -> pa.Table:
    """The whole of a file: numbers as float64, everything else as text, dates of a Parquet file as they are.

    A CSV column is one of numbers if every cell in it is a number or missing. Columns in `text` stay as they are written, so
    that the codes 007 and 7 differ where the other rows say that they are no numbers.
    """
    place = _checked(path)
    if _is_parquet(place):
        return _parquet_table(place, frozenset(text))
    form = _dialect(place)
    got = list(csv_files.blocks(place, form, form.names))
    whole = pa.Table.from_batches(got) if got else None
    if whole is None or not whole.num_rows:
        raise csv_files.no_rows(place)
    columns = {}
    for name in form.names:
        cells = whole_column(whole, name)
        values, wrong = (None, [(0, "")]) if name in text else numbers(cells, form.decimal)
        columns[name] = texts(cells) if wrong else values
    return pa.table(columns)


def header(path: str | os.PathLike[str]) -> list[str]:
    """The names of the columns."""
    place = _checked(path)
    return list(_parquet(place).schema_arrow.names if _is_parquet(place) else _dialect(place).names)


def count_rows(path: str | os.PathLike[str]) -> int | None:
    """How many rows there are where the file says so (Parquet); None where it would have to be read for that."""
    place = _checked(path)
    return int(_parquet(place).metadata.num_rows) if _is_parquet(place) else None


def batches(
    path: str | os.PathLike[str], columns: Collection[str], numeric: Collection[str], rows: int = 65536,
    mine: tuple[int, int] = (0, 1),
) -> Iterator[tuple[pa.RecordBatch, Notes]]:  # fmt: skip
    """A stream of so many rows at a time (the last one shorter), in memory that does not grow with the file.

    Args:
        path: of the file.
        columns: which ones to read. Those that the file lacks are left out; compare with `header`.
        numeric: those of them that are numbers: float64, null where a cell is missing, infinite or no number. The others
            are text.
        rows: of a batch.
        mine: (place, places) takes a batch for each place in turn, and gives those of one.

    Returns:
        Beside each batch the cells that are not what they should be, as (row within the batch, note).
    """
    place = _checked(path)
    if rows < 1:
        raise InputError("rows", f"found {rows}", "Pass a positive number")
    # A batch without columns has no rows: where none is wanted the first column stands for their number.
    if _is_parquet(place):
        names = _parquet(place).schema_arrow.names
        wanted = [n for n in names if n in set(columns)]
        decimal, stream = ".", _parquet_batches(place, wanted or names[:1], rows)
    else:
        form = _dialect(place)
        wanted = [n for n in form.names if n in set(columns)]
        decimal, stream = form.decimal, csv_files.blocks(place, form, wanted or form.names[:1], numeric)
    first, step = mine
    own = islice(_regrouped(stream, rows, place), first, None, step)
    return _typed(own, wanted, frozenset(numeric), decimal)


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
                notes += [(row, f"{name} = {said}") for row, said in wrong + infinite]
            else:
                columns[name] = texts(cells)
        made = pa.RecordBatch.from_pydict(columns) if columns else batch
        yield made, sorted(notes)


def _regrouped(stream: Iterator[pa.RecordBatch], rows: int, place: Path) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of a given length."""
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
        raise csv_files.no_rows(place)


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(held) == 1:
        return held[0]
    if held[0].schema != held[-1].schema:  # numbers up to here, and as text from the first cell on that is none
        held = [_as_text(batch, held[-1].schema) for batch in held]
    return pa.Table.from_batches(held).combine_chunks().to_batches()[0]


def _as_text(batch: pa.RecordBatch, schema: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([column.cast(kind) for column, kind in zip(batch, schema.types)], schema=schema)


# -- files ---------------------------------------------------------------------------------------------------------------
def suffix_of(path: Path) -> str:
    """The suffix that decides the format, ".csv.gz" included; "" where it is none of SUFFIXES."""
    name = path.name.lower()
    return next((s for s in SUFFIXES if name.endswith(s)), "")


def _is_parquet(path: Path) -> bool:
    return suffix_of(path) == ".parquet"


def _checked(path: str | os.PathLike[str]) -> Path:
    place = Path(path)
    if place.is_dir():
        raise InputError("table", f"{os.fspath(path)!r} is a folder", "Pass a CSV or Parquet file")
    if not place.exists():
        raise InputError("table", f"there is no file {os.fspath(path)!r}", "Check the path")
    if not suffix_of(place):
        raise InputError(
            "table", f"{place.name!r} has no known suffix", f"Pass a file that ends in {', '.join(SUFFIXES)}"
        )
    try:
        with open(place, "rb") as handle:
            if not handle.read(1):
                raise InputError("table", f"{place.name!r} is empty", "Pass a file with column names and rows")
    except OSError as error:
        raise InputError(
            "table", f"{os.fspath(path)!r} cannot be read ({error.strerror})", "Check its rights"
        ) from None
    return place


def _dialect(place: Path) -> csv_files.Dialect:
    form = csv_files.dialect(place)
    _check_names(place, form.names)
    return form


def _check_names(place: Path, names: Collection[str]) -> None:
    for number, name in enumerate(names, 1):
        if not name.strip():
            found = f"column {number} of {place.name!r} has no name"
            advice = "Give every column a name in the first line (from pandas, write with index=False)"
            raise InputError("table", found, advice)
    twice = [repr(name) for name, count in Counter(names).items() if count > 1]
    if twice:
        found = f"{place.name!r} has more than one column named {', '.join(twice[:5])}"
        raise InputError("table", found, "Give every column a name of its own")


# -- Parquet -------------------------------------------------------------------------------------------------------------
def _parquet(place: Path) -> Any:
    try:
        file = pq.ParquetFile(place)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _broken(place, error) from None
    schema = file.schema_arrow
    _check_names(place, schema.names)
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            found = f"column {field.name!r} of {place.name!r} holds {kind}"
            raise InputError("table", found, "Write the file without it, or spread it over columns of numbers and text")
    return file


def _parquet_table(place: Path, text: frozenset[str]) -> pa.Table:
    file = _parquet(place)
    try:
        table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise _broken(place, error) from None
    if not table.num_rows:
        raise csv_files.no_rows(place)
    columns = {}
    for name in table.column_names:
        cells = whole_column(table, name)
        kind = cells.type
        if name not in text and (pa.types.is_temporal(kind) or is_number(kind)):
            columns[name] = cells if pa.types.is_temporal(kind) else numbers(cells)[0]
        else:
            columns[name] = texts(cells)
    return pa.table(columns)


def _parquet_batches(place: Path, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    file = _parquet(place)
    try:
        yield from file.iter_batches(batch_size=rows, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise _broken(place, error) from None


def _broken(place: Path, error: Exception) -> InputError:
    said = str(error).splitlines()[0][:200]
    return InputError("table", f"{place.name!r} cannot be read as Parquet ({said})", "Write it again, unencrypted")
