"""Missing cells of an encoded column, whatever its kind."""

from __future__ import annotations

import numpy as np

from credibly.tables.columns import Array, Column
from credibly.tables.parsing import Notes


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
        noted = np.unique([row for row, _ in notes])
        rows, values = noted[(out[noted] == blank).all(1)], out
    values[rows] = np.nan
