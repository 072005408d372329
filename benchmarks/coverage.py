"""Coverage of the defaults for tables: 90 % intervals of test rows, over real and synthetic tables of 70 to 2,000 rows.

    python -m benchmarks.coverage --root DIR --workers 16 --out coverage.json       # all cells, about 8 minutes
    python -m benchmarks.coverage --splits 2 --tables linear-70,gap-80 --methods default,ensemble
    python -m benchmarks.coverage --out coverage.json --page docs/results/table-coverage

DIR has uci/NAME.npz; without it the UCI tables are left out. A cell is one way to fit on one split of one table, in a
process with one thread. Finished cells are kept in --out, and a repeated command runs those that are missing; delete
the file after a change of the code. --page writes the results page from the cells in --out.

The ways to fit are the defaults: `BayesianRegressor()`, `credibly fit` (on the same training rows, of which it holds
out a fifth), and `BayesianRegressor(method=...)` for every method. "joint-mode ensemble" is the ensemble with the
noise of its training rows, for comparison.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: every worker has one thread

import argparse
import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.coverage_page import write_page
from benchmarks.coverage_tables import Rows, tables
from benchmarks.timing import machine
from credibly.methods import METHODS
from credibly.predictive.base import Predictive
from credibly.tables import Config, fit_table, prepare
from credibly.tables.estimators import BayesianRegressor

LEVEL = 0.9
DEFAULT, COMMAND, JOINT = "default", "fit", "joint-mode ensemble"
# HMC is what the default picks for all of these tables.
WAYS = (DEFAULT, COMMAND, *(name for name in METHODS if name != "hmc"), JOINT)


def fit(way: str, rows: Rows, folder: Path) -> tuple[Predictive, str]:
    """Return the predictive of the test rows and the name of the method that was used."""
    if way == COMMAND:
        return fit_file(rows, folder)
    given: dict[str, Any] = {} if way == DEFAULT else {"method": way}
    if way == JOINT:
        given = {"method": "ensemble", "settings": {"noise_from": "training"}}
    model = BayesianRegressor(**given, tune=None).fit(rows.x, rows.y)
    return model.predictive(rows.x_test), model.method_


def fit_file(rows: Rows, folder: Path) -> tuple[Predictive, str]:
    """Return the same from a file, as `credibly fit` does."""

    def columns(x: Any, y: Any) -> pa.Table:
        return pa.table({**{f"x{i}": x[:, i] for i in range(x.shape[1])}, "y": y})

    parquet.write_table(columns(rows.x, rows.y), folder / "table.parquet")
    prepared = prepare(Config(str(folder / "table.parquet"), "y", task="regression"))
    run = fit_table(prepared, folder / "run", progress=False)
    return run.model.predict_table(columns(rows.x_test, rows.y_test)), prepared.method.name


def evaluate(predictive: Predictive, rows: Rows) -> dict[str, float]:
    """Return the metrics of the test rows; widths and noise in standard deviations of the training targets."""
    y, unit = torch.from_numpy(rows.y_test), float(rows.y.std())
    lower, upper = (bound.double() for bound in predictive.interval(LEVEL))
    return {
        "coverage": float(((lower <= y) & (y <= upper)).double().mean()),
        "log_likelihood": float(predictive.log_prob(y).double().mean()),
        "rmse": float((predictive.mean.double() - y).square().mean().sqrt()),
        "width": float((upper - lower).mean()) / unit,
        "noise": float(predictive.aleatoric.double().mean().sqrt()) / unit,
    }


def measure(root: Path | None, name: str, split: int, way: str) -> dict[str, Any]:
    """Run one cell; plain values."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = next(table for table in tables(root) if table.name == name).split(split)
    cell: dict[str, Any] = {"table": name, "split": split, "way": way}
    try:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            predictive, method = fit(way, rows, Path(folder))
            seconds = time.perf_counter() - started
            metrics = evaluate(predictive, rows)
    except Exception as error:  # a cell that fails must not stop the others
        return cell | {"error": f"{type(error).__name__}: {error}"[:300]}
    about = {"rows": len(rows.y), "columns": rows.x.shape[1], "test_rows": len(rows.y_test), "method": method}
    return cell | about | {k: round(v, 6) for k, v in metrics.items()} | {"seconds": round(seconds, 3)}


