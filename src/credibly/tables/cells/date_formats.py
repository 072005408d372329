"""Dates as people write them: recognised by pattern, parsed to microseconds, day and month decided by column."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from credibly.tables.cells.parsing import Notes, is_placeholder, shown, texts

Array: TypeAlias = npt.NDArray[Any]

_DAY, _MONTH, _YEAR = r"(0?[1-9]|[12]\d|3[01])", r"(0?[1-9]|1[0-2])", r"(19|20)\d\d"
_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NAME = rf"(?i:{'|'.join(_NAMES)})[a-z]*\.?"
_TIME = r"([T ,]+\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?\s*(?i:am|pm)?\s*(?i:z|utc|gmt|[+-]\d{2}:?\d{2})?)?"
# Two-digit years count only after slashes, or after dots if day and month have two digits each: 10-20-30 and
# 1.2.3 are not dates.
DATE = (
    rf"^({_YEAR}[-/.]{_MONTH}[-/.]{_DAY}|({_DAY}[-/.]{_MONTH}|{_MONTH}[-/.]{_DAY})[-/.]{_YEAR}"
    rf"|({_DAY}/{_MONTH}|{_MONTH}/{_DAY})/\d\d|(0[1-9]|[12]\d|3[01])\.(0[1-9]|1[0-2])\.\d\d"
    rf"|{_DAY}[ -]{_NAME}[ ,-]+({_YEAR}|\d\d)|{_NAME} {_DAY},? {_YEAR}|{_YEAR}-(0[1-9]|1[0-2])"
    rf"|{_NAME}[ -]{_YEAR}){_TIME}$"
)
# Fraction of dates from which a text column is one of dates.
ENOUGH = 0.95

# The parts of a date; "a" and "b" are day and month in an order that depends on the column.
_LAYOUTS = (
    r"^(?P<y>\d{4})[-/.](?P<m>\d{1,2})[-/.](?P<d>\d{1,2})(?P<rest>\D.*)?$",
    r"^(?P<a>\d{1,2})[-/.](?P<b>\d{1,2})[-/.](?P<y>\d{4}|\d{2})(?P<rest>\D.*)?$",
    r"^(?P<d>\d{1,2})[ -](?P<n>[A-Za-z]{3})[a-z]*\.?[ ,-]+(?P<y>\d{4}|\d{2})(?P<rest>\D.*)?$",
    r"^(?P<n>[A-Za-z]{3})[a-z]*\.? (?P<d>\d{1,2}),? (?P<y>\d{4})(?P<rest>\D.*)?$",
    r"^(?P<y>\d{4})-(?P<m>\d{2})$",
    r"^(?P<n>[A-Za-z]{3})[a-z]*\.?[ -](?P<y>\d{4})$",
)
_CLOCK = re.compile(
    r"[T ,]+(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d+))?)?\s*(am|pm)?\s*(z|utc|gmt|[+-]\d{2}:?\d{2})?", re.IGNORECASE
)
SECOND = 1_000_000
DAY = 86_400 * SECOND


def looks_like_dates(column: Any) -> bool:
    """Return whether nearly all texts of a column are dates. Placeholders such as "-" do not count."""
    column = column.drop_null()
    matches = pc.sum(pc.match_substring_regex(column, DATE)).as_py() or 0
    return matches > 0 and matches >= ENOUGH * (len(column) - pc.sum(is_placeholder(column)).as_py())


def day_first(column: Any) -> tuple[bool, str]:
    """Return whether the day comes before the month in dates such as 3/4/2024, and a remark if that is a guess.

    Decided by values above 12 anywhere in the column. If there are none, dots mean that the day comes first, and
    slashes and hyphens that the month does.
    """
    parts = pc.extract_regex(column.drop_null().unique(), _LAYOUTS[1]).drop_null()
    if not len(parts):
        return False, ""
    first, second = (_integers(parts.field(key)) for key in (0, 1))
    days, months = int((first > 12).sum()), int((second > 12).sum())
    if days != months:
        order = "day/month" if days > months else "month/day"
        return days > months, f"read as {order}, which some of the dates contradict" if days and months else ""
    example = next(cell for cell in column.drop_null().to_pylist() if re.match(_LAYOUTS[1], cell))
    if re.match(r"\d+\.", example):
        return True, ""
    return False, f"{example} read as month/day, though day/month is possible: write dates as 2024-01-31 to avoid this"


def parse_dates(column: Any, days_first: bool) -> tuple[Array, Array]:
    """Return texts as datetime64[us], NaT where they are not dates, and which of them are."""
    unique = column.dictionary_encode()
    cells = unique.dictionary
    values = np.full(len(cells), np.datetime64("NaT"), dtype="datetime64[us]")
    left = np.asarray(pc.fill_null(pc.match_substring_regex(cells, DATE), False))
    for layout in _LAYOUTS:
        rows = np.flatnonzero(left)
        if not len(rows):
            break
        parts = pc.extract_regex(cells.take(pa.array(rows)), layout)
        fits = np.asarray(parts.is_valid())
        rows, parts = rows[fits], parts.filter(pa.array(fits))
        values[rows] = _assembled(parts, days_first)
        left[rows] = False
    codes = unique.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    found = np.append(values, np.datetime64("NaT"))[codes]
    return found, ~np.isnat(found)


def dates(column: pa.Array, days_first: bool) -> tuple[Array, Notes]:
    """Return a column as datetime64[us] in UTC, NaT where a cell is missing, and (row, note) for what is not a date.

    Times without an offset stay as they are.
    """
    kind = column.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        plain = column.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False).cast(pa.timestamp("us"))
        return plain.to_numpy(zero_copy_only=False).astype("datetime64[us]"), []
    column = texts(column)
    values, good = parse_dates(column, days_first)
    rows = np.flatnonzero(~good & np.asarray(column.is_valid()))
    wrong = column.take(pa.array(rows))
    keep = ~np.asarray(is_placeholder(wrong))
    return values, [(int(r), f"{shown(c)} is not a date") for r, c, k in zip(rows, wrong.to_pylist(), keep) if k]


def _assembled(parts: Any, days_first: bool) -> Array:
    """Return dates from their parts, NaT for days that do not exist, such as 31 February."""
    found = {parts.type.field(i).name: parts.field(i) for i in range(parts.type.num_fields)}
    if "a" in found:
        found["d"], found["m"] = (found["a"], found["b"]) if days_first else (found["b"], found["a"])
    year = _integers(found["y"])
    # Two digits: 69 to 99 are of the last century, as in POSIX.
    year = np.where(year < 69, year + 2000, np.where(year < 100, year + 1900, year))
    if "n" in found:
        month = pc.index_in(pc.utf8_lower(found["n"]), value_set=pa.array(_NAMES)).to_numpy(zero_copy_only=False) + 1
    else:
        month = _integers(found["m"])
    day = _integers(found["d"]) if "d" in found else np.ones(len(year), dtype=np.int64)
    start = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    made: Array = (start.astype("datetime64[D]") + (day - 1)).astype("datetime64[us]")
    exists = (month >= 1) & (month <= 12) & (day >= 1) & (made.astype("datetime64[M]") == start)
    made[~exists] = np.datetime64("NaT")
    if "rest" in found and pc.any(pc.not_equal(found["rest"], "")).as_py():
        made = made + _clock(found["rest"])
    return made


def _clock(rest: Any) -> Array:
    """Return the times behind dates as timedelta64[us], NaT for an hour that does not exist."""
    coded = rest.dictionary_encode()
    times = [_microseconds(text) for text in coded.dictionary.to_pylist()]
    known = np.array(
        [np.timedelta64("NaT") if t is None else np.timedelta64(t, "us") for t in times], "timedelta64[us]"
    )
    found: Array = known[coded.indices.to_numpy(zero_copy_only=False)]
    return found


def _microseconds(text: str) -> int | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None if text else 0
    hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
    half, zone = (match[5] or "").lower(), match[6] or ""
    if half:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + 12 * (half == "pm")
    if hour > 24 or minute > 59 or second > 60:
        return None
    offset = 0
    if zone[:1] in ("+", "-"):
        offset = (int(zone[1:3]) * 60 + int(zone[-2:])) * (1 if zone[0] == "+" else -1)
    fraction = int((match[4] or "0")[:6].ljust(6, "0"))
    return ((hour * 60 + minute - offset) * 60 + second) * SECOND + fraction


def _integers(column: Any) -> Array:
    found: Array = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found
