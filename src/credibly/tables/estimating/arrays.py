"""Arrays that scikit-learn estimators take and return: moments, weights of rows and classes, seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from sklearn.utils import check_random_state
from torch import Tensor

from credibly.core.checks import is_real
from credibly.core.rows import to_weights
from credibly.errors import InputError

Array = npt.NDArray[Any]


def seed_of(random_state: int | np.random.RandomState | None) -> int:
    """Return a non-negative int as it is; draw a seed from anything else, as scikit-learn does."""
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool) and random_state >= 0:
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def is_width(value: Any) -> bool:
    """Return whether a value is a positive integer of Python or numpy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def moments(name: str, values: Array, weight: Array | None = None) -> tuple[Array, Array]:
    """Return mean and standard deviation per column in float64; a constant column has scale 1, so it becomes 0.

    Args:
        name: of the argument, for errors.
        values: (N,) or (N, K).
        weight: weights of the rows, (N,); None for ones.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        constant = values.max(0) == values.min(0)
        if weight is None:
            mean, scale = values.mean(0), values.std(0)
        else:
            mean = np.average(values, axis=0, weights=weight)
            scale = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
        mean, scale = np.where(constant, values[0], mean), np.where(constant, 1.0, scale)
    if not (np.isfinite(mean).all() and np.isfinite(scale).all()):
        raise InputError(name, "values are so large that their variance overflows", "Divide them by a constant")
    return mean, np.where(scale > np.finfo(np.float64).tiny, scale, 1.0)


def row_weights(value: Any, rows: int) -> Array | None:
    """Return weights of rows in float64, (rows,). Raise on values that are not weights."""
    if value is None:
        return None
    return np.asarray(to_weights(value, rows, torch.device("cpu"), torch.float64).numpy())


def weighted_rows(X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Array | None]:
    """Return the rows of positive weight, with their weights; None for ones."""
    weight = row_weights(sample_weight, len(X))
    if weight is None:
        return X, y, None
    kept = np.flatnonzero(weight)
    return X[kept], y[kept], None if (weight[kept] == 1).all() else weight[kept]


def class_weights(value: Any, classes: Array, labels: Array, weight: Array | None) -> Array | None:
    """Return the weights of rows times those of their classes, (N,); None for ones.

    Args:
        value: None; "balanced" for weights that give every class the same total, with a mean of 1 over the rows; or
            {label: weight}, where other classes have weight 1.
        classes: labels of the classes.
        labels: indices into them, (N,).
        weight: weights of the rows, (N,); None for ones.
    """
    if value is None:
        return weight
    if isinstance(value, str) and value == "balanced":
        totals = np.bincount(labels, weights=weight, minlength=len(classes)).astype(np.float64)
        of_class = totals.sum() / (len(classes) * totals)
    elif isinstance(value, Mapping) and all(is_real(v) and v >= 0 for v in value.values()):
        known = [label in value for label in classes]
        if not all(known) and sum(known) != len(value):
            other = [key for key in value if key not in set(classes.tolist())]
            raise InputError("class_weight", f"{other[0]!r} is not a class of y", f"The classes are {classes.tolist()}")
        of_class = np.array([float(value.get(label, 1.0)) for label in classes])
    else:
        constraint = 'must be None, "balanced" or a dict of non-negative weights by label'
        raise InputError("class_weight", f"{constraint}, got {value!r}")
    total = of_class[labels] if weight is None else of_class[labels] * weight
    return row_weights(total, len(labels))


def weights_by_class(
    rule: str | None, classes: tuple[str, ...] | None, labels: Array, weight: Array | None
) -> Array | None:
    """Return the weights of the training rows of a table times those of their classes, by `--class-weight`."""
    if rule is not None and classes is None:
        raise InputError("--class-weight", "the target is a number, not a class", "Leave it out")
    return weight if rule is None else class_weights(rule, np.asarray(classes), labels, weight)


def real_targets(y: Array) -> Array:
    """Return targets in float64, (N,) or (N, K)."""
    if issparse(y):
        raise InputError("y", "is a sparse matrix", "Pass a dense array, such as y.toarray()")
    return y.astype(np.float64)


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as an array in float64."""
    result: Array = tensor.detach().cpu().numpy().astype(np.float64)
    return result
