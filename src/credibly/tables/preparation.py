"""Preprocessing from table columns to network inputs: fitted on training rows, stored as plain JSON values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from credibly.core.specs import check_field_types
from credibly.errors import InputError, StoreError
from credibly.predictive.base import Predictive
from credibly.predictive.transforms import Transform
from credibly.storage.run_folder import checksum
from credibly.tables.cells.conventions import USUAL, Conventions, conventions_of
from credibly.tables.cells.parsing import Notes, is_number, numbers, texts, whole_column
from credibly.tables.columns.dates import Date
from credibly.tables.columns.encoders import Array, Categorical, Column, Numeric, fit_columns
from credibly.tables.columns.gaps import encode_columns
from credibly.tables.columns.scaling import STANDARD, InputScaling
from credibly.tables.targets.checks import (
    check_column,
    class_numbers,
    inspect_target,
    inspect_targets,
    real_values,
    target_names,
)
from credibly.tables.targets.scale import TargetScale
from credibly.tables.targets.tasks import check_task_values, event_values

VERSION = 1


@dataclass(frozen=True)
class Preparation:
    """Preprocessing fitted to the training rows of a table.

    Attributes:
        target: column that is predicted, or several separated by commas.
        task: "regression", "classification", "counts", "ordinal", "proportion" or "survival".
        task_reason: why, as a sentence.
        classes: class labels as text, in the order of their indices; None unless the task predicts classes.
        y_mean, y_std: mean and standard deviation of the transformed training targets, one of each per target; 0 and 1
            unless the task is regression.
        used: input columns with their statistics.
        columns: (name, kind, note) of every column but the target, including those left out, in the order of the table.
        notes: further remarks for the user, such as the number of rows without a target.
        targets: the target columns.
        transforms: transforms of the targets, one each; () for none.
        event: column that marks observed events, for survival.
        conventions: how the cells of the table were read, for the tables of predictions.
        scaling: further encoding of the inputs, applied last.
    """

    target: str
    task: str
    task_reason: str
    classes: tuple[str, ...] | None
    y_mean: float | tuple[float, ...]
    y_std: float | tuple[float, ...]
    used: tuple[Column, ...]
    columns: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    transforms: tuple[Transform, ...] = ()
    event: str | None = None
    conventions: Conventions = USUAL
    scaling: InputScaling = STANDARD

    @classmethod
    def fit(
        cls,
        table: Any,
        target: str,
        *,
        task: str = "auto",
        drop: Iterable[str] = (),
        rows: Array | None = None,
        transform: str = "none",
        order: Iterable[str] = (),
        event: str | None = None,
    ) -> Preparation:
        """Fit to the training rows of a table.

        Task and classes are determined from all rows with a target, so held-out rows never have an unknown class. All
        statistics are computed on `rows`.

        Args:
            table: result of `read_table`.
            target: column to predict, or several separated by commas.
            task: "auto", "regression", "classification", "counts", "ordinal", "proportion" or "survival".
            drop: columns to leave out.
            rows: indices or mask of the training rows, None for all. Rows without a target are ignored.
            transform: of a regression target before it is standardised: "none", "log", "log1p", "power" or "logit".
            order: levels of an ordinal target from low to high; () if they are numbers.
            event: column that holds 1 for an observed event and 0 for a censored time, for survival.
        """
        drop = (drop,) if isinstance(drop, str) else tuple(drop)
        targets = target_names(target, table.column_names)
        for name in drop:
            check_column("--drop", name, table.column_names)
        _check_roles(targets, event, drop, table.column_names)
        cells = [whole_column(table, name) for name in targets]
        if len(targets) > 1:
            known = inspect_targets(targets, cells, task)
        else:
            marks = None if event is None else (event, whole_column(table, event))
            known = inspect_target(target, cells[0], task, order=tuple(order), event=marks)
        if transform != "none" and known.task != "regression":
            raise InputError("--transform", f"is for --task regression, the task is {known.task}")
        wanted = None if rows is None else np.asarray(rows)
        if wanted is not None and wanted.dtype == bool:
            wanted = np.flatnonzero(wanted)
        train = known.rows if wanted is None else np.intersect1d(wanted, known.rows)
        if not len(train):
            raise InputError("rows", "no training row has a target")
        part = table.take(pa.array(train))
        scale = None
        if known.task == "regression":
            columns_y = np.stack([real_values(name, whole_column(part, name)) for name in targets], 1)
            scale = TargetScale.fit(columns_y, transform, targets)
        elif len(texts(whole_column(part, target)).unique()) == 1:
            found = f"{target!r} is the same in all training rows"
            raise InputError("--target", found, "Pass more rows, or another column")
        read_by = conventions_of(table)
        used, columns = fit_columns(part, (*targets, event), drop, read_by)
        if not used:
            why = "; ".join(f"{name}: {note}" for name, _, note in columns[:5]) or "the target is the only column"
            raise InputError("table", f"no column is left to predict {target!r} from ({why})")
        remark = read_by.remark(target)
        notes = (*read_by.notes, *([f"the target is {remark}"] if remark else ()), *known.notes)
        return cls(
            target,
            known.task,
            known.reason,
            known.classes,
            _single(scale.mean) if scale else 0.0,
            _single(scale.std) if scale else 1.0,
            used,
            columns,
            notes,
            targets,
            scale.transforms if scale else (),
            event,
            read_by.rules(),
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
    def target_columns(self) -> tuple[str, ...]:
        """Columns that hold targets and events."""
        return (*(self.targets or (self.target,)), *([] if self.event is None else [self.event]))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the network inputs."""
        return tuple(feature for column in self.used for feature in column.features)

    @property
    def numeric_features(self) -> tuple[int, ...]:
        """Indices of the features that are numbers: those of numeric columns, and the time elapsed of dates."""
        names = {column.name for column in self.used if not isinstance(column, Categorical)}
        elapsed = {f"{column.name} elapsed" for column in self.used if isinstance(column, Date)}
        return tuple(i for i, feature in enumerate(self.features) if feature in names | elapsed)

    @property
    def inputs(self) -> int:
        """Number of features."""
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
        return encode_columns(self.used, table, gaps)

    def with_scaling(self, kind: str, x: Array) -> Preparation:
        """Return the same preparation with a further encoding of the inputs, fitted to those of the training rows."""
        return replace(self, scaling=InputScaling.fit(kind, x, self.numeric_features))

    def usable_rows(self, table: Any) -> Array:
        """Return the indices of the rows that have a target."""
        valid = np.ones(table.num_rows, dtype=bool)
        for name in self.target_columns:
            cells = self._cells(table, name)
            column = numbers(cells)[0] if is_number(cells.type) else texts(cells)
            valid &= np.asarray(column.is_valid())
        return np.flatnonzero(valid)

    def target_values(self, table: Any) -> Array:
        """Return the targets in their own units, (N,) or (N, K) float64, or int64 class indices. Raise on missing ones.

        Times of a survival target are negative if they are censored, as `Survival` takes them.
        """
        names = self.targets or (self.target,)
        if len(names) > 1:
            return np.stack([real_values(name, self._cells(table, name)) for name in names], 1)
        cells = self._cells(table, self.target)
        if self.classes is not None:
            return class_numbers(self.target, cells, self.classes)
        values = real_values(self.target, cells)
        if self.task != "regression":
            check_task_values(self.target, values, self.task)
        if self.event is None:
            return values
        seen = event_values(self.event, self._cells(table, self.event))
        if seen.null_count:
            raise InputError("--event", f"{self.event!r} is missing in {seen.null_count:,} rows", "Remove those rows")
        return np.where(seen.to_numpy(zero_copy_only=False), values, -values)

    def strata(self, table: Any) -> Array | None:
        """Return groups of rows that a split keeps in proportion, (N,): classes, or whether an event was observed."""
        if self.classes is not None:
            return self.target_values(table)
        return None if self.event is None else (self.target_values(table) > 0).astype(np.int64)

    @property
    def scale(self) -> TargetScale:
        """The scale on which regression targets are fitted."""
        mean, std = (v if isinstance(v, tuple) else (v,) for v in (self.y_mean, self.y_std))
        return TargetScale(mean, std, self.transforms or (Transform(),) * len(mean))

    def standardise(self, y: Array) -> Array:
        """Return targets as they are fitted: transformed and standardised for regression, else unchanged."""
        return self.scale.standardise(y) if self.task == "regression" else y

    def in_units(self, predictive: Predictive) -> Predictive:
        """Return the predictive of a fit to standardised targets in the units of the target."""
        return self.scale.restore(predictive) if self.task == "regression" else predictive

    def _cells(self, table: Any, name: str) -> Any:
        check_column("--event" if name == self.event else "--target", name, table.schema.names)
        return whole_column(table, name)

    # -- serialisation -------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain JSON, with a checksum."""
        plain = {
            "version": VERSION,
            "target": self.target,
            "task": self.task,
            "task_reason": self.task_reason,
            "classes": None if self.classes is None else list(self.classes),
            "y_mean": list(self.y_mean) if isinstance(self.y_mean, tuple) else self.y_mean,
            "y_std": list(self.y_std) if isinstance(self.y_std, tuple) else self.y_std,
            "used": [{"kind": column.kind} | _plain(asdict(column)) for column in self.used],
            "columns": [list(column) for column in self.columns],
            "notes": list(self.notes),
            "targets": list(self.targets),
            "transforms": [transform.to_dict() for transform in self.transforms],
            "event": self.event,
            "conventions": self.conventions.to_dict(),
            "scaling": self.scaling.to_dict(),
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
            kinds = {"numeric": Numeric, "categorical": Categorical, "date": Date}
            used = tuple(
                kinds[c["kind"]](**{k: tuple(v) if isinstance(v, list) else v for k, v in c.items() if k != "kind"})
                for c in plain["used"]
            )
            columns = tuple((str(name), str(kind), str(note)) for name, kind, note in plain["columns"])
            classes = None if plain["classes"] is None else tuple(plain["classes"])
            y_mean, y_std = (
                tuple(map(float, v)) if isinstance(v, list) else float(v) for v in (plain["y_mean"], plain["y_std"])
            )
            task, reason, notes = plain["task"], plain["task_reason"], tuple(plain["notes"])
            targets = tuple(plain.get("targets", (plain["target"],)))
            transforms = tuple(Transform(**values) for values in plain.get("transforms", ()))
            read_by = Conventions.from_dict(plain.get("conventions", {}))
            for part in (*used, *transforms):
                check_field_types(part)
            made = cls(plain["target"], task, reason, classes, y_mean, y_std, used, columns, notes)
            scaling = InputScaling.from_dict(plain["scaling"]) if "scaling" in plain else STANDARD
            event = plain.get("event")
            return replace(
                made, targets=targets, transforms=transforms, event=event, conventions=read_by, scaling=scaling
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"preparation: incomplete ({error!r}). Fit the table again") from error


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _single(values: tuple[float, ...]) -> float | tuple[float, ...]:
    return values[0] if len(values) == 1 else values


def _check_roles(targets: tuple[str, ...], event: str | None, drop: tuple[str, ...], names: list[str]) -> None:
    """Raise if a column is a target and something else, or if there is no such event column."""
    if event is not None:
        check_column("--event", event, names)
        if event in targets:
            raise InputError("--event", f"{event!r} is the target")
    for name in (*targets, event):
        if name is not None and name in drop:
            raise InputError("--drop", f"{name!r} is the {'event column' if name == event else 'target'}")
