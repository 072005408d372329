"""Runs that the tests of the server share, fitted once in a process."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from served import serving

from credibly.tables import Config, fit_table, prepare
from own_tables import diabetes, wine, write

ENSEMBLE = {"members": 3, "steps": 60}
HMC = {"draws": 12, "warmup": 20, "chains": 2, "thin": 1}


def fitted(place, columns, target, **config):
    table = write(columns, place / f"{target}.csv")
    chosen = {"tune": "none", "hidden": (5,), "method": "ensemble", "settings": ENSEMBLE} | config
    fit_table(prepare(Config(str(table), target, **chosen)), place / target, progress=False)
    return place / target


def dated(rows=120):
    """Return a table with a date and counts, without cells that are missing."""
    rng = np.random.default_rng(0)
    day = np.datetime64("2024-01-01") + rng.integers(0, 300, rows)
    size = rng.normal(size=rows).round(3)
    return {"day": day.astype(str), "size": size, "visits": rng.poisson(np.exp(1 + 0.5 * size))}


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="session")
def numbers(place):
    """A regression with a guarantee from folds, whose draws are streamed to the folder."""
    columns = diabetes(120)
    # Missing cells in training would triple the number of fits.
    columns["bmi"] = [0.01 if value is None else value for value in columns["bmi"]]
    columns["clinic"] = ["Ost" if value is None else value for value in columns["clinic"]]
    return fitted(place, columns, "progress", method="hmc", settings=HMC)


@pytest.fixture(scope="session")
def classes(place):
    """Three classes with prediction sets."""
    return fitted(place, wine(), "kind")


@pytest.fixture(scope="session")
def counts(place):
    """Counts by date, without folds or held-out rows."""
    return fitted(place, dated(), "visits", holdout=0.0)


@pytest.fixture(scope="session")
def client(numbers):
    """A client of a server of the regression alone."""
    with serving(numbers) as client:
        yield client


@pytest.fixture(scope="session")
def all_runs(numbers, classes, counts):
    """A client of a server of three runs."""
    with serving(numbers, classes, counts, max_rows=500, max_bytes=200_000) as client:
        yield client
