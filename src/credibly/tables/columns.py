"""One input column of a table: what is learned from its training rows, and how its cells become inputs of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from credibly.errors import InputError
from credibly.tables.parsing import Notes, finite, is_number, numbers, positions, shown, texts

Array: TypeAlias = npt.NDArray[Any]

MAX_LEVELS = 50
# A text column is an identifier where more values than MAX_LEVELS and more than this share of them are different.
DISTINCT = 0.9
# Standardised values stop here, so that a cell of 1e300 is still a float32; a note tells about it long before.
LIMIT = 1e6
FAR = 10.0

_DAY, _MONTH, _YEAR = r"(0?[1-9]|[12]\d|3[01])", r"(0?[1-9]|1[0-2])", r"(19|20)\d\d"
_NAME = r"(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_TIME = r"([T ,]+\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?\s*(?i:am|pm)?\s*(?i:z|utc|gmt|[+-]\d{2}:?\d{2})?)?"
# A year of two digits counts after strokes, or between points with two digits each: 10-20-30 and 1.2.3 are something else.
DATE = (
    rf"^({_YEAR}[-/.]{_MONTH}[-/.]{_DAY}|({_DAY}[-/.]{_MONTH}|{_MONTH}[-/.]{_DAY})[-/.]{_YEAR}"
    rf"|({_DAY}/{_MONTH}|{_MONTH}/{_DAY})/\d\d|(0[1-9]|[12]\d|3[01])\.(0[1-9]|1[0-2])\.\d\d"
    rf"|{_DAY}[ -]{_NAME}[ ,-]+({_YEAR}|\d\d)|{_NAME} {_DAY},? {_YEAR}){_TIME}$"
)


@dataclass(frozen=True)
class Numeric:
    """A column of numbers: (x - mean) / scale, a missing one as `fill`, and an input that says that it was missing.

    Attributes:
        name: of the column.
        fill: the median of the training rows.
        mean, scale: of the training rows after filling. A scale of 0 means that the value itself is no input, since there
            is only one; whether it is missing then is.
        low, high: the range of the training rows.
        indicator: whether training rows had missing cells, which makes that an input.
        note: for people.
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
        """The names of its inputs."""
        return [self.name] * (self.scale > 0) + [f"{self.name} is missing"] * self.indicator

    def encode(self, cells: Any, out: Array) -> Notes:
        """Writes the inputs of cells (None: the column is absent) into out, (N, inputs) float32 of zeros."""
        if cells is None:
            values, notes = np.full(len(out), np.nan), [(row, f"{self.name} is missing") for row in range(len(out))]
        else:
            column, wrong = numbers(cells)
            column, infinite = finite(column)
            notes = [(row, f"{self.name} = {said}") for row, said in wrong + infinite]
            values = column.to_numpy(zero_copy_only=False)
            if column.null_count and not self.indicator:
                told = {row for row, _ in notes}
                gone = np.flatnonzero(np.isnan(values))
                notes += [(int(r), f"{self.name} is missing") for r in gone if int(r) not in told]
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
            # The two extremes first: in most blocks no row has to be looked at. A missing cell is neither.
            least, most = np.fmin.reduce(scaled, initial=0.0), np.fmax.reduce(scaled, initial=0.0)
            if least < low - FAR or most > high + FAR:
                far = np.flatnonzero((scaled < low - FAR) | (scaled > high + FAR))
            if least < -LIMIT or most > LIMIT:
                np.clip(scaled, -LIMIT, LIMIT, out=scaled)
        scaled[np.isnan(scaled)] = np.clip(fill, -LIMIT, LIMIT)
        return scaled, far


@dataclass(frozen=True)
class Categorical:
    """A column of categories: one input a level, one for all rare ones together, one for missing cells.

    Attributes:
        name: of the column.
        levels: those with an input each, sorted.
        rare: those that share the input "other"; with any, categories that training rows did not have share it too.
        missing: whether training rows had missing cells, which makes that a level.
        note: for people.
    """

    name: str
    levels: tuple[str, ...]
    rare: tuple[str, ...]
    missing: bool
    note: str

    kind = "categorical"

    @property
    def features(self) -> list[str]:
        """The names of its inputs."""
        named = [f"{self.name} = {level}" for level in self.levels]
        return named + [f"{self.name} = other"] * bool(self.rare) + [f"{self.name} is missing"] * self.missing

    def encode(self, cells: Any, out: Array) -> Notes:
        """Writes the inputs of cells (None: the column is absent) into out, (N, inputs) float32 of zeros."""
        if cells is None:
            if self.missing:
                out[:, -1] = 1
            return [(row, f"{self.name} is missing") for row in range(len(out))]
        column = texts(cells)
        place = positions(column, [*self.levels, *self.rare])
        where = place.fill_null(-1).to_numpy(zero_copy_only=False)
        where = np.minimum(where, len(self.levels))  # the rare ones share a place
        notes: Notes = []
        if place.null_count:
            gone = column.is_null().to_numpy(zero_copy_only=False)
            strange = np.flatnonzero((where < 0) & ~gone)
            names = column.take(pa.array(strange)).to_pylist()
            notes = [(r, f"unknown category {shown(c)} in {self.name}") for r, c in zip(strange.tolist(), names)]
            where = np.where(gone, out.shape[1] - 1 if self.missing else -1, where)
            if not self.missing:
                notes += [(r, f"{self.name} is missing") for r in np.flatnonzero(gone).tolist()]
            if self.rare:
                where[strange] = len(self.levels)
        rows = np.flatnonzero(where >= 0)
        out[rows, where[rows]] = 1
        return notes


