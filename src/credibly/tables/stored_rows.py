"""Rows of the table that a run folder stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from credibly.core.files import file_problem
from credibly.core.memory import in_words
from credibly.errors import InputError, StoreError
from credibly.storage.guarding import as_store_errors
from credibly.tables.files.reading import read_table
from credibly.tables.preparation import Preparation

if TYPE_CHECKING:
    from pyarrow import Table

# Bytes that the stored rows may take once they are decompressed: they are a few thousand.
MOST_BYTES = 2**28


def stored_rows(folder: Path, name: str, known: Preparation, rows: int) -> Table:
    """Read a file of the run folder with rows of its table. Raise if it is missing, or not the file of this run.

    The numbers of rows and columns and the size are compared with what the run expects before anything is expanded:
    half a megabyte of Parquet can hold thirty million rows, and four kilobytes a text of 8 MB in every row.
    """
    path = os.fspath(folder)
    problem = file_problem(folder / name)
    if problem is not None:
        raise StoreError(f"path: {name} of {path!r} is missing or was modified ({problem})")
    with as_store_errors(f"path: {name} of {path!r}"):
        _check_size(folder / name, rows, f"path: {name} of {path!r} was modified")
        try:
            found = read_table(folder / name, text=known.text_names)
        except InputError as error:
            raise StoreError(f"path: {name} of {path!r} is missing or was modified ({error.found})") from error
    if set(known.names) | set(known.target_columns) != set(found.column_names):
        raise StoreError(f"path: {name} of {path!r} was modified (it has other columns)")
    return found


def _check_size(path: Path, rows: int, what: str) -> None:
    from pyarrow import parquet

    facts = parquet.read_metadata(path)
    if facts.num_rows != rows:
        raise StoreError(f"{what} (it has {facts.num_rows:,} rows, {rows:,} expected)")
    groups = (facts.row_group(i) for i in range(facts.num_row_groups))
    size = sum(group.column(k).total_uncompressed_size for group in groups for k in range(group.num_columns))
    columns = [facts.schema.column(k) for k in range(facts.num_columns)]
    # A value of fixed length may be as long as the file says.
    size = max(size, rows * max((column.length for column in columns), default=0))
    names = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    if size <= MOST_BYTES:
        size = _text_bytes(path, names)
    if size > MOST_BYTES:
        raise StoreError(f"{what} (it would take {in_words(size)})")


def _text_bytes(path: Path, names: list[str]) -> int:
    """Return the size of columns of text, up to a first row group that exceeds the limit.

    They are read as positions in a dictionary, which stores a text once however many rows have it.
    """
    from pyarrow import compute, parquet, types

    size = 0
    with parquet.ParquetFile(path, read_dictionary=names) as file:
        for number in range(file.num_row_groups if names else 0):
            for column in file.read_row_group(number, columns=names).columns:
                for chunk in column.chunks:
                    size += chunk.nbytes
                    if types.is_dictionary(chunk.type):
                        lengths = compute.binary_length(chunk.dictionary)
                        size += compute.sum(lengths.take(chunk.indices)).as_py() or 0
            if size > MOST_BYTES:
                break
    return size
