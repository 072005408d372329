"""Reading of tables, whole or as a stream, in every format of `sources`. Every error is an `InputError`."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from credibly.core.memory import in_words
from credibly.errors import InputError
from credibly.tables.cells.conventions import USUAL, Conventions, attach, conventions_of
from credibly.tables.cells.interpretation import interpreted
from credibly.tables.cells.parsing import Notes, finite, is_number, numbers, texts, whole_column
from credibly.tables.files import csv_files, record_files, typed_files
from credibly.tables.files.row_samples import sample_rows
from credibly.tables.files.sources import DELIMITED, RECORDS, TYPED, Bytes, Source, source_of

# The name of a first column without one, as R and pandas write the names of rows.
ROW_NAMES = "row names"


def read_table(
    path: str | os.PathLike[str],
    *,
    text: Collection[str] = (),
    conventions: Conventions = USUAL,
    most: int | None = None,
) -> pa.Table:
    """Read a whole file: numbers as float64, dates as timestamps, everything else as text.

    A text column is numeric if its cells are numbers or missing, up to a few stray ones, however they are written:
    $240,000 and 65.2% are numbers. In a file with types, text of digits alone stays text.

    Args:
        path: the file.
        text: columns that are read as text regardless, so that the codes 007 and 7 differ.
        conventions: further markers of missing values; those of the training table for a later file.
        most: bytes of cells to read: of a larger table, a random sample of the rows, with a note. None reads all.

    Returns:
        The table without rows that are totals of others. `conventions_of` returns how its cells were read.
    """
    source = source_of(path)
    if source.suffix in RECORDS:
        raw, notes = _records(source)
        table = interpreted(_with_rows(source, raw), text, conventions)
        known = conventions_of(table)
        return attach(table, dataclasses.replace(known, notes=(*notes, *known.notes)))
    if source.suffix in TYPED:
        names = _schema(source).names
        raw, sampled = _sampled(typed_files.blocks(source, names), most)
        return _with_notes(interpreted(_with_rows(source, raw), text, conventions, typed=True), sampled)
    form = _dialect(source)
    raw, sampled = _sampled(csv_files.blocks(source, form, form.names, na=conventions.na), most)
    table = _with_notes(interpreted(_with_rows(source, raw), text, conventions, form.decimal), sampled)
    if form.names[0] != ROW_NAMES or form.raw[0].strip():
        return table
    known, note = conventions_of(table), "column 1 has no name and is left out, as it names the rows"
    return attach(table.drop_columns([ROW_NAMES]), dataclasses.replace(known, notes=(note, *known.notes)))


def _sampled(blocks: Iterator[pa.RecordBatch], most: int | None) -> tuple[pa.Table | None, tuple[str, ...]]:
    """Return the rows of a stream, or as many as may be read, with a note."""
    found, kept, seen = sample_rows(blocks, most)
    notes: tuple[str, ...] = ()
    if kept < seen:
        notes = (
            f"the table is larger than the {in_words(most or 0)} that a fit reads, so {kept:,} of its {seen:,} rows, "
            "chosen at random, are used",
        )
    return pa.Table.from_batches(found) if found else None, notes


def _with_notes(table: pa.Table, notes: tuple[str, ...]) -> pa.Table:
    if not notes:
        return table
    known = conventions_of(table)
    return attach(table, dataclasses.replace(known, notes=(*notes, *known.notes)))


def header(path: str | os.PathLike[str] | Bytes) -> list[str]:
    """Return the column names of a file."""
    source = source_of(path)
    if source.suffix in DELIMITED:
        return list(_dialect(source).names)
    return list(_schema(source).names if source.suffix in TYPED else _records(source)[0].column_names)


def count_rows(path: str | os.PathLike[str]) -> int | None:
    """Return the number of rows, or None for a file that would have to be read for that, such as CSV."""
    source = source_of(path)
    if source.suffix in TYPED:
        _schema(source)
        return typed_files.count_rows(source)
    return int(_records(source)[0].num_rows) if source.suffix in RECORDS else None


def batches(
    path: str | os.PathLike[str] | Bytes,
    columns: Collection[str],
    numeric: Collection[str],
    rows: int = 65536,
    mine: tuple[int, int] = (0, 1),
    conventions: Conventions = USUAL,
) -> Iterator[tuple[pa.RecordBatch, Notes]]:
    """Stream a file in batches of the given number of rows (the last may be shorter), in constant memory.

    Excel workbooks and JSON lines are read whole first.

    Args:
        path: the file.
        columns: columns to read. Those that the file lacks are left out; compare with `header`.
        numeric: the numeric ones among them: float64, null where a cell is missing, infinite or not a number. The
            others are text, or dates if the file has such a type.
        rows: rows per batch.
        mine: (rank, size) yields every size-th batch, starting with batch number rank.
        conventions: those of the training table.

    Returns:
        Each batch with (row within the batch, note) for the cells that do not fit their column.
    """
    source = source_of(path)
    if rows < 1:
        raise InputError("rows", f"must be positive, got {rows}")
    decimal, stream, wanted = _stream(source, frozenset(columns), frozenset(numeric), rows, conventions)
    first, step = mine
    own = islice(_regrouped(stream, rows, source), first, None, step)
    return _typed(own, wanted, frozenset(numeric), decimal, conventions)


def _stream(
    source: Source, columns: frozenset[str], numeric: frozenset[str], rows: int, conventions: Conventions
) -> tuple[str, Iterator[pa.RecordBatch], list[str]]:
    """Return the decimal mark, the blocks and the columns to read."""
    # A batch without columns has no rows: if no column is wanted, read the first one to keep the row count.
    if source.suffix in TYPED:
        names = _schema(source).names
        wanted = [n for n in names if n in columns]
        return ".", typed_files.blocks(source, wanted or names[:1], rows), wanted
    if source.suffix in RECORDS:
        table = _records(source)[0]
        wanted = [n for n in table.column_names if n in columns]
        return ".", iter(table.select(wanted or table.column_names[:1]).to_batches()), wanted
    form = _dialect(source)
    wanted = [n for n in form.names if n in columns]
    # Arrow parses numbers itself, but only with the decimal mark of the file.
    plain = numeric - set(conventions.decimals)
    stream = csv_files.blocks(source, form, wanted or form.names[:1], plain, conventions.na)
    return form.decimal, stream, wanted


def verbatim_batches(
    path: str | os.PathLike[str],
    columns: Collection[str],
    rows: int = 65536,
    mine: tuple[int, int] = (0, 1),
    *,
    typed: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Stream columns as they are in the file, in the batches of `batches`: the text of a CSV, the types of others.

    The cells of Excel workbooks and JSON lines are text unless `typed`, as is best for a copy in a file of text.
    """
    source, wanted = source_of(path), list(columns)
    if source.suffix in TYPED:
        stream = typed_files.blocks(source, wanted, rows)
    elif source.suffix in RECORDS:
        table = record_files.read_values(source, wanted) if typed else _records(source)[0].select(wanted)
        stream = iter(table.to_batches())
    else:
        stream = csv_files.blocks(source, _dialect(source), wanted, missing=("",))
    first, step = mine
    return islice(_regrouped(stream, rows, source), first, None, step)


