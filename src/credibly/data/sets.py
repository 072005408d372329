"""The common form of data sets, and the real ones that ship with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_probability
from credibly.core.rng import check_seed
from credibly.errors import InputError

Task: TypeAlias = Literal["regression", "binary", "multiclass"]
Array: TypeAlias = npt.NDArray[Any]

EMBEDDED = ("diabetes", "digits", "breast_cancer", "wine")


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set split into training and test rows, standardised with the training rows.

    Attributes:
        x_train, x_test: inputs, (N, P) float32, mean 0 and standard deviation 1 over the training rows; constant
            columns are 0.
        y_train, y_test: regression: (N, 1) float32, standardised likewise. Classification: labels, (N,) int64.
        x_mean, x_std: (P,) float32; x * x_std + x_mean is in the original units.
        y_mean, y_std: the same for y; 0 and 1 for labels. Divide a density by y_std to get it in the original units.
        n_classes: None for regression.
        n_hidden: the number of hidden units that a benchmark prescribes, if any.
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
    """Return one of the data sets in EMBEDDED, split by a seeded permutation and stratified by label."""
    check_choice("name", name, EMBEDDED)
    check_probability("test_fraction", test_fraction)
    rng = np.random.default_rng(check_seed(seed))
    from sklearn import datasets

    # By default diabetes is scaled with all rows, test rows included, so load it in the original units.
    bunch = datasets.load_diabetes(scaled=False) if name == "diabetes" else getattr(datasets, f"load_{name}")()
    x, y = np.asarray(bunch.data, dtype=np.float64), np.asarray(bunch.target)
    labels = None if name == "diabetes" else y
    in_test = _choose_test_rows(labels, rng.permutation(len(y)), test_fraction)
    # A second permutation for the order: in the first, the classes of early training rows depend on the split.
    order = rng.permutation(len(y))
    n_classes = None if labels is None else len(np.unique(labels))
    task: Task = "regression" if n_classes is None else "binary" if n_classes == 2 else "multiclass"
    title = next(line for line in str(bunch.DESCR).splitlines() if line.strip() and not line.startswith(".."))
    about = {"name": name, "description": f"{title.strip()} (scikit-learn)", "n_classes": n_classes}
    names = tuple(str(f) for f in bunch.feature_names)
    return standardised(task, x, y, order[~in_test[order]], order[in_test[order]], feature_names=names, **about)


def _choose_test_rows(labels: Array | None, order: Array, fraction: float) -> Array:
    """Return which rows are test rows, (N,) bool: the first ones in `order`, per class if there are labels."""
    groups = [order] if labels is None else [order[labels[order] == label] for label in np.unique(labels)]
    chosen = np.zeros(len(order), dtype=bool)
    for rows in groups:
        count = round(fraction * len(rows))
        if not 0 < count < len(rows):
            among = f"{len(rows)}" if labels is None else f"{len(rows)} of one class"
            found = f"{fraction} leaves no {'test' if count == 0 else 'training'} row among {among}"
            raise InputError("test_fraction", found, "Choose a fraction closer to 0.2")
        chosen[rows[:count]] = True
    return chosen


def standardised(task: Task, x: Array, y: Array, train: Array, test: Array, **about: Any) -> DataSet:
    """Return the DataSet of float64 inputs (N, P) and targets (N,), standardised with the training rows alone."""
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
    """Return mean and standard deviation per column; 1 for a constant column, which then becomes 0 and not noise."""
    constant = x.max(axis=0) == x.min(axis=0)
    return np.where(constant, x[0], x.mean(axis=0)), np.where(constant, 1.0, x.std(axis=0))


def float32(array: Array) -> Tensor:
    """Copy an array to a float32 tensor."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
