"""Values of a fit that several findings and pictures need: computed once, kept as long as the summary of the fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from credibly.tables.fit_summary import FitSummary

T = TypeVar("T")


def once_per_fit(compute: Callable[[FitSummary], T]) -> Callable[[FitSummary], T]:
    """Return the function with its result kept for each summary, which cannot change."""
    known: WeakKeyDictionary[FitSummary, T] = WeakKeyDictionary()

    @wraps(compute)
    def value(facts: FitSummary) -> T:
        if facts not in known:
            known[facts] = compute(facts)
        return known[facts]

    return value
