"""Parquet and Arrow (Feather) files as streams of typed columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from credibly.errors import InputError
from credibly.tables.files.sources import Source


def schema(source: Source) -> pa.Schema:
    """Return the schema of a file. Raise if it has a column that is neither numbers, text nor dates."""
    with _reader(source) as reader:
        found = reader.schema_arrow if source.suffix == ".parquet" else reader.schema
    for field in found:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            wrong = f"column {field.name!r} of {source.name!r} holds {kind}"
            raise InputError("table", wrong, "Leave it out of the file, or split it into columns of numbers and text")
    return found


def count_rows(source: Source) -> int | None:
    """Return the number of rows, or None for an Arrow file, which would have to be read for that."""
    if source.suffix != ".parquet":
        return None
    with _reader(source) as reader:
        return int(reader.metadata.num_rows)


def blocks(source: Source, columns: list[str], rows: int = 65_536) -> Iterator[pa.RecordBatch]:
    """Yield batches with the given columns. Those of an Arrow file have the length that they were written with."""
    with _reader(source) as reader:
        if source.suffix == ".parquet":
            yield from reader.iter_batches(batch_size=rows, columns=columns)
            return
        for batch in _record_batches(reader):
            # The file may come from anywhere: offsets that point nowhere would crash the process later.
            batch.validate(full=True)
            yield batch.select(columns)


@contextmanager
def _reader(source: Source) -> Iterator[Any]:
    try:
        with source.random_access() as handle:
            yield pq.ParquetFile(handle) if source.suffix == ".parquet" else _arrow_reader(handle)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).splitlines()[0][:200]
        kind = "Parquet" if source.suffix == ".parquet" else "an Arrow file"
        raise InputError(
            "table", f"cannot read {source.name!r} as {kind} ({reason})", "Write it again, unencrypted"
        ) from None


def _arrow_reader(handle: Any) -> Any:
    """Return a reader of the file format, which Feather is, or of the stream format."""
    try:
        return pa.ipc.open_file(handle)
    except pa.ArrowInvalid:
        handle.seek(0)
        return pa.ipc.open_stream(handle)


def _record_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader
