"""Results that several sections of a page share, computed once per fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from credibly.tables.fit_summary import FitSummary

T = TypeVar("T")


def once_per_fit(function: Callable[[FitSummary], T]) -> Callable[[FitSummary], T]:
    """Cache the result of a function of a fit for as long as the fit is in use. Callers must not modify it."""
    results: WeakKeyDictionary[FitSummary, T] = WeakKeyDictionary()

    @wraps(function)
    def remembered(facts: FitSummary) -> T:
        if facts not in results:
            results[facts] = function(facts)
        return results[facts]

    return remembered
