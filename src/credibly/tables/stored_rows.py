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

    The numbers of rows and columns and the size are compared with what the run expects before anything is read: half a
    megabyte of Parquet can hold thirty million rows.
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
    if size > MOST_BYTES:
        raise StoreError(f"{what} (it would take {in_words(size)})")
