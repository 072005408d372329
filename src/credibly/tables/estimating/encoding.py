"""Encode the inputs of scikit-learn estimators: numbers, categories and missing values become standardised inputs."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.utils.validation import check_array, check_X_y, validate_data

from credibly.errors import InputError
from credibly.tables.estimating.arrays import Array, moments

# Categories of a column with an input each; rarer ones share the input "other", as in tables.
MAX_LEVELS = 50
# Kinds of dtype that are numbers: booleans, integers, floats.
NUMERIC_KINDS = "biuf"


class InputEncoder:
    """Preprocessing from X to network inputs, fitted to the training rows.

    `learn` finds the categories. `read` turns X into a float64 matrix with the columns of X, in which categories are
    codes and missing values NaN; without categories, X is such a matrix itself. `fit` and `transform` turn the matrix
    into inputs:

    - a number becomes (x - mean) / scale, by the observed training rows; a constant column becomes 0
    - a category becomes one input per level, and one for all rare levels if there are more than `MAX_LEVELS`
    - a column with missing values in training gets a missing-value indicator

    The inputs of a missing value are NaN, except for its indicator. A category that was not seen in training is "other"
    if there are rare levels, else missing.

    Args:
        categorical: "from_dtype" for columns of text or of the dtype category; None for no column; or the categorical
            columns as indices, names or a boolean mask.
    """

    def __init__(self, categorical: Any = "from_dtype") -> None:
        self.categorical = categorical
        # Code of every level by column; rare levels have the code after those with an input.
        self.codes: dict[int, dict[Hashable, int]] = {}

    # -- from X to a matrix --------------------------------------------------------------------------------------------
    def learn(self, X: Any) -> InputEncoder:
        """Learn from training rows which columns are categorical, and their levels."""
        chosen = self._chosen(X)
        self.codes = {j: _levels(column) for j, column in enumerate(_columns(X)) if j in chosen} if chosen else {}
        return self

    def handles(self, X: Any) -> bool:
        """Return whether X has to be read: a table with categorical columns, or with dates, which are rejected."""
        if not self.codes:
            return _is_frame(X) and any(getattr(dtype, "kind", "O") in "mM" for dtype in X.dtypes)
        return _is_frame(X) or (not issparse(X) and np.ndim(X) == 2)

    def read(self, X: Any) -> Array:
        """Return X with categories as codes and missing values as NaN, (N, P) float64."""
        columns = _columns(X)
        found: Array = np.empty((len(X), len(columns)))
        for j, column in enumerate(columns):
            found[:, j] = self._coded(j, column) if j in self.codes else _as_numbers(X, j, column)
        return found

    def _chosen(self, X: Any) -> set[int]:
        """Return the indices of the categorical columns."""
        wanted = self.categorical
        if wanted is None:
            return set()
        if isinstance(wanted, str):
            if wanted != "from_dtype":
                expected = 'must be "from_dtype", None, or a list of indices or names or a mask'
                raise InputError("categorical_features", f"{expected}, got {wanted!r}")
            return {j for j, column in enumerate(_columns(X)) if _is_categorical(column)} if _has_dtypes(X) else set()
        names = [str(name) for name in X.columns] if _is_frame(X) else None
        if names is None and (issparse(X) or np.ndim(X) != 2):
            return set()  # scikit-learn's validation raises later
        width = np.shape(X)[1] if names is None else len(names)
        return set(_indices(np.asarray(wanted).reshape(-1).tolist(), names, width))

    def _coded(self, j: int, column: Array) -> Array:
        codes = self.codes[j]
        other = MAX_LEVELS if MAX_LEVELS in codes.values() else np.nan
        return np.array([np.nan if _is_missing(v) else codes.get(_key(v), other) for v in column], dtype=np.float64)

    # -- from a matrix to inputs ---------------------------------------------------------------------------------------
    def fit(self, X: Array, weight: Array | None = None) -> InputEncoder:
        """Learn means, scales and missing-value indicators from a result of `read`, with weights of the rows (N,)."""
        missing = np.isnan(X)
        self.indicator: Array = np.asarray(missing.any(0))
        self.mean, self.scale = np.zeros(X.shape[1]), np.full(X.shape[1], np.inf)
        numeric = np.array([j not in self.codes for j in range(X.shape[1])], dtype=bool)
        full = np.flatnonzero(numeric & ~self.indicator)
        if len(full):
            # A constant column carries no information; an infinite scale makes it 0 in new rows too.
            part = X if len(full) == X.shape[1] else X[:, full]
            self.mean[full], scale = moments("X", part, weight)
            self.scale[full] = np.where(part.max(0) == part.min(0), np.inf, scale)
        for j in np.flatnonzero(numeric & self.indicator & ~missing.all(0)):
            seen = ~missing[:, j]
            part, some = X[seen, j], None if weight is None else weight[seen]
            self.mean[j], scale = moments("X", part, some)
            self.scale[j] = np.inf if part.max() == part.min() else scale
        return self

    def numeric_inputs(self, inputs: Array) -> tuple[int, ...]:
        """Return the columns of the inputs, (N, inputs), that are numeric columns of X with more than two values."""
        found, place = [], 0
        for j in range(len(self.indicator)):
            if j not in self.codes:
                found.append(place)
            levels = 1 + max(self.codes[j].values(), default=-1) if j in self.codes else 1
            place += levels + int(self.indicator[j])
        return tuple(i for i in found if len(np.unique(inputs[:1000, i])) > 2)

    def transform(self, X: Array) -> Array:
        """Return the inputs of a result of `read`, (N, inputs) float64, with NaN for missing values."""
        # Rows far outside the training data must stay finite in float32; that far out predictions are constant.
        scaled: Array = np.clip((X - self.mean) / self.scale, -1e30, 1e30)
        if not self.codes and not self.indicator.any():
            return scaled
        parts: list[Array] = []
        for j in range(X.shape[1]):
            missing = np.isnan(X[:, j])
            if j in self.codes:
                levels = 1 + max(self.codes[j].values(), default=-1)
                one_hot = (X[:, j, None] == np.arange(levels)).astype(np.float64)
                one_hot[missing] = np.nan
                parts.append(one_hot)
            else:
                parts.append(scaled[:, j, None])
            if self.indicator[j]:
                parts.append(missing[:, None].astype(np.float64))
        return np.concatenate(parts, 1)


def training_rows(estimator: Any, X: Any, y: Any, **checks: Any) -> tuple[InputEncoder, Array, Array]:
    """Validate the training rows of an estimator. Return its encoder, what `InputEncoder.fit` takes, and the targets.

    Sets n_features_in_ and feature_names_in_ of the estimator.
    """
    if _is_frame(X):
        twice = [repr(name) for name, count in Counter(X.columns).items() if count > 1]
        if twice:
            raise InputError("X", f"has more than one column named {', '.join(twice[:5])}", "Make the names unique")
    encoder = InputEncoder(estimator.categorical_features).learn(X)
    checks = {"dtype": np.float64, "ensure_all_finite": "allow-nan", "ensure_min_samples": 2} | checks
    if not encoder.handles(X):
        return encoder, *validate_data(estimator, X, y, **checks)
    validate_data(estimator, X, skip_check_array=True)
    return encoder, *check_X_y(encoder.read(X), y, estimator=estimator, **checks)


def new_rows(estimator: Any, encoder: InputEncoder, X: Any) -> Array:
    """Validate rows to predict against those of the fit. Return what `InputEncoder.transform` takes."""
    if not encoder.handles(X):
        rows: Array = validate_data(estimator, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        return rows
    validate_data(estimator, X, reset=False, skip_check_array=True)
    rows = check_array(encoder.read(X), ensure_all_finite="allow-nan", estimator=estimator)
    return rows


def _is_frame(X: Any) -> bool:
    """Return whether X is a DataFrame, of pandas or of another library with the same names."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def _has_dtypes(X: Any) -> bool:
    """Return whether the columns of X can have text or categories."""
    return _is_frame(X) or (isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype == object)


