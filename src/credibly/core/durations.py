"""Parse and format durations: seconds, or text such as "90s", "10min" or "1.5h"."""

from __future__ import annotations

import math
import re

from credibly.core.checks import is_real
from credibly.errors import InputError

UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0}


def to_seconds(name: str, value: object) -> float:
    """Return a duration in seconds. Raise, with the argument's name, unless it is positive and finite."""
    found = parse_seconds(value)
    if found is None:
        advice = 'Pass seconds, or text such as "90s", "10min" or "1.5h"'
        raise InputError(name, f"must be a positive duration, got {value!r}", advice)
    return found


def parse_seconds(value: object) -> float | None:
    """Return a duration in seconds; None if the value is not a positive and finite one."""
    found = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", value.lower())
        if match and (match[2] or "s") in UNITS:
            found = float(match[1]) * UNITS[match[2] or "s"]
    elif is_real(value):
        found = float(value)  # type: ignore[arg-type]
    return found if math.isfinite(found) and found > 0 else None


def to_text(seconds: float) -> str:
    """Return a duration in the largest unit in which it is at least 1, rounded: "90 s" is "1.5 min"."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
