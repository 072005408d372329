"""A table written by many processes: each writes its blocks to a temporary file, and the leader joins them in order.

Block i is written by the process of rank i modulo the world size. One block at a time is held in memory. The temporary
files are removed in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from credibly.distributed.world import World
from credibly.tables.files.writing import TableWriter, as_array


class Writer(Protocol):
    """Anything that tables can be written to block by block."""

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append the rows of a block."""


@contextmanager
def shared_writer(
    path: str | os.PathLike[str], everyone: World, *, force: bool = False, excel_safe: bool = False
) -> Iterator[Writer]:
    """Yield a writer of this process's blocks. On exit the table is complete, the same as from a single process."""
    table = TableWriter(path, force=force, excel_safe=excel_safe)
    if everyone.size == 1:
        with table:
            yield table
        return
    # The leader's process id keeps the names apart from those of other runs.
    leader_pid = everyone.gather(os.getpid())[0]
    parts = [table.path.with_name(f".{table.path.name}.{leader_pid}-{rank}.part") for rank in range(everyone.size)]
    try:
        with _BlockStream(parts[everyone.rank]) as mine:
            yield mine
        counts = everyone.gather(mine.count)
        if everyone.leader:
            with table:
                for block in _in_order(parts, counts):
                    table.write(block)
        everyone.barrier()
    finally:
        # The leader also removes the files of processes that were killed.
        for part in parts if everyone.leader else [parts[everyone.rank]]:
            part.unlink(missing_ok=True)


class _BlockStream:
    """The blocks of one process in Arrow's IPC stream format, which preserves values and types."""

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._file = open(path, "wb")  # noqa: SIM115  (closed by __exit__)
        self._writer: Any = None
        self._schema: Any = None

    def __enter__(self) -> _BlockStream:
        return self

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append a block."""
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
    """Yield the columns of all blocks, one from each process in turn."""
    with ExitStack() as stack:
        streams = [stack.enter_context(pa.OSFile(os.fspath(part))) if n else None for part, n in zip(parts, counts)]
        readers = [None if stream is None else pa.ipc.open_stream(stream) for stream in streams]
        for number in range(sum(counts)):
            batch = readers[number % len(parts)].read_next_batch()  # type: ignore[union-attr]
            yield {name: batch.column(name) for name in batch.schema.names}
