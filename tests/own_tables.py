"""Small tables from scikit-learn's embedded data for tests of the command line, and helpers to call it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from sklearn import datasets
from typer.testing import CliRunner

from credibly.cli import app
from warm_python import warm_python

SCRIPT = Path(sys.executable).with_name("credibly")
# Runs a script in an interpreter that may have been started with Ctrl-C turned off.
AS_SCRIPT = """import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
REGRESSION = ("mean", "std", "std_aleatoric", "std_epistemic", "lower_90", "upper_90", "ood", "notes")
RUN_FILES = [
    "config.toml",
    "folds",
    "held_out.parquet",
    "posterior",
    "report.html",
    "results.json",
    "table.json",
    "training_sample.parquet",
]
# Fixed settings and one held-out part, so that a fit takes a second.
QUICK = ("--tune", "none", "--holdout", "0.2")
HMC = (
    *QUICK,
    "--method",
    "hmc",
    "--set",
    "draws=10",
    "--set",
    "warmup=20",
    "--set",
    "chains=2",
    "--set",
    "thin=1",
    "--hidden",
    "6",
)
MAP = (*QUICK, "--method", "map", "--set", "steps=30", "--hidden", "6")
ENSEMBLE = (*QUICK, "--method", "ensemble", "--set", "steps=150", "--set", "members=4", "--hidden", "6")


def diabetes(rows: int = 160, scale: float = 1.0, shift: float = 0.0) -> dict[str, Any]:
    """Return a regression table with a numeric, a categorical and a constant column, and missing values."""
    known = datasets.load_diabetes()
    columns: dict[str, Any] = {
        name: known.data[:rows, i].round(6) for i, name in enumerate(known.feature_names) if i in (0, 2, 3, 8)
    }
    columns["bmi"] = [None if i % 17 == 3 else v for i, v in enumerate(columns["bmi"])]
    sex = known.data[:rows, 1]
    columns["clinic"] = [
        None if i % 31 == 5 else ("Nord, links" if s > 0 else ("Süd" if i % 2 else "Ost")) for i, s in enumerate(sex)
    ]
    columns["year"] = [1994] * rows
    columns["progress"] = known.target[:rows] * scale + shift
    return columns


def wine() -> dict[str, Any]:
    """Return a table with three named classes."""
    known = datasets.load_wine()
    names = np.array(["Barolo", "Grignolino", "Barbera d'Asti"])
    return {n: known.data[:, i] for i, n in enumerate(known.feature_names[:6])} | {"kind": names[known.target]}


def cancer(rows: int = 150) -> dict[str, Any]:
    """Return a table with two classes, 0 and 1."""
    known = datasets.load_breast_cancer()
    return {n.replace(" ", "_"): known.data[:rows, i] for i, n in enumerate(known.feature_names[:5])} | {
        "benign": known.target[:rows]
    }


def write(columns: dict[str, Any], path: Path) -> Path:
    """Write columns to a CSV or Parquet file, by its suffix."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        pa.csv.write_csv(table, path)
    return path


def read(path: Path) -> dict[str, Any]:
    """Read a file of predictions as columns; empty text cells stay empty text."""
    table = pq.read_table(path) if path.suffix == ".parquet" else pa.csv.read_csv(path)
    return {
        n: c.to_numpy(zero_copy_only=False) if n not in ("notes", "prediction") else c.to_pylist()
        for n, c in zip(table.column_names, table.columns)
    }


def call(*words: object) -> Any:
    """Run the command in this process, with separate standard output and error."""
    return CliRunner().invoke(app, [str(word) for word in words])


def start(*words: object, cwd: Path, python: str | None = None) -> subprocess.Popen[str]:
    """Start the installed command, by another interpreter if one is given.

    It is the process itself that gets signals and is waited for; that of `warm_python` gets those that its client
    forwards, and outlives it when killed.
    """
    return subprocess.Popen(
        [*([python, "-c", AS_SCRIPT] if python else []), str(SCRIPT), *(str(w) for w in words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        preexec_fn=_listen,
    )


def _listen() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell turns Ctrl-C off for jobs behind


def command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command to its end, with torch imported before it starts."""
    with start(*words, cwd=cwd, python=warm_python()) as process:
        out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(there: Callable[[], object], process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Wait until a condition holds while a process runs."""
    end = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def refused(found: Any, *words: str, code: int = 2) -> str:
    """Assert that a call ended in one line on standard error that contains the given words."""
    assert found.exit_code == code, (found.output, found.exception)
    assert isinstance(found.exception, SystemExit), found.exception
    assert found.stderr.startswith("credibly: ")
    assert found.stderr.count("\n") == 1
    assert "Traceback" not in found.stderr
    for word in words:
        assert word in found.stderr, found.stderr
    return str(found.stderr)


def names(folder: Path) -> list[str]:
    """Return the names of the files in a folder, including hidden ones."""
    return sorted(p.name for p in folder.iterdir())
