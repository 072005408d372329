"""Data sets: real ones inside scikit-learn, toys with a known truth, and the UCI benchmark from a folder of files."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.rng import check_seed

Task: TypeAlias = Literal["regression", "binary", "multiclass"]
Array: TypeAlias = npt.NDArray[Any]

EMBEDDED = ("diabetes", "digits", "breast_cancer", "wine")

# What numpy raises for a file that is no npz, or one cut short or altered.
_UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_UCI_KEYS = ("X", "y", "train_idx", "test_idx")


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


@dataclass(frozen=True, eq=False)
class Toy:
    """A small made-up problem with its truth.

    Attributes:
        x: inputs, (N, P) float32.
        y: regression: (N, 1) float32. Binary: labels, (N,) int64.
        grid: inputs to draw predictions at, (G, P); it reaches beyond the data on every side.
        truth: at the grid, (G, 1): the noise-free function, or the probability of label 1.
        noise: the deviation of the noise where it is the same everywhere, otherwise None.
        noise_grid: the deviation of the noise at the grid, (G, 1); None for labels.
        gap: the interval of x without data, where there is one.
        star: a far-away input, (1, P), where there is one.
        grid_shape: the shape of the grid before it was flattened, such as (61, 101); for contour plots.
    """

    name: str
    task: Task
    x: Tensor
    y: Tensor
    grid: Tensor
    truth: Tensor
    noise: float | None
    description: str
    noise_grid: Tensor | None = None
    gap: tuple[float, float] | None = None
    star: Tensor | None = None
    grid_shape: tuple[int, ...] = ()


# Real data inside scikit-learn


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
    return _standardised(task, x, y, order[~in_test[order]], order[in_test[order]], feature_names=names, **about)


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


def _standardised(task: Task, x: Array, y: Array, train: Array, test: Array, **about: Any) -> DataSet:
    """The DataSet of float64 inputs (N, P) and targets (N,); every statistic comes from the training rows."""
    x_mean, x_std = _moments(x[train])
    y_mean, y_std = _moments(y[train, None]) if task == "regression" else (np.zeros(1), np.ones(1))
    y = ((y[:, None] - y_mean) / y_std).astype(np.float32) if task == "regression" else y.astype(np.int64)
    columns = {"x": ((x - x_mean) / x_std).astype(np.float32), "y": y}
    for part, rows in (("train", train), ("test", test)):
        about |= {f"{key}_{part}": torch.from_numpy(column[rows]) for key, column in columns.items()}
    about |= {
        "x_mean": _float32(x_mean),
        "x_std": _float32(x_std),
        "y_mean": float(y_mean[0]),
        "y_std": float(y_std[0]),
    }
    return DataSet(task=task, **about)


def _moments(x: Array) -> tuple[Array, Array]:
    """Mean and deviation of each column; a constant column keeps its scale, so that it becomes 0 and not noise."""
    constant = x.max(axis=0) == x.min(axis=0)
    return np.where(constant, x[0], x.mean(axis=0)), np.where(constant, 1.0, x.std(axis=0))


# Toys


def gap_regression(n: int = 80, *, noise: float = 0.1, seed: int = 0) -> Toy:
    """One input, a wave, and no data in the middle: half of the points on each side of the gap (-0.7, 0.7)."""
    rng_x, rng_noise = _streams(seed, n, 2)
    x = np.where(np.arange(n) % 2 == 0, -1.0, 1.0) * rng_x.uniform(0.7, 2.0, n)
    about = "A wave seen on both sides of a gap. A band of uncertainty should widen in the gap and beyond the data."
    return _wave_toy("gap_regression", about, x, rng_noise, _check_noise(noise), gap=(-0.7, 0.7))


def sharpening_regression(n: int = 10, *, noise: float = 0.2, seed: int = 0) -> Toy:
    """One input, a wave; the first n points of one sequence, so that the sets for n = 2, 10, 100, 1000 are nested."""
    rng_x, rng_noise = _streams(seed, n, 1)
    about = "A wave seen at more and more points. The posterior should sharpen towards one function."
    return _wave_toy("sharpening_regression", about, rng_x.uniform(-2.0, 2.0, n), rng_noise, _check_noise(noise))


def heteroscedastic_regression(n: int = 200, *, seed: int = 0) -> Toy:
    """One input, a wave; the noise grows with x, from a deviation of 0.05 at x = -2 to one of 0.5 at x = 2."""
    rng_x, rng_noise = _streams(seed, n, 1)
    about = "A wave whose noise grows with x. Aleatoric uncertainty should grow alike."
    return _wave_toy("heteroscedastic_regression", about, rng_x.uniform(-2.0, 2.0, n), rng_noise, None)


def star_classification(n: int = 20, *, seed: int = 0) -> Toy:
    """Two inputs, two clusters left and right, and a star far above, on the right of the line between them.

    The left cluster is the mirror image of the right one, so the best straight boundary is the line x1 = 0 whatever the
    seed, and the star lies well on the side of label 1. Logistic regression with prior N(0, 1) gives label 1 about 0.97
    there by MAP and 0.65 by Bayes: few points leave the slope of the boundary open, and far out a small turn matters.
    """
    rng, _ = _streams(seed, n, 2)
    if n % 2:
        raise InputError("n", f"found {n}, which is odd", "Pass an even number: the clusters have the same size")
    centre, spread = np.array([1.5, 0.0]), 0.8
    right = centre + spread * rng.standard_normal((n // 2, 2))
    x = np.stack([right * [-1.0, 1.0], right], axis=1).reshape(n, 2)  # labels alternate: 0, 1, 0, 1, ...
    axes = np.meshgrid(np.linspace(-6.0, 6.0, 61), np.linspace(-5.0, 15.0, 101), indexing="ij")
    grid = np.stack([a.ravel() for a in axes], axis=1)
    truth = 1 / (1 + np.exp(-2 * centre[0] * grid[:, :1] / spread**2))
    about = "Two clusters and a far-away star. A point estimate is certain there; Bayes should be near 0.6 to 0.4."
    extra: dict[str, Any] = {"star": torch.tensor([[2.0, 12.0]]), "grid_shape": axes[0].shape}
    x_, grid_, truth_ = (_float32(a) for a in (x, grid, truth))
    return Toy("star_classification", "binary", x_, torch.arange(n) % 2, grid_, truth_, None, about, **extra)


def _wave_toy(
    name: str,
    about: str,
    x: Array,
    rng: np.random.Generator,
    noise: float | None,
    gap: tuple[float, float] | None = None,
) -> Toy:
    """The wave at x (N,) with noise of one deviation, or with growing noise for None, and a grid from -3.5 to 3.5."""
    grid = np.linspace(-3.5, 3.5, 281)
    wave, wave_grid = (np.sin(2 * at) + 0.3 * at for at in (x, grid))
    scale, scale_grid = (0.05 * 10 ** ((at + 2) / 4) if noise is None else np.full_like(at, noise) for at in (x, grid))
    y = wave + scale * rng.standard_normal(len(x))
    x_, y_, grid_, truth, deviation = (_float32(a[:, None]) for a in (x, y, grid, wave_grid, scale_grid))
    return Toy(name, "regression", x_, y_, grid_, truth, noise, about, deviation, gap, grid_shape=grid.shape)


def _streams(seed: int, n: int, least: int) -> tuple[np.random.Generator, np.random.Generator]:
    """A stream for places and one for noise, after a look at n."""
    if isinstance(n, bool) or not isinstance(n, int) or n < least:
        raise InputError("n", f"found {n!r}", f"Pass an integer from {least} up")
    # Numpy's streams and one each: then a longer draw begins with the shorter one, which torch does not promise.
    return np.random.default_rng([check_seed(seed), 0]), np.random.default_rng([seed, 1])


def _check_noise(noise: float) -> float:
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not (math.isfinite(noise) and noise > 0):
        raise InputError("noise", f"found {noise!r}", "Pass the deviation of the noise, a positive number")
    return float(noise)


# The UCI benchmark, from a folder


def uci_names(root: str | Path) -> tuple[str, ...]:
    """The data sets in root/uci or root: the npz files that hold X, y, train_idx and test_idx."""
    found = set()
    for folder in _folders(root):
        for path in folder.glob("*.npz"):
            try:
                with zipfile.ZipFile(path) as archive:
                    if {f"{key}.npy" for key in _UCI_KEYS} <= set(archive.namelist()):
                        found.add(path.stem)
            except _UNREADABLE:
                continue  # not of this form; uci() says why when it is asked for by name
    return tuple(sorted(found))


def uci_splits(root: str | Path, name: str) -> int:
    """The number of splits into training and test rows that a data set comes with."""
    return len(_read_uci(root, name)["train_idx"])


def uci(root: str | Path, name: str, split: int = 0) -> DataSet:
    """One split of a data set of the UCI benchmark, standardised with the training rows of that split.

    Args:
        root: the folder that holds uci/<name>.npz or <name>.npz, with the arrays X (N, P), y (N,), train_idx and
            test_idx (splits, rows; into the rows of X) and optionally n_hidden.
        name: the data set, one of uci_names(root).
        split: from 0 to uci_splits(root, name) - 1.
    """
    arrays = _read_uci(root, name)
    splits = len(arrays["train_idx"])
    if isinstance(split, bool) or not isinstance(split, (int, np.integer)) or not 0 <= split < splits:
        raise InputError("split", f"found {split!r}", f"{name} has the splits 0 to {splits - 1}")
    x, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
    train, test = arrays["train_idx"][split], arrays["test_idx"][split]
    for key, index in (("train_idx", train), ("test_idx", test)):
        if index.min() < 0 or index.max() >= len(x):
            _malformed(name, f"{key}[{split}] runs from {index.min()} to {index.max()}, but X has {len(x)} rows")
        if len(np.unique(index)) < len(index):
            _malformed(name, f"{key}[{split}] holds a row twice")
    both = np.intersect1d(train, test)
    if len(both):
        _malformed(name, f"in split {split} {len(both)} rows are in train_idx and test_idx, the first is {both[0]}")
    about = {
        "name": name,
        "description": f"UCI {name}, split {split} of {splits}",
        "feature_names": tuple(f"x{i}" for i in range(x.shape[1])),
        "n_hidden": int(arrays["n_hidden"]) if "n_hidden" in arrays else None,
    }
    return _standardised("regression", x, y, train, test, n_classes=None, **about)


def _read_uci(root: str | Path, name: str) -> dict[str, Array]:
    """The arrays of one file, checked for everything that does not depend on the split."""
    paths = [folder / f"{name}.npz" for folder in _folders(root)]
    path = next((p for p in paths if p.stem == name and p.is_file()), None)  # the stem differs for a name like "../x"
    if path is None:
        there = ", ".join(uci_names(root)) or "no file of this form"
        raise InputError("name", f"found {name!r}; looked for {' and '.join(map(str, paths))}", f"There: {there}")
    try:
        # np.load alone would take a file with one bare array too.
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            keys = list(archive.files)
            arrays = {key: archive[key] for key in (*_UCI_KEYS, "n_hidden") if key in keys}
    except _UNREADABLE as error:
        raise InputError("name", f"{path} cannot be read: {error}", "Fetch or write the file anew") from error
    missing = [key for key in _UCI_KEYS if key not in arrays]
    if missing:
        _malformed(name, f"it has no {', '.join(missing)}, only {', '.join(keys) or 'nothing'}")
    forms = {"X": (2, "fiu"), "y": (1, "fiu"), "train_idx": (2, "iu"), "test_idx": (2, "iu"), "n_hidden": (0, "iu")}
    for key, array in arrays.items():
        axes, kinds = forms[key]
        if array.ndim != axes or array.dtype.kind not in kinds or not array.size:
            what = "integers" if kinds == "iu" else "numbers"
            _malformed(name, f"{key} has shape {array.shape} and type {array.dtype}, not {axes} axes of {what}")
        bad = int((~np.isfinite(array)).sum())
        if bad:
            _malformed(name, f"{key} has {bad} values that are NaN or infinite")
    for one, other, what in (("X", "y", "rows"), ("train_idx", "test_idx", "splits")):
        if len(arrays[one]) != len(arrays[other]):
            _malformed(name, f"{one} has {len(arrays[one])} {what}, {other} has {len(arrays[other])}")
    return arrays


def _folders(root: str | Path) -> list[Path]:
    """The folders to look in."""
    path = Path(root)
    if not path.is_dir():
        around = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        found = f"there is no folder {path} (looked for {path / 'uci'} and {path})"
        raise InputError("root", found, f"In {path.parent} there is: {', '.join(around[:20]) or 'nothing'}")
    return [folder for folder in (path / "uci", path) if folder.is_dir()]


def _malformed(name: str, reason: str) -> None:
    form = "X (N, P), y (N,), train_idx and test_idx (splits, rows), n_hidden; finite, no row in both parts of a split"
    raise InputError("name", f"the file of {name} is malformed: {reason}", f"Its form: {form}")


def _float32(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
