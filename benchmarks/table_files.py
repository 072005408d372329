"""Files of tables: the default fit of 1,000 rows, and predictions of a large file against the bare forward passes.

    python -m benchmarks.table_files [--rows 1000000] [--draws 100]

The ratio is the time to read, prepare, predict (moments, decomposition, 90 % interval, ood) and write over that of the
bare forward passes on rows in memory; the goal is 2 or less. Peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from credibly.tables import Config, TableRun, fit_table, prepare
from credibly.tables.files.writing import TableWriter


def write_table(path: Path, rows: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    with TableWriter(path) as writer:
        for start in range(0, rows, 100_000):
            x = rng.normal(size=(min(100_000, rows - start), 10)).astype(np.float32)
            y = np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=len(x))
            writer.write({**{f"x{i}": x[:, i] for i in range(10)}, "y": y.astype(np.float32)})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--draws", type=int, default=None, help="posterior draws for predictions (default: all)")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_table(folder / "small.csv", 1_000)
        start = time.perf_counter()
        run = fit_table(prepare(Config(str(folder / "small.csv"), "y")), folder / "run", progress=False)
        seconds = time.perf_counter() - start
        print(f"fit, 1,000 rows by 10 columns, defaults ({run.config.method}): {seconds:.1f} s; {run.figures}")
        model = TableRun.load(folder / "run").model
        for rows in (given.rows // 10, given.rows):
            table = folder / f"{rows}.csv"
            write_table(table, rows, 1)
            start = time.perf_counter()
            model.predict_file(table, folder / "out.csv", force=True, draws=given.draws)
            total = time.perf_counter() - start
            x = torch.randn(min(rows, 50_000), 10)
            predictive = model.posterior.predict(x, **({} if given.draws is None else {"draws": given.draws}))
            start = time.perf_counter()
            for first in range(0, len(x), 8192):
                predictive._outputs(x[first : first + 8192], first)
            bare = (time.perf_counter() - start) * rows / len(x)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"predict {rows:,} rows, {predictive.draws} draws: {total:.1f} s, bare passes {bare:.1f} s, "
                f"ratio {total / bare:.2f}; peak memory so far {peak:,.0f} MiB"
            )


if __name__ == "__main__":
    main()
