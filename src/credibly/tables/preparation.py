"""Preprocessing from table columns to network inputs: fitted on training rows, stored as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from credibly.errors import InputError, StoreError
from credibly.storage.run_folder import checksum
from credibly.tables.column_gaps import mark_gaps
from credibly.tables.columns import Array, Categorical, Column, Numeric, fit_column
from credibly.tables.parsing import Notes, is_number, numbers, texts, whole_column
from credibly.tables.targets import check_column, class_numbers, inspect_target, real_values

VERSION = 1


@dataclass(frozen=True)
class Preparation:
    """Preprocessing fitted to the training rows of a table.

    Attributes:
        target: column that is predicted.
        task: "regression" or "classification".
        task_reason: why, as a sentence.
        classes: class labels as text, in the order of their indices; None for regression.
        y_mean, y_std: mean and standard deviation of the training targets; 0 and 1 for classification.
        used: input columns with their statistics.
        columns: (name, kind, note) of every column but the target, including those left out, in the order of the table.
        notes: further remarks for the user, such as the number of rows without a target.
    """

    target: str
    task: str
    task_reason: str
    classes: tuple[str, ...] | None
    y_mean: float
    y_std: float
    used: tuple[Column, ...]
    columns: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls, table: Any, target: str, *, task: str = "auto", drop: Iterable[str] = (), rows: Array | None = None
    ) -> Preparation:
        """Fit to the training rows of a table.

        Task and classes are determined from all rows with a target, so held-out rows never have an unknown class. All
        statistics are computed on `rows`.

        Args:
            table: result of `read_table`.
            target: column to predict.
            task: "auto", "regression" or "classification".
            drop: columns to leave out.
            rows: indices or mask of the training rows, None for all. Rows without a target are ignored.
        """
        drop = (drop,) if isinstance(drop, str) else tuple(drop)
        check_column("--target", target, table.column_names)
        for name in drop:
            check_column("--drop", name, table.column_names)
        if target in drop:
            raise InputError("--drop", f"{target!r} is the target")
        known = inspect_target(target, whole_column(table, target), task)
        wanted = None if rows is None else np.asarray(rows)
        if wanted is not None and wanted.dtype == bool:
            wanted = np.flatnonzero(wanted)
        train = known.rows if wanted is None else np.intersect1d(wanted, known.rows)
        if not len(train):
            raise InputError("rows", "no training row has a target")
        part = table.take(pa.array(train))
        y_mean, y_std = _moments(target, whole_column(part, target), known.task)
        used: list[Column] = []
        columns: list[tuple[str, str, str]] = []
        for name in table.column_names:
            if name in drop:
                columns.append((name, "dropped", "as requested"))
            elif name != target:
                column = fit_column(name, whole_column(part, name))
                if isinstance(column, tuple):
                    columns.append((name, *column))
                else:
                    used.append(column)
                    columns.append((name, column.kind, column.note))
        if not used:
            why = "; ".join(f"{name}: {note}" for name, _, note in columns[:5]) or "the target is the only column"
            raise InputError("table", f"no column is left to predict {target!r} from ({why})")
        return cls(
            target, known.task, known.reason, known.classes, y_mean, y_std, tuple(used), tuple(columns), known.notes
        )

    # -- columns and features ------------------------------------------------------------------------------------------
    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns that are used."""
        return tuple(column.name for column in self.used)

    @property
    def numeric_names(self) -> tuple[str, ...]:
        """Names of the numeric columns that are used."""
        return tuple(column.name for column in self.used if isinstance(column, Numeric))

    @property
    def text_names(self) -> tuple[str, ...]:
        """Columns to read as text whatever they hold: categorical ones, and a target with non-numeric labels."""
        names = tuple(column.name for column in self.used if isinstance(column, Categorical))
        labels = numbers(pa.array(self.classes or (), pa.string()))[1]
        return (*names, self.target) if labels else names

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the network inputs."""
        return tuple(feature for column in self.used for feature in column.features)

    @property
    def inputs(self) -> int:
        """Number of network inputs."""
        return len(self.features)

    def missing_columns(self, names: Collection[str]) -> list[str]:
        """Return the columns that are used but not among the names."""
        return [name for name in self.names if name not in set(names)]

    # -- transformation ------------------------------------------------------------------------------------------------
    def transform(self, table: Any, *, gaps: bool = False) -> tuple[Array, Notes]:
        """Return the inputs of a table or batch, (N, inputs) float32, and (row, note) for unusual cells.

        An unknown category is encoded as "other" if there is such a level, else as missing. An absent column is treated
        as missing in every row. The inputs of missing cells are imputed, or NaN with `gaps`; missing-value indicators
        are 1 in both cases.
        """
        out = np.zeros((table.num_rows, self.inputs), dtype=np.float32)
        notes: Notes = []
        start = 0
        for column in self.used:
            width = len(column.features)
            part = out[:, start : start + width]
            found = column.encode(whole_column(table, column.name), part)
            if gaps:
                mark_gaps(column, part, found)
            notes += found
            start += width
        notes.sort(key=lambda note: note[0])
        return out, notes

    def usable_rows(self, table: Any) -> Array:
        """Return the indices of the rows that have a target."""
        cells = self._target_cells(table)
        column = numbers(cells)[0] if is_number(cells.type) else texts(cells)
        return np.flatnonzero(np.asarray(column.is_valid()))

    def target_values(self, table: Any) -> Array:
        """Return the targets, (N,) float64 in their own units or int64 class indices. Raise on missing or unknown."""
        cells = self._target_cells(table)
        return (
            real_values(self.target, cells) if self.classes is None else class_numbers(self.target, cells, self.classes)
        )

    def standardise(self, y: Array) -> Array:
        """Standardise targets by the training mean and standard deviation. Class indices are returned unchanged."""
        return y if self.classes is not None else (np.asarray(y, dtype=np.float64) - self.y_mean) / self.y_std

    def _target_cells(self, table: Any) -> Any:
        check_column("--target", self.target, table.schema.names)
        return whole_column(table, self.target)

    # -- serialisation -------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain JSON, with a checksum."""
        plain = {
            "version": VERSION,
            "target": self.target,
            "task": self.task,
            "task_reason": self.task_reason,
            "classes": None if self.classes is None else list(self.classes),
            "y_mean": self.y_mean,
            "y_std": self.y_std,
            "used": [{"kind": column.kind} | _plain(asdict(column)) for column in self.used],
            "columns": [list(column) for column in self.columns],
            "notes": list(self.notes),
        }
        return plain | {"checksum": checksum(plain)}

    @classmethod
    def from_dict(cls, plain: Any) -> Preparation:
        """Restore a result of `to_dict`, with bit-for-bit identical outputs. Raise on anything else."""
        if not isinstance(plain, dict):
            raise StoreError(f"preparation must be a dict, got {type(plain).__name__}")
        if plain.get("version") != VERSION:
            found = plain.get("version")
            raise StoreError(f"preparation: has version {found!r}, this credibly reads {VERSION}. Fit the table again")
        if plain.get("checksum") != checksum(plain):
            raise StoreError("preparation: modified or incomplete, its checksum does not match. Fit the table again")
        try:
            kinds = {"numeric": Numeric, "categorical": Categorical}
            used = tuple(
                kinds[c["kind"]](**{k: tuple(v) if isinstance(v, list) else v for k, v in c.items() if k != "kind"})
                for c in plain["used"]
            )
            columns = tuple((str(name), str(kind), str(note)) for name, kind, note in plain["columns"])
            classes = None if plain["classes"] is None else tuple(plain["classes"])
            y_mean, y_std = float(plain["y_mean"]), float(plain["y_std"])
            task, reason, notes = plain["task"], plain["task_reason"], tuple(plain["notes"])
            return cls(plain["target"], task, reason, classes, y_mean, y_std, used, columns, notes)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"preparation: incomplete ({error!r}). Fit the table again") from error


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _moments(name: str, cells: Any, task: str) -> tuple[float, float]:
    """Return mean and standard deviation of the training targets, 0 and 1 for classes. Raise if all are the same."""
    values = numbers(cells)[0].to_numpy(zero_copy_only=False) if task == "regression" else None
    one = len(texts(cells).unique()) == 1 if values is None else values.min() == values.max()
    if one:
        raise InputError("--target", f"{name!r} is the same in all training rows", "Pass more rows, or another column")
    if values is None:
        return 0.0, 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(values.mean()), float(values.std())
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise InputError("--target", f"{name!r} has values too large or too small to standardise", "Rescale them")
    return mean, std