def _columns(X: Any) -> list[Any]:
    """Return the columns of X, of any dtype."""
    if _is_frame(X):
        # By position, as names need not be unique; polars has no iloc, and unique names.
        return [X.iloc[:, j] for j in range(X.shape[1])] if hasattr(X, "iloc") else [X[name] for name in X.columns]
    table = X if isinstance(X, np.ndarray) else np.asarray(X, dtype=object)
    return list(table.T)


def _is_categorical(column: Any) -> bool:
    """Return whether a column holds text or has a categorical dtype, rather than numbers."""
    if str(column.dtype).lower().startswith(("category", "categorical", "enum")):
        return True
    if getattr(column.dtype, "kind", "O") != "O":
        return False
    present = [value for value in column if not _is_missing(value)]
    return any(isinstance(value, str) for value in present) and all(isinstance(v, (str, numbers.Real)) for v in present)


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Real) and bool(value != value)


def _key(value: Any) -> Hashable:
    """Return a level as a key: numpy scalars and the numbers that are equal to them are the same level."""
    key: Hashable = value.item() if isinstance(value, np.generic) else value
    return key


def _levels(column: Any) -> dict[Hashable, int]:
    """Return the code of every level: those with an input in the order of their names, then `MAX_LEVELS` for others."""
    counts = Counter(_key(value) for value in column if not _is_missing(value))
    common = [level for level, _ in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:MAX_LEVELS]]
    codes: dict[Hashable, int] = {level: code for code, level in enumerate(sorted(common, key=str))}
    return {level: codes.get(level, MAX_LEVELS) for level in counts}


def _as_numbers(X: Any, j: int, column: Any) -> Array:
    """Return a numeric column in float64. Raise on text."""
    name = repr(str(X.columns[j])) if _is_frame(X) else str(j)
    kind = getattr(column.dtype, "kind", "O")
    if kind in "mM":
        found = f"column {name} holds dates or durations ({column.dtype})"
        raise InputError("X", found, "Convert it to numbers, such as days since a start date")
    try:
        if kind in NUMERIC_KINDS and not hasattr(column.dtype, "na_value"):
            return np.asarray(column, dtype=np.float64)
        return np.array([np.nan if _is_missing(value) else float(value) for value in column], dtype=np.float64)
    except (TypeError, ValueError):
        found = f"column {name} is not numeric and not one of categorical_features"
        raise InputError("X", found, 'Use categorical_features="from_dtype", or name the column there') from None


def _indices(wanted: Sequence[Any], names: list[str] | None, width: int) -> list[int]:
    """Return columns given by index, name or mask as indices."""
    if wanted and all(isinstance(value, bool) for value in wanted):
        if len(wanted) != width:
            raise InputError("categorical_features", f"is a mask of {len(wanted)} columns, X has {width}")
        return [j for j, value in enumerate(wanted) if value]
    found = []
    for value in wanted:
        if isinstance(value, str):
            if names is None:
                raise InputError("categorical_features", f"names {value!r}, but X has no column names", "Pass indices")
            if value not in names:
                raise InputError("categorical_features", f"{value!r} is not a column of X", f"The columns are {names}")
            found.append(names.index(value))
        elif isinstance(value, int) and -width <= value < width:
            found.append(value % width)
        else:
            expected = f"must hold names or indices from 0 to {width - 1}"
            raise InputError("categorical_features", f"{expected}, got {value!r}")
    return found
