"""Mean and standard error of scores of rows, weighted if the rows have weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def weighted_mean(values: Array, weight: Array | None = None) -> float:
    """Return the mean of the values."""
    return float(np.average(values, weights=weight))


def standard_error(values: Array, weight: Array | None = None) -> float:
    """Return the standard error of the mean; infinite for a single value, or if one of them is infinite."""
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return float("inf")
    if weight is None:
        return float(values.std(ddof=1) / np.sqrt(n))
    fraction = weight / weight.sum()
    squares = (fraction * (values - (fraction * values).sum())) ** 2
    return float(np.sqrt(squares.sum() * n / (n - 1)))


def weighted_splits(splits: Sequence[tuple[Array, Array]], weight: Array | None) -> list[tuple[Array, Array]]:
    """Return the splits that predict a row, without the rows of weight zero, which no score depends on."""
    if weight is None:
        return list(splits)
    kept = [(fitted, predicted[weight[predicted] > 0]) for fitted, predicted in splits]
    return [(fitted, predicted) for fitted, predicted in kept if len(predicted)]
