"""Rows with missing cells: coverage, width and OOD score of 90 % intervals by the number of gaps.

    python -m benchmarks.gaps --root DIR

For every table, one to three of the four most important columns of each test row are blanked at random. Predictions by
the estimator, which averages over completions from similar training rows, are compared with those of the same fit after
the blanks have been replaced by medians. Importance is the increase in squared error when a column is shuffled.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import credibly as cr
from benchmarks.coverage_tables import Rows, diabetes, uci
from credibly.tables.model import epistemic_of, fraction_below, quantile_levels

Array = npt.NDArray[Any]

# Number of training rows by table; the others, at most 500, are for testing.
UCI = {"boston": 380, "concrete": 700, "energy": 500, "wine_red": 700, "yacht": 220}
IMPORTANT = 4
# A fifth of the default draws: enough for intervals, and quick.
SETTINGS = {"chains": 4, "warmup": 150, "draws": 60, "thin": 2}


def synthetic(train: int = 600, test: int = 400) -> Rows:
    """Return rows of eight inputs with three common causes, and a target with an interaction and squares."""
    rng = np.random.default_rng(0)
    causes = rng.normal(size=(train + test, 3)) @ rng.normal(size=(3, 8)) / np.sqrt(3)
    x = 0.8 * causes + 0.6 * rng.normal(size=(train + test, 8))
    y = 3 * np.sin(1.5 * x[:, 0]) + 2 * x[:, 1] * x[:, 2] + x[:, 3] ** 2 + x[:, 4] + 0.5 * rng.normal(size=train + test)
    return Rows(x[:train], y[:train], x[train:], y[train:])


def important(model: cr.BayesianRegressor, x: Array, y: Array) -> Array:
    """Return the indices of the most important columns."""
    rng = np.random.default_rng(1)
    errors = []
    for j in range(x.shape[1]):
        shuffled = x.copy()
        shuffled[:, j] = rng.permutation(x[:, j])
        errors.append(np.mean((model.predict(shuffled) - y) ** 2))
    return np.argsort(errors)[::-1][:IMPORTANT]


def measure(rows: Rows) -> list[str]:
    """Return the cells of a line of the table: without gaps, then by the number of gaps, then OOD scores."""
    model = cr.BayesianRegressor("hmc", settings=SETTINGS).fit(rows.x, rows.y)
    x, y, unit = rows.x_test, rows.y_test, rows.y.std()
    levels = quantile_levels(epistemic_of(model.predictive(x)))
    assert levels is not None

    def result(new: Array) -> tuple[float, float]:
        lower, upper = model.predict_interval(new)
        return float(np.mean((lower <= y) & (y <= upper))), float(np.mean(upper - lower) / unit)

    def ood(new: Array) -> float:
        return float(fraction_below(epistemic_of(model.predictive(new)), levels).mean())

    columns, rng = important(model, x, y), np.random.default_rng(2)
    coverage, width = result(x)
    cells, scores = [f"{coverage:.2f}, width {width:.2f}"], [ood(x)]
    for gaps in (1, 2, 3):
        blank = x.copy()
        for row in blank:
            row[rng.choice(columns, gaps, replace=False)] = np.nan
        filled = np.where(np.isnan(blank), np.median(rows.x, axis=0), blank)
        (before, narrow), (after, wide) = result(filled), result(blank)
        cells.append(f"{before:.2f} → {after:.2f}, width {narrow:.2f} → {wide:.2f}")
        scores.append(ood(blank))
    return [*cells, ", ".join(f"{score:.2f}" for score in scores)]


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--root", type=Path, help="folder with uci/*.npz; without it two tables are measured")
    root = options.parse_args().root
    tables = {"diabetes": lambda: diabetes(330, 0), "synthetic": synthetic}
    if root is not None:
        tables |= {name: lambda name=name, train=train: uci(root, name, train, 0) for name, train in UCI.items()}
    print("| table | no gap | 1 gap | 2 gaps | 3 gaps | mean `ood`, 0 to 3 gaps |\n|---|---|---|---|---|---|")
    for name, rows in sorted(tables.items()):
        print(f"| {name} | {' | '.join(measure(rows()))} |", flush=True)


if __name__ == "__main__":
    main()
