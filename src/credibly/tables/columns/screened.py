"""The columns of a table as its checks need them: numbers, or an integer per distinct value, each converted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from credibly.tables.cells.conventions import Conventions, conventions_of
from credibly.tables.cells.parsing import is_number, numbers, texts, whole_column
from credibly.tables.preparation import Preparation

Array = npt.NDArray[Any]


class ScreenedColumns:
    """The columns of the rows that have a target, each converted once."""

    def __init__(self, table: Any, preparation: Preparation, rows: Array) -> None:
        self.table = table if len(rows) == table.num_rows else table.take(pa.array(rows))
        self.preparation = preparation
        self.rows = rows
        self.targets = preparation.targets or (preparation.target,)
        self.conventions: Conventions = conventions_of(table)
        self._numbers: dict[str, Array | None] = {}
        self._codes: dict[str, Array] = {}

    def numbers(self, name: str) -> Array | None:
        """Return a numeric column as float64 with NaN for missing, or None for another one."""
        if name not in self._numbers:
            cells = whole_column(self.table, name)
            values = numbers(cells)[0].to_numpy(zero_copy_only=False) if is_number(cells.type) else None
            self._numbers[name] = values
        return self._numbers[name]

    def codes(self, name: str) -> Array:
        """Return an integer per distinct value, starting from 0; missing is a value, too."""
        if name not in self._codes:
            cells = whole_column(self.table, name)
            cells = numbers(cells)[0] if is_number(cells.type) else cells
            cells = texts(cells) if pa.types.is_string(cells.type) or pa.types.is_boolean(cells.type) else cells
            coded = cells if pa.types.is_dictionary(cells.type) else pc.dictionary_encode(cells, "encode")
            codes = coded.indices.to_numpy(zero_copy_only=False)
            self._codes[name] = np.asarray(codes, dtype=np.int64)
        return self._codes[name]

    def distinct(self, name: str) -> int:
        """Return the number of distinct values."""
        return int(self.codes(name).max(initial=-1)) + 1

    def file_row(self, position: int) -> int:
        """Return the number in the file of the row at a position."""
        return self.conventions.file_row(int(self.rows[position]))