Column: TypeAlias = Numeric | Categorical


def fit_column(name: str, cells: Any) -> Column | tuple[str, str]:
    """What training cells say about a column; (kind, why) for one that is left out. Dates are refused."""
    if pa.types.is_temporal(cells.type):
        raise _date(name, f"holds dates or times ({cells.type})")
    if cells.null_count == len(cells):
        return "left out", "no value in the training rows"
    if is_number(cells.type):
        return _fit_numeric(name, cells)
    column = texts(cells)
    present = column.drop_null()
    if not len(present):
        return "left out", "no value in the training rows"
    if pc.sum(pc.match_substring_regex(present, DATE)).as_py() >= 0.95 * len(present):
        raise _date(name, f"holds dates such as {present[0].as_py()!r}")
    distinct = pc.count_distinct(present).as_py()
    if distinct > MAX_LEVELS and distinct > DISTINCT * len(present):
        return "left out", (
            f"{distinct:,} of {len(present):,} texts differ, so it looks like an identifier; group them into at most "
            f"{MAX_LEVELS} kinds, or turn them into numbers, if they should count, else name it in --drop"
        )
    if distinct == 1 and not column.null_count:
        return "left out", f"constant: {shown(present[0].as_py())} in every training row"
    return _fit_categorical(name, present, len(column) - len(present))


def _fit_numeric(name: str, cells: Any) -> Column | tuple[str, str]:
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    column, infinite = finite(numbers(cells)[0])
    values = column.to_numpy(zero_copy_only=False)[:, None]
    present = values[~np.isnan(values)]
    if not len(present):
        return "left out", "no finite value in the training rows"
    low, high, gone = float(present.min()), float(present.max()), len(values) - len(present)
    if low == high and not gone:
        return "left out", f"constant: {low:.6g} in every training row"
    # Squares of very large or small numbers are no floats: a power of two takes the column into their range, exactly.
    largest = max(abs(low), abs(high))
    power = 0 if largest == 0 or 1e-100 < largest < 1e100 else math.frexp(largest)[1]
    small = np.ldexp(values, -power)
    imputer = SimpleImputer(strategy="median").fit(small)
    scaler = StandardScaler().fit(imputer.transform(small))
    fill, mean, spread = float(imputer.statistics_[0]), float(scaler.mean_[0]), math.sqrt(float(scaler.var_[0]))
    if spread <= 10 * np.finfo(np.float64).eps * abs(mean):  # nothing but rounding differs
        if not gone:
            return "left out", f"constant but for rounding: {low:.6g} in every training row"
        spread, fill, mean = 0.0, float(np.ldexp(low, -power)), float(np.ldexp(low, -power))
    said = [f"{gone - len(infinite):,} missing, filled with the median"] if gone > len(infinite) else []
    said += [f"{len(infinite):,} infinite, taken as missing"] if infinite else []
    whole = len(present) > MAX_LEVELS and (np.diff(np.sort(present)) == 1).all() and power == 0
    said += ["counts up by ones: name it in --drop if it is a row number"] if whole else []
    fill, mean, spread = (float(np.ldexp(v, power)) for v in (fill, mean, spread))
    if not spread and not gone:  # a difference of the smallest float there is
        return "left out", f"constant but for rounding: {low:.6g} in every training row"
    return Numeric(name, fill, mean, spread, low, high, gone > 0, "; ".join(said))


def _fit_categorical(name: str, present: Any, gone: int) -> Categorical:
    from sklearn.preprocessing import OneHotEncoder

    # Numbers in the order of the texts stand for them: the same levels, found many times as fast.
    coded = present.dictionary_encode()
    order = pc.sort_indices(coded.dictionary)
    labels = coded.dictionary.take(order).to_pylist()
    ranks = np.empty(len(labels), dtype=np.int64)
    ranks[order.to_numpy()] = np.arange(len(labels))
    encoder = OneHotEncoder(max_categories=MAX_LEVELS + 1, handle_unknown="infrequent_if_exist")
    encoder.fit(ranks[coded.indices.to_numpy()][:, None])
    folded = encoder.infrequent_categories_[0]
    hidden = set() if folded is None else {int(code) for code in folded}
    rare = tuple(labels[code] for code in sorted(hidden))
    levels = tuple(label for code, label in enumerate(labels) if code not in hidden)
    said = [f"{len(levels)} categories"]
    said += [f"{len(rare):,} rare ones taken as other"] if rare else []
    said += [f"{gone:,} missing, taken as one more"] if gone else []
    return Categorical(name, levels, rare, gone > 0, "; ".join(said))


def _date(name: str, found: str) -> InputError:
    return InputError(
        "table", f"column {name!r} {found}",
        f"Turn it into numbers, such as days since a start or the month, or leave it out with --drop {name}",
    )  # fmt: skip
