"""The rows of one split, and their encodings for models that take numbers: codes, one-hot columns, strings.

Every encoding is learned from the training rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from benchmarks.tables.data import Array, Table

MISSING = "missing"
ENCODING_FOLDS = 5


@dataclass(frozen=True)
class Rows:
    """Training and test rows of one split."""

    table: Table
    train: pa.Table
    test: pa.Table
    y: Array
    y_test: Array

    @cached_property
    def classes(self) -> Array:
        """The classes of the training rows, sorted."""
        return np.unique(self.y)

    @cached_property
    def groups(self) -> Array | None:
        """The entity of each training row, if the table has such a column."""
        return None if self.table.group is None else self.train.column(self.table.group).to_numpy()

    @property
    def categories(self) -> list[int]:
        """Positions of the categorical columns among the inputs."""
        return [i for i, name in enumerate(self.table.inputs) if name in self.table.categorical]

    def codes(self) -> tuple[Array, Array]:
        """Return both parts with integer codes for categories; NaN for missing values and unknown categories."""
        parts = []
        for rows in (self.train, self.test):
            columns = []
            for name in self.table.inputs:
                if name not in self.table.categorical:
                    columns.append(_numbers(rows, name))
                    continue
                known = {level: float(code) for code, level in enumerate(self._levels(name))}
                columns.append(np.array([known.get(v, np.nan) for v in rows.column(name).to_pylist()]))
            parts.append(np.column_stack(columns))
        return parts[0], parts[1]

    def strings(self) -> tuple[Array, Array]:
        """Return both parts as objects: numbers with NaN, and categories as strings, missing ones named."""
        parts = []
        for rows in (self.train, self.test):
            columns = [
                np.array([v or MISSING for v in rows.column(name).to_pylist()], dtype=object)
                if name in self.table.categorical else _numbers(rows, name).astype(object)
                for name in self.table.inputs
            ]  # fmt: skip
            parts.append(np.column_stack(columns))
        return parts[0], parts[1]

    def one_hot(self, standardise: bool = True, most: int | None = None) -> tuple[Array, Array]:
        """Return both parts with one column per category; missing numbers are the training median.

        Args:
            standardise: whether every column has mean 0 and standard deviation 1 on the training rows.
            most: categorical columns with more levels than this are target-encoded, in one column; None for none.
        """
        codes, columns = self.codes(), []
        for i, name in enumerate(self.table.inputs):
            train, test = codes[0][:, i], codes[1][:, i]
            if name not in self.table.categorical:
                filled = [np.where(np.isnan(part), np.nanmedian(train), part)[:, None] for part in (train, test)]
                columns.append((filled[0], filled[1]))
            elif most is not None and len(self._levels(name)) > most:
                columns.append(self._target_encoded(train, test))
            else:
                levels = np.arange(len(self._levels(name)))
                columns.append(((train[:, None] == levels).astype(float), (test[:, None] == levels).astype(float)))
        x, x_test = (np.column_stack([pair[k] for pair in columns]) for k in (0, 1))
        if standardise:
            mean, std = x.mean(0), x.std(0)
            std[std == 0] = 1.0
            x, x_test = (x - mean) / std, (x_test - mean) / std
        return x, x_test

    def _levels(self, name: str) -> list[str]:
        return sorted({value for value in self.train.column(name).to_pylist() if value is not None})

    def _target_encoded(self, train: Array, test: Array) -> tuple[Array, Array]:
        """Return the mean target of each category; of training rows that of the other folds, to keep out their own."""
        folds = np.random.default_rng(0).permutation(len(train)) % ENCODING_FOLDS
        encoded = np.empty((len(train), 1))
        for fold in range(ENCODING_FOLDS):
            held = folds == fold
            encoded[held, 0] = _category_means(train[~held], self.y[~held], train[held])
        return encoded, _category_means(train, self.y, test)[:, None]


def rows_of(table: Table, split: int) -> Rows:
    """Return the rows of one split of a table."""
    train, test = table.splits[split]
    y = table.y()
    return Rows(table, table.columns.take(pa.array(train)), table.columns.take(pa.array(test)), y[train], y[test])


def _category_means(codes: Array, y: Array, at: Array) -> Array:
    """Return the mean target of the categories `at`, shrunk by one row of the overall mean; unknown ones have that."""
    middle = y.mean()
    found = np.full(len(at), middle)
    for code in np.unique(codes[~np.isnan(codes)]):
        rows = y[codes == code]
        found[at == code] = (rows.sum() + middle) / (len(rows) + 1)
    return found


def _numbers(rows: pa.Table, name: str) -> Array:
    return np.asarray(rows.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)
