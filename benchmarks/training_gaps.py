"""Training rows with missing cells: coverage, width and RMSE on complete test rows.

    python -m benchmarks.training_gaps --root DIR

For every table, a tenth of the cells of the training rows is blanked at random. A fit to the complete rows is compared
with two fits to the rows with gaps: filled with averages over similar rows, and sampled given the target.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest.mock import patch

import numpy as np

import credibly as cr
from benchmarks.coverage_tables import Rows, diabetes, uci
from benchmarks.gaps import SETTINGS, UCI, Array, synthetic
from credibly.tables.missing import training_gaps

FRACTION = 0.1


def result(rows: Rows, x: Array) -> str:
    """Return coverage, width in standard deviations of the target, and RMSE of a fit to the given inputs."""
    model = cr.BayesianRegressor("hmc", settings=SETTINGS).fit(x, rows.y)
    lower, upper = model.predict_interval(rows.x_test)
    coverage = np.mean((lower <= rows.y_test) & (rows.y_test <= upper))
    error = np.sqrt(np.mean((model.predict(rows.x_test) - rows.y_test) ** 2))
    return f"{coverage:.2f}, width {np.mean(upper - lower) / rows.y.std():.2f}, RMSE {error:.3g}"


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--root", type=Path, help="folder with uci/*.npz; without it two tables are measured")
    root = options.parse_args().root
    tables = {"diabetes": lambda: diabetes(330, 0), "synthetic": synthetic}
    if root is not None:
        tables |= {name: lambda name=name, train=train: uci(root, name, train, 0) for name, train in UCI.items()}
    print("| table | complete | a tenth missing, averages | a tenth missing, draws |\n|---|---|---|---|")
    for name, make in sorted(tables.items()):
        rows = make()
        gaps = np.random.default_rng(5).random(rows.x.shape) < FRACTION
        x = np.where(gaps, np.nan, rows.x)
        with patch.multiple(training_gaps, ROUNDS=0, ROUNDS_OF_MANY=0):
            filled = result(rows, x)
        print(f"| {name} | {result(rows, rows.x)} | {filled} | {result(rows, x)} |", flush=True)


if __name__ == "__main__":
    main()
