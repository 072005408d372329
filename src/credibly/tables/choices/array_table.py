"""Arrays in place of a prepared table, for the choice of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from credibly.tables.choices.rowset import Rowset
from credibly.tables.config import Config

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ArrayTargets:
    """What the targets of an array are.

    Attributes:
        task: "regression" or "classification".
        mean, std: moments of real targets.
    """

    task: str
    mean: Array
    std: Array

    @classmethod
    def of(cls, task: str, y: Array) -> ArrayTargets:
        """Return the task with the moments of real targets, or of anything else as it is."""
        if task != "regression":
            return cls(task, np.zeros(1), np.ones(1))
        std = y.std(0)
        return cls(task, y.mean(0), np.where(std > 0, std, 1.0))

    def standardise(self, y: Array) -> Array:
        """Return real targets with mean 0 and standard deviation 1, and class indices as they are."""
        if self.task != "regression":
            return y
        found: Array = (y - self.mean) / self.std
        return found


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """Rows of an array with the configuration of their fit: the parts of `Prepared` that a choice depends on.

    Attributes:
        config: the configuration; its table and target are placeholders.
        data: the rows.
        preparation: what the targets are.
        splits: further fits to some of the rows, as in `Prepared`.
    """

    config: Config
    data: Rowset
    preparation: ArrayTargets
    splits: tuple[tuple[Array, Array], ...] = ()
