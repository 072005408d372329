"""Columns of dates as network inputs: elapsed time and year, standardised; month, weekday and hour as cycles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from credibly.tables.cells.date_formats import DAY, Array, dates
from credibly.tables.cells.parsing import Notes

# Cycles of a date by name: only those that vary in the training rows are inputs.
CYCLES = ("month", "weekday", "hour")
# Distance outside the training range, in training standard deviations, from which a row gets a note.
FAR = 10.0
# Standardised values are clipped here, so that a date in the year 290,000 still fits a float32.
LIMIT = 1e6


@dataclass(frozen=True)
class Date:
    """A column of dates: elapsed time, the year, cycles as sine and cosine, and a missing-value indicator if needed.

    The month is the position within the year, so that 31 December is next to 1 January.

    Attributes:
        name: name of the column.
        day_first: whether the day comes before the month in texts such as 3/4/2024.
        first: first training date, in microseconds since 1970.
        mean, scale: mean and standard deviation of the days since then.
        fill: imputed number of days, the median of the training rows.
        low, high: range of the days in the training rows.
        year_mean, year_scale: mean and standard deviation of the calendar year. A scale of 0 means a single one, which
            is not an input.
        cycles: those of "month", "weekday" and "hour" that are inputs.
        indicator: whether training rows had missing cells, which adds a missing-value indicator.
        note: remark for the user.
    """

    name: str
    day_first: bool
    first: int
    mean: float
    scale: float
    fill: float
    low: float
    high: float
    year_mean: float
    year_scale: float
    cycles: tuple[str, ...]
    indicator: bool
    note: str

    kind = "date"

    @property
    def features(self) -> list[str]:
        """Names of the network inputs that the column becomes."""
        found = [f"{self.name} elapsed"] * (self.scale > 0) + [f"{self.name} year"] * (self.year_scale > 0)
        found += [f"{self.name} {cycle} ({wave})" for cycle in self.cycles for wave in ("sine", "cosine")]
        return found + [f"{self.name} is missing"] * self.indicator

    def encode(self, cells: Any, out: Array) -> Notes:
        """Encode cells (None if the column is absent) into `out`, an (N, inputs) float32 array of zeros."""
        if cells is None:
            values = np.full(len(out), np.datetime64("NaT"), dtype="datetime64[us]")
            notes = [(row, f"{self.name} is missing") for row in range(len(out))]
        else:
            values, wrong = dates(cells, self.day_first)
            notes = [(row, f"{self.name} = {note}") for row, note in wrong]
        missing = np.isnat(values)
        if cells is not None and not self.indicator:
            known = {row for row, _ in notes}
            notes += [(int(r), f"{self.name} is missing") for r in np.flatnonzero(missing) if int(r) not in known]
        if self.indicator:
            out[:, -1] = missing
        at = 0
        elapsed = np.where(missing, self.fill, _days(values, self.first))
        if self.scale > 0:
            out[:, at] = np.clip((elapsed - self.mean) / self.scale, -LIMIT, LIMIT)
            notes += self._far_notes(elapsed, values)
            at += 1
        # A missing date gets the year of the imputed one and the centre of every cycle.
        filled = np.where(missing, np.datetime64(self.first + round(self.fill * DAY), "us"), values)
        if self.year_scale > 0:
            out[:, at] = np.clip((_years(filled) - self.year_mean) / self.year_scale, -LIMIT, LIMIT)
            at += 1
        for cycle in self.cycles:
            angle = 2 * math.pi * _phase(filled, cycle)
            out[:, at], out[:, at + 1] = np.sin(angle) * ~missing, np.cos(angle) * ~missing
            at += 2
        return notes

    def _far_notes(self, elapsed: Array, values: Array) -> Notes:
        far = np.flatnonzero((elapsed < self.low - FAR * self.scale) | (elapsed > self.high + FAR * self.scale))
        span = f"[{self._day(self.low)}, {self._day(self.high)}]"
        return [(int(r), f"{self.name} = {_shown(values[r])} is far outside the training range {span}") for r in far]

    def _day(self, days: float) -> str:
        return _shown(np.datetime64(self.first + round(days * DAY), "us"))


def fit_date(name: str, cells: Any, day_first: bool, remark: str = "") -> Date | tuple[str, str]:
    """Fit a column of dates to its training cells. Return (kind, reason) if it is left out."""
    values, wrong = dates(cells, day_first)
    present = values[~np.isnat(values)]
    missing = len(values) - len(present)
    if not len(present):
        return "left out", "no date in the training rows"
    first, last = present.min(), present.max()
    if first == last and not missing:
        return "left out", f"constant: {_shown(first)} in every training row"
    start = int(first.astype(np.int64))
    days, years = _days(present, start), _years(present)
    filled = np.append(days, np.full(missing, np.median(days)))
    scale, year_scale = float(filled.std()), float(years.std())
    cycles = tuple(cycle for cycle in CYCLES if len(np.unique(_steps(present, cycle))) > 1)
    notes = [f"{_shown(first)} to {_shown(last)}", *([remark] if remark else [])]
    notes += [f"{missing - len(wrong):,} missing"] if missing > len(wrong) else []
    notes += [f"{len(wrong):,} not a date, treated as missing"] if wrong else []
    return Date(
        name, day_first, start, float(filled.mean()), scale, float(np.median(days)), 0.0, float(days.max()),
        float(years.mean()), year_scale, cycles, missing > 0, "; ".join(notes),
    )  # fmt: skip


def _days(values: Array, first: int) -> Array:
    found: Array = (values.astype(np.int64) - first) / DAY
    return found


def _years(values: Array) -> Array:
    found: Array = values.astype("datetime64[Y]").astype(np.int64) + 1970.0
    return found


def _steps(values: Array, cycle: str) -> Array:
    """Return the month, weekday or time of day of dates, to see whether it varies."""
    if cycle == "month":
        return _since(values, "datetime64[Y]", "datetime64[M]")
    if cycle == "weekday":
        return _weekday(values)
    return _since(values, "datetime64[D]", "datetime64[us]")


def _phase(values: Array, cycle: str) -> Array:
    """Return the position of dates within a cycle, from 0 to 1."""
    if cycle == "month":
        month = _since(values, "datetime64[Y]", "datetime64[M]")
        day = _since(values, "datetime64[M]", "datetime64[D]")
        start = values.astype("datetime64[M]")
        length = ((start + 1).astype("datetime64[D]") - start.astype("datetime64[D]")).astype(np.int64)
        found: Array = (month + day / length) / 12
    else:
        found = _steps(values, cycle) / (7 if cycle == "weekday" else DAY)
    return found


def _since(values: Array, unit: str, step: str) -> Array:
    """Return the number of steps since the start of the unit that a date lies in."""
    found: Array = (values.astype(step) - values.astype(unit).astype(step)).astype(np.int64)
    return found


def _weekday(values: Array) -> Array:
    # 1 January 1970 was a Thursday; Monday is 0.
    found: Array = (values.astype("datetime64[D]").astype(np.int64) + 3) % 7
    return found


def _shown(value: Any) -> str:
    """Return a date as messages show it: without the time if that is midnight."""
    text = str(value.astype("datetime64[s]"))
    return text.removesuffix("T00:00:00").replace("T", " ")