def record_batch(
    records: Sequence[Mapping[str, Any]],
    columns: Collection[str],
    numeric: Collection[str],
    conventions: Conventions = USUAL,
) -> tuple[pa.RecordBatch, Notes]:
    """Return records as `batches` reads them from a file of JSON lines, with (row, note) for cells that do not fit."""
    found = record_files.record_columns(records, columns, numeric)
    batch = pa.RecordBatch.from_pydict(found or {"": pa.nulls(len(records))})
    return next(_typed(iter([batch]), list(found), frozenset(numeric), ".", conventions))


def typed_batch(
    batch: pa.RecordBatch, numeric: Collection[str], conventions: Conventions
) -> tuple[pa.RecordBatch, Notes]:
    """Return cells with types, such as those of a data frame, as `batches` reads them from a file with types."""
    return next(_typed(iter([batch]), batch.schema.names, frozenset(numeric), ".", conventions))


def _typed(
    stream: Iterator[pa.RecordBatch], wanted: list[str], numeric: frozenset[str], decimal: str, conventions: Conventions
) -> Iterator[tuple[pa.RecordBatch, Notes]]:
    for batch in stream:
        notes: Notes = []
        columns = {}
        for name in wanted:
            cells = batch.column(name)
            if name in numeric:
                values, wrong = numbers(cells, conventions.decimals.get(name, decimal), conventions.na)
                columns[name], infinite = finite(values)
                notes += [(row, f"{name} = {note}") for row, note in wrong + infinite]
            elif pa.types.is_temporal(cells.type) and not is_number(cells.type):
                columns[name] = cells
            else:
                columns[name] = texts(cells, conventions.na)
        made = pa.RecordBatch.from_pydict(columns) if columns else batch
        yield made, sorted(notes)


def _regrouped(stream: Iterator[pa.RecordBatch], rows: int, source: Source) -> Iterator[pa.RecordBatch]:
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
        raise csv_files.no_rows(source)


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(held) == 1:
        return held[0]
    # A numeric column turns into text at the first block with a cell that is not a number.
    if held[0].schema != held[-1].schema:
        held = [_as_text(batch, held[-1].schema) for batch in held]
    table = pa.Table.from_batches(held)
    return pa.RecordBatch.from_pydict({name: whole_column(table, name) for name in table.column_names})


def _as_text(batch: pa.RecordBatch, schema: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([column.cast(kind) for column, kind in zip(batch, schema.types)], schema=schema)


# -- files -------------------------------------------------------------------------------------------------------------
def _dialect(source: Source) -> csv_files.Dialect:
    form = csv_files.dialect(source)
    if not form.names[0] and len(form.names) > 1 and ROW_NAMES not in form.names:
        form = dataclasses.replace(form, names=(ROW_NAMES, *form.names[1:]))
    _check_names(source, form.names)
    return form


def _schema(source: Source) -> Any:
    schema = typed_files.schema(source)
    _check_names(source, schema.names)
    return schema


def _records(source: Source) -> tuple[pa.Table, tuple[str, ...]]:
    table, notes = record_files.read_text(source)
    _check_names(source, table.column_names)
    return table, notes


def _check_names(source: Source, names: Collection[str]) -> None:
    for number, name in enumerate(names, 1):
        if not name.strip():
            found = f"column {number} of {source.name!r} has no name"
            advice = "Name every column in the header (from pandas, write with index=False)"
            raise InputError("table", found, advice)
    twice = [repr(name) for name, count in Counter(names).items() if count > 1]
    if twice:
        found = f"{source.name!r} has more than one column named {', '.join(twice[:5])}"
        raise InputError("table", found, "Make the names unique; spaces around a name do not count")


def _with_rows(source: Source, table: Any) -> Any:
    if table is None or not table.num_rows:
        raise csv_files.no_rows(source)
    return table
