"""The rows that a choice is made on, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from credibly.tables.missing.training_gaps import TrainingGaps
from credibly.tables.splitting import Rows

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Rowset:
    """The rows that a choice is made on.

    Attributes:
        x: standardised inputs, (N, P).
        y: targets in their own units, (N,) or (N, K), or class indices.
        numeric: indices of the numeric columns of x.
        rows: what splits have to respect.
        weight: weights of the rows; None for ones.
        classes: number of classes; None if there are none.
        gaps: missing cells of x, which holds means over completions there; None if there are none.
    """

    x: Array
    y: Array
    numeric: tuple[int, ...]
    rows: Rows
    weight: Array | None = None
    classes: int | None = None
    gaps: TrainingGaps | None = None

    def at(self, rows: Array) -> Rowset:
        """Return some of the rows."""
        weight = None if self.weight is None else self.weight[rows]
        gaps = None if self.gaps is None else self.gaps.at(rows)
        return Rowset(self.x[rows], self.y[rows], self.numeric, self.rows.at(rows), weight, self.classes, gaps)
