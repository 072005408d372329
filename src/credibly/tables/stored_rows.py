"""Rows of the table that a run folder stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from credibly.errors import InputError, StoreError
from credibly.tables.preparation import Preparation
from credibly.tables.reading import read_table

if TYPE_CHECKING:
    from pyarrow import Table


def stored_rows(folder: Path, name: str, known: Preparation) -> Table:
    """Read a file of the run folder with rows of its table. Raise if it is missing or has other columns."""
    path = os.fspath(folder)
    try:
        found = read_table(folder / name, text=known.text_names)
    except InputError as error:
        raise StoreError(f"path: {name} of {path!r} is missing or was modified ({error.found})") from error
    if set(known.names) | set(known.target_columns) != set(found.column_names):
        raise StoreError(f"path: {name} of {path!r} was modified (it has other columns)")
    return found
