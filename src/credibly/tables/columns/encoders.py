"""Input columns: the statistics learned from training rows and the encoding of cells as network inputs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from credibly.tables.cells.conventions import USUAL, Conventions
from credibly.tables.cells.date_formats import day_first, looks_like_dates
from credibly.tables.cells.parsing import Notes, finite, is_number, numbers, positions, shown, texts, whole_column
from credibly.tables.columns.dates import Date, fit_date

Array: TypeAlias = npt.NDArray[Any]

MAX_LEVELS = 50
# With this many rows for each level there may be more, up to MOST_LEVELS.
ROWS_EACH = 20
MOST_LEVELS = 250
# A text column counts as an identifier if it has more than MAX_LEVELS distinct values and more than this fraction of
# its values are distinct.
DISTINCT = 0.9
# Words per value from which it counts as free text instead.
SENTENCE = 4
# Standardised values are clipped here, so that a cell of 1e300 still fits a float32.
LIMIT = 1e6
# Standardised distance outside the training range from which a row gets a note.
FAR = 10.0


@dataclass(frozen=True)
class Numeric:
    """A numeric column: (x - mean) / scale with missing cells imputed, plus a missing-value indicator if needed.

    Attributes:
        name: name of the column.
        fill: imputed value, the median of the training rows.
        mean, scale: mean and standard deviation of the training rows after imputation. A scale of 0 means a single
            value: only the missing-value indicator is an input.
        low, high: range of the training rows.
        indicator: whether training rows had missing cells, which adds a missing-value indicator.
        note: remark for the user.
    """

    name: str
    fill: float
    mean: float
    scale: float
    low: float
    high: float
    indicator: bool
    note: str

    kind = "numeric"

    @property
    def features(self) -> list[str]:
        """Names of the network inputs that the column becomes."""
        return [self.name] * (self.scale > 0) + [f"{self.name} is missing"] * self.indicator

    def encode(self, cells: Any, out: Array) -> Notes:
        """Encode cells (None if the column is absent) into `out`, an (N, inputs) float32 array of zeros."""
        if cells is None:
            values, notes = np.full(len(out), np.nan), [(row, f"{self.name} is missing") for row in range(len(out))]
        else:
            column, wrong = numbers(cells)
            column, infinite = finite(column)
            notes = [(row, f"{self.name} = {note}") for row, note in wrong + infinite]
            values = column.to_numpy(zero_copy_only=False)
            if column.null_count and not self.indicator:
                explained = {row for row, _ in notes}
                missing = np.flatnonzero(np.isnan(values))
                notes += [(int(r), f"{self.name} is missing") for r in missing if int(r) not in explained]
        if self.indicator:
            out[:, -1] = np.isnan(values)
        if self.scale > 0:
            out[:, 0], far = self._standardised(values)
            span = f"[{self.low:.6g}, {self.high:.6g}]"
            notes += [(int(r), f"{self.name} = {values[r]:.6g} is far outside the training range {span}") for r in far]
        return notes

    def _standardised(self, values: Array) -> tuple[Array, Array]:
        far: Array = np.empty(0, dtype=np.int64)
        with np.errstate(over="ignore"):
            scaled = values - self.mean
            scaled /= self.scale
            low, high, fill = (np.array([self.low, self.high, self.fill]) - self.mean) / self.scale
            # Check the extremes first: in most blocks no row is far out. fmin and fmax ignore NaN, the missing cells.
            least, most = np.fmin.reduce(scaled, initial=0.0), np.fmax.reduce(scaled, initial=0.0)
            if least < low - FAR or most > high + FAR:
                far = np.flatnonzero((scaled < low - FAR) | (scaled > high + FAR))
            if least < -LIMIT or most > LIMIT:
                np.clip(scaled, -LIMIT, LIMIT, out=scaled)
        scaled[np.isnan(scaled)] = np.clip(fill, -LIMIT, LIMIT)
        return scaled, far


@dataclass(frozen=True)
class Categorical:
    """A categorical column, one-hot encoded: one input per level, one for all rare levels, one for missing cells.

    Attributes:
        name: name of the column.
        levels: levels with an input each, sorted.
        rare: levels that share the input "other". If there are any, categories unseen in training share it too.
        missing: whether training rows had missing cells, which adds a level for them.
        note: remark for the user.
    """

    name: str
    levels: tuple[str, ...]
    rare: tuple[str, ...]
    missing: bool
    note: str

    kind = "categorical"

    @property
    def features(self) -> list[str]:
        """Names of the network inputs that the column becomes."""
        named = [f"{self.name} = {level}" for level in self.levels]
        return named + [f"{self.name} = other"] * bool(self.rare) + [f"{self.name} is missing"] * self.missing

    def encode(self, cells: Any, out: Array) -> Notes:
        """Encode cells (None if the column is absent) into `out`, an (N, inputs) float32 array of zeros."""
        if cells is None:
            if self.missing:
                out[:, -1] = 1
            return [(row, f"{self.name} is missing") for row in range(len(out))]
        column = texts(cells)
        index = positions(column, [*self.levels, *self.rare])
        where = index.fill_null(-1).to_numpy(zero_copy_only=False)
        # Rare levels share an input.
        where = np.minimum(where, len(self.levels))
        notes: Notes = []
        if index.null_count:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            unknown = np.flatnonzero((where < 0) & ~missing)
            names = column.take(pa.array(unknown)).to_pylist()
            notes = [(r, f"unknown category {shown(c)} in {self.name}") for r, c in zip(unknown.tolist(), names)]
            where = np.where(missing, out.shape[1] - 1 if self.missing else -1, where)
            if not self.missing:
                notes += [(r, f"{self.name} is missing") for r in np.flatnonzero(missing).tolist()]
            if self.rare:
                where[unknown] = len(self.levels)
        rows = np.flatnonzero(where >= 0)
        out[rows, where[rows]] = 1
        return notes


Column: TypeAlias = Numeric | Categorical | Date


def fit_column(name: str, cells: Any, conventions: Conventions = USUAL) -> Column | tuple[str, str]:
    """Fit a column to its training cells, read by the given conventions. Return (kind, reason) if it is left out."""
    if cells.null_count == len(cells):
        return "left out", "no value in the training rows"
    remark = conventions.remark(name)
    if is_number(cells.type):
        return _fit_numeric(name, cells, remark)
    if pa.types.is_temporal(cells.type):
        return fit_date(name, cells, conventions.day_first(name), remark)
    column = texts(cells)
    present = column.drop_null()
    if not len(present):
        return "left out", "no value in the training rows"
    if looks_like_dates(present):
        return fit_date(name, cells, *day_first(present))
    distinct = pc.count_distinct(present).as_py()
    if distinct > MAX_LEVELS and distinct > DISTINCT * len(present):
        if pc.mean(pc.count_substring(pc.utf8_trim_whitespace(present), " ")).as_py() >= SENTENCE - 1:
            return "left out", (
                f"looks like free text: {distinct:,} distinct values in {len(present):,} cells; to use it, convert it"
                " to numbers, such as embeddings of a language model; otherwise --drop it"
            )
        return "left out", (
            f"looks like an identifier: {distinct:,} distinct values in {len(present):,} cells; to use it, group them "
            f"into at most {MAX_LEVELS} categories or convert them to numbers; otherwise --drop it"
        )
    if distinct == 1 and not column.null_count:
        return "left out", f"constant: {shown(present[0].as_py())} in every training row"
    return _fit_categorical(name, present, len(column) - len(present))


def fit_columns(
    table: Any, targets: Collection[str | None], drop: Collection[str], conventions: Conventions
) -> tuple[tuple[Column, ...], tuple[tuple[str, str, str], ...]]:
    """Fit all columns to their training cells. Return those that become inputs, and (name, kind, note) of every one.

    Args:
        table: the training rows.
        targets: columns that are not inputs, and not listed either.
        drop: columns to leave out.
        conventions: how the cells were read.
    """
    used: list[Column] = []
    columns: list[tuple[str, str, str]] = []
    for name in table.column_names:
        if name in drop:
            columns.append((name, "dropped", "as requested"))
        elif name not in targets:
            column = fit_column(name, whole_column(table, name), conventions)
            if isinstance(column, tuple):
                columns.append((name, *column))
            else:
                used.append(column)
                columns.append((name, column.kind, column.note))
    return tuple(used), tuple(columns)


def _fit_numeric(name: str, cells: Any, remark: str) -> Column | tuple[str, str]:
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    column, infinite = finite(numbers(cells)[0])
    values = column.to_numpy(zero_copy_only=False)[:, None]
    present = values[~np.isnan(values)]
    if not len(present):
        return "left out", "no finite value in the training rows"
    low, high, missing = float(present.min()), float(present.max()), len(values) - len(present)
    if low == high and not missing:
        return "left out", f"constant: {low:.6g} in every training row"
    # Squares of very large or small numbers overflow or underflow: rescale by a power of two, which is exact.
    largest = max(abs(low), abs(high))
    power = 0 if largest == 0 or 1e-100 < largest < 1e100 else math.frexp(largest)[1]
    small = np.ldexp(values, -power)
    imputer = SimpleImputer(strategy="median").fit(small)
    scaler = StandardScaler().fit(imputer.transform(small))
    fill, mean, scale = float(imputer.statistics_[0]), float(scaler.mean_[0]), math.sqrt(float(scaler.var_[0]))
    # Nothing but rounding error.
    if scale <= 10 * np.finfo(np.float64).eps * abs(mean):
        if not missing:
            return "left out", f"constant up to rounding: {low:.6g} in every training row"
        scale, fill, mean = 0.0, float(np.ldexp(low, -power)), float(np.ldexp(low, -power))
    notes = [remark] if remark else []
    notes += [f"{missing - len(infinite):,} missing, completed from similar rows"] if missing > len(infinite) else []
    notes += [f"{len(infinite):,} infinite, treated as missing"] if infinite else []
    consecutive = len(present) > MAX_LEVELS and (np.diff(np.sort(present)) == 1).all() and power == 0
    notes += ["consecutive integers: --drop it if it is a row number"] if consecutive else []
    fill, mean, scale = (float(np.ldexp(v, power)) for v in (fill, mean, scale))
    # The scale of subnormal values can underflow to zero.
    if not scale and not missing:
        return "left out", f"constant up to rounding: {low:.6g} in every training row"
    return Numeric(name, fill, mean, scale, low, high, missing > 0, "; ".join(notes))


def _fit_categorical(name: str, present: Any, missing: int) -> Categorical:
    from sklearn.preprocessing import OneHotEncoder

    # Encode ranks instead of strings: the same levels, many times faster.
    coded = present.dictionary_encode()
    order = pc.sort_indices(coded.dictionary)
    labels = coded.dictionary.take(order).to_pylist()
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[order.to_numpy()] = np.arange(len(labels))
    most = min(MOST_LEVELS, max(MAX_LEVELS, len(present) // ROWS_EACH))
    encoder = OneHotEncoder(max_categories=most + 1, handle_unknown="infrequent_if_exist")
    encoder.fit(ranks[coded.indices.to_numpy()][:, None])
    infrequent = encoder.infrequent_categories_[0]
    codes = set() if infrequent is None else {int(code) for code in infrequent}
    rare = tuple(labels[code] for code in sorted(codes))
    levels = tuple(label for code, label in enumerate(labels) if code not in codes)
    notes = [f"{len(levels)} categories"]
    notes += [f"{len(rare):,} rare ones grouped as other"] if rare else []
    notes += [f"{missing:,} missing, treated as a category"] if missing else []
    return Categorical(name, levels, rare, missing > 0, "; ".join(notes))