def run(
    root: Path | None, names: Iterable[str], ways: Iterable[str], splits: int, workers: int, out: Path
) -> list[dict[str, Any]]:
    """Run the cells that are not in the file yet, the slowest tables first, and return all of them."""
    record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"cells": []}
    record["machine"] = machine() | {"workers": workers, "torch_threads": 1}
    known = {(c["table"], c["split"], c["way"]) for c in record["cells"] if "error" not in c}
    record["cells"] = [c for c in record["cells"] if "error" not in c]
    sizes = {table.name: len(table.split(0).y) for table in tables(root)}
    ordered = sorted(names, key=lambda name: -sizes[name])
    missing = [(n, s, w) for n in ordered for w in ways for s in range(splits) if (n, s, w) not in known]
    started = written = time.perf_counter()
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    with pool:
        cells = [pool.submit(measure, root, *cell) for cell in missing]
        for done, future in enumerate(as_completed(cells), 1):
            record["cells"].append(future.result())
            if time.perf_counter() - written > 5 or done == len(cells):
                written = time.perf_counter()
                _write(out, record)
                print(f"{done} of {len(cells)} cells, {written - started:.0f} s", flush=True)
    return list(record["cells"])


def _write(out: Path, record: dict[str, Any]) -> None:
    record["cells"].sort(key=lambda c: (c["table"], c["way"], c["split"]))
    lines = ",\n".join(json.dumps(cell) for cell in record["cells"])
    partial = out.with_suffix(".partial")
    partial.write_text(f'{{"machine": {json.dumps(record["machine"])},\n"cells": [\n{lines}\n]}}\n', encoding="utf-8")
    partial.replace(out)


def show(cells: list[dict[str, Any]], ways: Iterable[str]) -> None:
    """Print coverage by table and way to fit, and the failed cells."""
    done = [c for c in cells if "error" not in c]
    names = list(dict.fromkeys(c["table"] for c in done))
    for way in ways:
        by_table = {n: [c["coverage"] for c in done if (c["table"], c["way"]) == (n, way)] for n in names}
        means = {n: float(np.mean(values)) for n, values in by_table.items() if values}
        if means:
            lowest = min(means, key=lambda n: means[n])
            average = math.fsum(means.values()) / len(means)
            print(f"{way:22s} mean {average:.3f}, lowest {means[lowest]:.3f} ({lowest}), {len(means)} tables")
    for cell in cells:
        if "error" in cell:
            print(f"failed: {cell['table']}, split {cell['split']}, {cell['way']}: {cell['error']}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--root", type=Path, default=None, help="folder with uci/NAME.npz")
    options.add_argument("--splits", type=int, default=10, help="splits per table (default 10)")
    options.add_argument("--tables", default=None, help="names of tables, separated by commas (default: all)")
    options.add_argument("--methods", default=None, help="ways to fit, separated by commas (default: all)")
    options.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    options.add_argument("--out", type=Path, default=Path("coverage.json"), help="file of finished cells")
    options.add_argument("--page", type=Path, default=None, help="only write the results page into this folder")
    given = options.parse_args()
    every = {table.name: table for table in tables(given.root)}
    names = given.tables.split(",") if given.tables else list(every)
    ways = tuple(given.methods.split(",")) if given.methods else WAYS
    for name in [n for n in names if n not in every] + [w for w in ways if w not in WAYS]:
        options.error(f"unknown: {name!r}. Tables: {', '.join(every)}. Methods: {', '.join(WAYS)}")
    if given.page is not None:
        write_page(json.loads(given.out.read_text(encoding="utf-8")), given.page)
        return
    show(run(given.root, names, ways, given.splits, given.workers, given.out), ways)


if __name__ == "__main__":
    main()
