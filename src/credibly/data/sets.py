"""Real data sets: the form they all take, and those inside scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.core.rng import check_seed
from credibly.errors import InputError

Task: TypeAlias = Literal["regression", "binary", "multiclass"]
Array: TypeAlias = npt.NDArray[Any]

EMBEDDED = ("diabetes", "digits", "breast_cancer", "wine")


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set split into training and test rows, standardised with the training rows.

    Attributes:
        x_train, x_test: inputs, (N, P) float32, mean 0 and deviation 1 over the training rows (constant columns: 0).
        y_train, y_test: regression: (N, 1) float32, standardised alike. Classification: labels, (N,) int64.
        x_mean, x_std: (P,) float32, so that x * x_std + x_mean is in the original units.
        y_mean, y_std: the same for y; a density in the original units is the one here divided by y_std.
            0 and 1 for labels.
        n_classes: None for regression.
        n_hidden: the number of hidden units a benchmark asks for, where it does.
    """

    name: str
    task: Task
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    feature_names: tuple[str, ...]
    x_mean: Tensor
    x_std: Tensor
    y_mean: float
    y_std: float
    description: str
    n_classes: int | None
    n_hidden: int | None = None

    @property
    def n_features(self) -> int:
        """The number of input columns P."""
        return int(self.x_train.shape[1])


def embedded(name: str, *, test_fraction: float = 0.2, seed: int = 0) -> DataSet:
    """One of the data sets in EMBEDDED, split by a permutation that the seed fixes; labels keep their proportions."""
    if name not in EMBEDDED:
        raise InputError("name", f"found {name!r}", f"Pass one of {', '.join(EMBEDDED)}")
    if isinstance(test_fraction, bool) or not isinstance(test_fraction, (int, float)) or not 0 < test_fraction < 1:
        raise InputError("test_fraction", f"found {test_fraction!r}", "Pass a fraction between 0 and 1, such as 0.2")
    rng = np.random.default_rng(check_seed(seed))
    from sklearn import datasets

    # diabetes comes scaled over all its rows, test rows included, unless one asks for the original units.
    bunch = datasets.load_diabetes(scaled=False) if name == "diabetes" else getattr(datasets, f"load_{name}")()
    x, y = np.asarray(bunch.data, dtype=np.float64), np.asarray(bunch.target)
    labels = None if name == "diabetes" else y
    in_test = _choose_test_rows(labels, rng.permutation(len(y)), test_fraction)
    # A second permutation for the order: in the first one the classes of early training rows depend on the choice.
    order = rng.permutation(len(y))
    n_classes = None if labels is None else len(np.unique(labels))
    task: Task = "regression" if n_classes is None else "binary" if n_classes == 2 else "multiclass"
    title = next(line for line in str(bunch.DESCR).splitlines() if line.strip() and not line.startswith(".."))
    about = {"name": name, "description": f"{title.strip()} (scikit-learn)", "n_classes": n_classes}
    names = tuple(str(f) for f in bunch.feature_names)
    return standardised(task, x, y, order[~in_test[order]], order[in_test[order]], feature_names=names, **about)


def _choose_test_rows(labels: Array | None, order: Array, fraction: float) -> Array:
    """Which rows are test rows, (N,) bool: the first ones in `order`, of each class where there are labels."""
    groups = [order] if labels is None else [order[labels[order] == label] for label in np.unique(labels)]
    chosen = np.zeros(len(order), dtype=bool)
    for rows in groups:
        count = round(fraction * len(rows))
        if not 0 < count < len(rows):
            among = f"{len(rows)}" if labels is None else f"{len(rows)} of one class"
            found = f"{fraction} leaves no {'test' if count == 0 else 'training'} row among {among}"
            raise InputError("test_fraction", found, "Choose a fraction nearer to 0.2")
        chosen[rows[:count]] = True
    return chosen


def standardised(task: Task, x: Array, y: Array, train: Array, test: Array, **about: Any) -> DataSet:
    """The DataSet of float64 inputs (N, P) and targets (N,); every statistic comes from the training rows."""
    x_mean, x_std = _moments(x[train])
    y_mean, y_std = _moments(y[train, None]) if task == "regression" else (np.zeros(1), np.ones(1))
    y = ((y[:, None] - y_mean) / y_std).astype(np.float32) if task == "regression" else y.astype(np.int64)
    columns = {"x": ((x - x_mean) / x_std).astype(np.float32), "y": y}
    for part, rows in (("train", train), ("test", test)):
        about |= {f"{key}_{part}": torch.from_numpy(column[rows]) for key, column in columns.items()}
    about |= {
        "x_mean": float32(x_mean),
        "x_std": float32(x_std),
        "y_mean": float(y_mean[0]),
        "y_std": float(y_std[0]),
    }
    return DataSet(task=task, **about)


def _moments(x: Array) -> tuple[Array, Array]:
    """Mean and deviation of each column; a constant column keeps its scale, so that it becomes 0 and not noise."""
    constant = x.max(axis=0) == x.min(axis=0)
    return np.where(constant, x[0], x.mean(axis=0)), np.where(constant, 1.0, x.std(axis=0))


def float32(array: Array) -> Tensor:
    """An array as a float32 tensor of its own memory."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
