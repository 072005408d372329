"""Small tables for the coverage benchmark: real ones with random or standard splits, and synthetic ones.

Each table is a function from the number of a split to training and test rows. Synthetic tables draw new training rows
for every split, so that an average over splits is over data sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from credibly import data

Array = npt.NDArray[Any]

# Test rows of synthetic tables, and the most that a real table has.
TEST_ROWS = 500


@dataclass(frozen=True)
class Rows:
    """Training and test rows of one split, in their own units."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


@dataclass(frozen=True)
class SmallTable:
    """A table: its name, description and splits."""

    name: str
    about: str
    split: Callable[[int], Rows]


# -- real tables ------------------------------------------------------------------------------------------------------
def diabetes(train: int, split: int) -> Rows:
    """Return random rows of the diabetes table that comes with scikit-learn; the others are for testing."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return _rows(x, y, *_random_split(len(x), train, split))


def uci(root: Path, name: str, train: int | None, split: int) -> Rows:
    """Return a standard split of a UCI table, or random rows of it if a number of training rows is given."""
    found = data.uci(root, name, 0 if train is not None else split)
    x = np.concatenate([found.x_train.numpy(), found.x_test.numpy()]).astype(np.float64)
    y = np.concatenate([found.y_train.numpy(), found.y_test.numpy()])[:, 0].astype(np.float64)
    y = y * found.y_std + found.y_mean
    if train is not None:
        return _rows(x, y, *_random_split(len(x), train, split))
    cut = len(found.x_train)
    return _rows(x, y, np.arange(cut), np.arange(cut, len(x)))


def _random_split(rows: int, train: int, split: int) -> tuple[Array, Array]:
    order = np.random.default_rng([split, rows, train]).permutation(rows)
    return order[:train], order[train : train + TEST_ROWS]


def _rows(x: Array, y: Array, train: Array, test: Array) -> Rows:
    return Rows(x[train], y[train], x[test], y[test])


# -- synthetic tables -------------------------------------------------------------------------------------------------
def linear(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    x = rng.normal(size=(rows, 5))
    return x, x @ np.array([1.0, -0.5, 0.5, 0.25, 0.0]) + rng.normal(size=rows)


def irrelevant(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    x = rng.normal(size=(rows, 20))
    return x, x[:, 0] + np.abs(x[:, 1]) + 0.7 * rng.normal(size=rows)


def gap(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    """Return a sine without rows between -1 and 1. Test rows lie where training rows do."""
    x = rng.uniform(1, 3, size=rows) * rng.choice([-1, 1], size=rows)
    return x[:, None], np.sin(1.5 * x) + 0.3 * rng.normal(size=rows)


def heteroscedastic(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    x = rng.uniform(-2, 2, size=(rows, 3))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] + 0.25 * np.exp(0.7 * x[:, 2]) * rng.normal(size=rows)


def heavy_tails(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    x = rng.normal(size=(rows, 4))
    return x, x[:, 0] * x[:, 1] + x[:, 2] + 0.4 * rng.standard_t(3, size=rows)


def friedman(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    """Return Friedman's first problem: five of ten columns matter."""
    x = rng.uniform(size=(rows, 10))
    mean = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, mean + rng.normal(size=rows)


def steps(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    """Return a mean that jumps, which a smooth network can only approximate."""
    x = rng.uniform(-1, 1, size=(rows, 3))
    return x, np.sign(x[:, 0]) + 2.0 * (x[:, 1] > 0.3) * (x[:, 2] > 0) + 0.3 * rng.normal(size=rows)


def synthetic(make: Callable[[np.random.Generator, int], tuple[Array, Array]], train: int, split: int) -> Rows:
    """Return new rows for every split."""
    x, y = make(np.random.default_rng([split, train]), train + TEST_ROWS)
    return _rows(x, y, np.arange(train), np.arange(train, train + TEST_ROWS))


def tables(root: Path | None) -> list[SmallTable]:
    """Return the tables; without a folder of UCI sets, those that need none."""
    made: list[tuple[str, str, Callable[[np.random.Generator, int], tuple[Array, Array]], int]] = [
        ("linear-70", "linear, 5 columns", linear, 70),
        ("gap-80", "a sine with a gap", gap, 80),
        ("irrelevant-100", "2 of 20 columns matter", irrelevant, 100),
        ("friedman-150", "Friedman 1, 5 of 10 columns matter", friedman, 150),
        ("hetero-200", "noise that depends on x", heteroscedastic, 200),
        ("steps-300", "a mean that jumps", steps, 300),
        ("heavy-400", "Student-t noise with 3 degrees of freedom", heavy_tails, 400),
        ("friedman-600", "Friedman 1", friedman, 600),
    ]
    found = [SmallTable(name, about, partial(synthetic, make, rows)) for name, about, make, rows in made]
    found += [SmallTable(f"diabetes-{rows}", "diabetes progression", partial(diabetes, rows)) for rows in (100, 350)]
    if root is None:
        return found
    real: list[tuple[str, str, str, int | None]] = [
        ("boston-100", "house prices, 100 rows", "boston", 100),
        ("concrete-200", "strength of concrete, 200 rows", "concrete", 200),
        ("yacht", "resistance of yachts, standard splits", "yacht", None),
        ("boston", "house prices, standard splits", "boston", None),
        ("energy", "heating load, standard splits", "energy", None),
        ("concrete", "strength of concrete, standard splits", "concrete", None),
        ("wine", "quality of red wine, standard splits", "wine_red", None),
        ("protein-2000", "protein structure, 2,000 rows", "protein", 2_000),
    ]
    return found + [SmallTable(name, about, partial(uci, root, file, rows)) for name, about, file, rows in real]
