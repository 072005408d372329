"""Numbers that stand for a missing value, such as -999."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Nines, at least two: -99, -999, 9999.
CODE = re.compile(r"-?99+")
# A positive code is at least this many times as large as all other values.
TIMES = 4


def missing_code(values: Array) -> float | None:
    """Return the number among values, NaN for missing, that stands for a missing value; None if there is none.

    A negative one is a code if nothing else is negative, a positive one if it is far above everything else.
    """
    known = np.unique(values[np.isfinite(values)])
    if len(known) < 3:
        return None
    low, high = float(known[0]), float(known[-1])
    if low < 0 <= known[1] and _is_code(low):
        return low
    return high if _is_code(high) and high > TIMES * max(float(known[-2]), 0.0) and known[-2] > 0 else None


def _is_code(value: float) -> bool:
    return value == np.trunc(value) and CODE.fullmatch(f"{value:.0f}") is not None
