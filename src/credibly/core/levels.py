"""Levels of intervals: the check of a list of them, and how they appear in names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from credibly.errors import InputError

LEVELS = (0.9,)


def check_levels(name: str, levels: Iterable[Any]) -> tuple[float, ...]:
    """Return levels as floats. Raise unless there is at least one, all are between 0 and 1, and all are different."""
    found: list[float] = []
    for level in levels:
        try:
            value = float(level)
        except (TypeError, ValueError):
            value = float("nan")
        if not 0 < value < 1:
            advice = f"For {value:g} % write {value / 100:g}" if 1 < value < 100 else ""
            raise InputError(name, f"must be probabilities between 0 and 1, such as 0.8,0.95, got {level!r}", advice)
        if percent(value) in map(percent, found):
            raise InputError(name, f"must be different levels, got {value:g} twice")
        found.append(value)
    if not found:
        raise InputError(name, "must be probabilities between 0 and 1, such as 0.8,0.95, got none")
    return tuple(found)


def percent(level: float) -> str:
    """Return a level in per cent without rounding noise: 90 for 0.9, 97.5 for 0.975, 29 for 0.29."""
    return f"{100 * level:.10g}"
