"""Finite-sample ranks: which order statistic of n calibration scores guarantees a level.

The score of a new row is equally likely to have any rank among those of n exchangeable rows and its own. It is
therefore at most the k-th smallest of the n scores with probability at least k / (n + 1), and

    k = ceil((n + 1) level)

is the smallest rank with that guarantee. Where scores have no ties, the coverage is exactly k / (n + 1) on average
over calibration sets, which exceeds the level by less than 1 / (n + 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.core.checks import check_probability
from credibly.errors import InputError

# (n + 1) level may exceed an integer by rounding alone.
ROUNDING = 1e-9


def rows_needed(level: float) -> int:
    """Return the smallest number of calibration rows for which a level can be promised: level / (1 - level)."""
    return math.ceil(level / (1 - level) - ROUNDING)


def rank(rows: int, level: float, where: str = "") -> int:
    """Return k = ceil((rows + 1) level). Raise if it exceeds the number of rows.

    Args:
        rows: number of calibration rows.
        level: the coverage to promise, between 0 and 1.
        where: suffix of the error message, such as " in group 'a'".
    """
    check_probability("level", level)
    if rows < rows_needed(level):
        found = f"{level:g} needs at least {rows_needed(level)} calibration rows, there are {rows}{where}"
        best = rows / (rows + 1)
        raise InputError("level", found, f"Calibrate with more rows, or use a level of at most {best:.3g}")
    return min(rows, math.ceil((rows + 1) * level - ROUNDING))


def threshold(scores: Tensor, level: float, where: str = "") -> Tensor:
    """Return the k-th smallest of the scores (n, ...) along the first axis."""
    return scores.kthvalue(rank(len(scores), level, where), 0).values


def encode_groups(groups: Any, rows: int) -> tuple[tuple[Any, ...], Tensor]:
    """Return the sorted labels of groups, as plain strings or numbers, and the index (rows,) of each row's label."""
    values = plain_groups(groups, rows)
    labels = tuple(sorted(set(values), key=lambda v: (type(v).__name__, v)))
    places = {label: place for place, label in enumerate(labels)}
    return labels, torch.tensor([places[v] for v in values], dtype=torch.int64)


def plain_groups(groups: Any, rows: int) -> list[Any]:
    """Return one str, int, float or bool per row. Raise on a wrong length or a missing label."""
    values = groups.tolist() if hasattr(groups, "tolist") else groups
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InputError("groups", f"must be one label per row, got {type(groups).__name__}")
    if len(values) != rows:
        raise InputError("groups", f"must have one label per row, got {len(values)} labels for {rows} rows")
    for row, value in enumerate(values):
        if not isinstance(value, (str, int, float)) or value != value:
            raise InputError("groups", f"must be strings or numbers, got {value!r} in row {row}")
    return list(values)
