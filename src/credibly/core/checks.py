"""Checks of scalar arguments. Each raises an `InputError` with the parameter, the constraint and the value received."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from credibly.errors import InputError


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, of Python or numpy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Return whether a value is a finite number, of Python or numpy, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return isinstance(value, Integral) or math.isfinite(value)


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None, advice: str = "") -> None:
    """Raise unless `value` is an integer from `least` to `most` (None for no upper limit)."""
    if is_integer(value) and value >= least and (most is None or value <= most):
        return
    if most is not None:
        constraint = f"an integer from {least} to {most}"
    elif least in (0, 1):
        constraint = "a non-negative integer" if least == 0 else "a positive integer"
    else:
        constraint = f"an integer of at least {least}"
    raise InputError(name, f"must be {constraint}, got {value!r}", advice)


def check_positive(name: str, value: Any, advice: str = "") -> None:
    """Raise unless `value` is a finite number above zero."""
    if not is_real(value) or value <= 0:
        raise InputError(name, f"must be a positive number, got {value!r}", advice)


def check_probability(name: str, value: Any, advice: str = "") -> None:
    """Raise unless `value` lies strictly between 0 and 1."""
    if not is_real(value) or not 0 < value < 1:
        raise InputError(name, f"must be strictly between 0 and 1, got {value!r}", advice)


def check_choice(name: str, value: Any, choices: Collection[str], advice: str = "") -> None:
    """Raise unless `value` is one of the given strings."""
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        constraint = f"one of {known}" if len(choices) > 1 else known
        raise InputError(name, f"must be {constraint}, got {value!r}", advice)
