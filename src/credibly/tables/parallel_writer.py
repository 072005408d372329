"""A table that many processes write: each its own pieces, into a file beside the table, which the first then joins in order.

Piece i is written by process i modulo their number. Nothing but pieces is held in memory, and the files go whatever happens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from credibly.distributed.world import World
from credibly.tables.writing import TableWriter, as_array


class Writer(Protocol):
    """What takes the columns of one piece after the other."""

    def write(self, columns: Mapping[str, Any]) -> None:
        """Appends the rows of a piece."""


@contextmanager
def shared_writer(path: str | os.PathLike[str], everyone: World, *, force: bool = False) -> Iterator[Writer]:
    """A writer of this process's pieces. When all have left the block the table is at its place, whole, as if one had written it."""
    whole = TableWriter(path, force=force)
    if everyone.size == 1:
        with whole:
            yield whole
        return
    told = everyone.gather(os.getpid())[0]  # so that no other run has the same names
    parts = [whole.path.with_name(f".{whole.path.name}.{told}-{rank}.part") for rank in range(everyone.size)]
    try:
        with _Pieces(parts[everyone.rank]) as mine:
            yield mine
        counts = everyone.gather(mine.count)
        if everyone.leader:
            with whole:
                for piece in _in_order(parts, counts):
                    whole.write(piece)
        everyone.barrier()
    finally:
        for part in (
            parts if everyone.leader else [parts[everyone.rank]]
        ):  # one that was killed leaves its own to the first
            part.unlink(missing_ok=True)


class _Pieces:
    """The pieces of one process, as a stream in Arrow's own format: values and types come back as they were."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._file = open(path, "wb")  # noqa: SIM115  (closed by __exit__)
        self._writer: Any = None
        self._schema: Any = None

    def __enter__(self) -> _Pieces:
        return self

    def write(self, columns: Mapping[str, Any]) -> None:
        """Appends a piece."""
        made = pa.RecordBatch.from_pydict({name: as_array(values) for name, values in columns.items()})
        if self._writer is None:
            self._schema, self._writer = made.schema, pa.ipc.new_stream(self._file, made.schema)
        self._writer.write_batch(made.cast(self._schema))
        self.count += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._file.close()


def _in_order(parts: list[Path], counts: list[int]) -> Iterator[dict[str, Any]]:
    """The columns of all pieces, one from each process in turn."""
    with ExitStack() as stack:
        streams = [stack.enter_context(pa.OSFile(os.fspath(part))) if n else None for part, n in zip(parts, counts)]
        readers = [None if stream is None else pa.ipc.open_stream(stream) for stream in streams]
        for number in range(sum(counts)):
            batch = readers[number % len(parts)].read_next_batch()  # type: ignore[union-attr]
            yield {name: batch.column(name) for name in batch.schema.names}
