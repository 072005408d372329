"""Columns of a table as network inputs, with missing cells marked whatever the kind of column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from credibly.tables.cells.parsing import Notes, whole_column
from credibly.tables.columns.encoders import Array, Column


def encode_columns(columns: Sequence[Column], table: Any, gaps: bool = False) -> tuple[Array, Notes]:
    """Return the inputs of a table or batch, (N, inputs) float32, and (row, note) for unusual cells, ordered by row.

    The inputs of missing cells are imputed, or NaN with `gaps`.
    """
    widths = [len(column.features) for column in columns]
    out = np.zeros((table.num_rows, sum(widths)), dtype=np.float32)
    notes: Notes = []
    start = 0
    for column, width in zip(columns, widths):
        part = out[:, start : start + width]
        found = column.encode(whole_column(table, column.name), part)
        if gaps:
            mark_gaps(column, part, found)
        notes += found
        start += width
    notes.sort(key=lambda note: note[0])
    return out, notes


def mark_gaps(column: Column, out: Array, notes: Notes) -> None:
    """Set the inputs of missing cells to NaN, except for a missing-value indicator.

    Args:
        column: the column.
        out: its encoded cells (N, inputs), modified in place.
        notes: what `encode` returned with them. Without an indicator, every missing cell has a note.
    """
    features = column.features
    if features[-1] == f"{column.name} is missing":
        rows, values = np.flatnonzero(out[:, -1]), out[:, :-1]
    elif not notes:
        return
    else:
        # Other notes are about cells that have a value, so that their encoding differs from that of a missing cell.
        blank = np.zeros((1, len(features)), dtype=out.dtype)
        column.encode(None, blank)
        marked = np.unique([row for row, _ in notes])
        rows, values = marked[(out[marked] == blank).all(1)], out
    values[rows] = np.nan
