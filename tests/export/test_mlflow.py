"""The lines of the documentation that log a run with MLflow, run as they are; skipped where MLflow is not installed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from credibly.export.pyfunc import RunModel
from credibly.tables import Config, fit_table, prepare

pd = pytest.importorskip("pandas")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "export.md"


# MLflow warns about the lack of type hints and of an example.
@pytest.mark.filterwarnings("default")
def test_a_logged_run_predicts_as_the_run_does(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.gamma(9, 9, 60), "rooms": rng.integers(1, 6, 60).astype(float)})
    frame["city"] = rng.choice(["Oslo", "Bergen"], 60)
    frame["price"] = frame["area"] + 10 * frame["rooms"] + rng.normal(size=60)
    frame.loc[::9, "rooms"] = np.nan
    monkeypatch.chdir(tmp_path)
    frame.to_csv("table.csv", index=False)
    fit_table(prepare(Config("table.csv", "price", method="laplace", tune="none")), Path("run"), progress=False)
    wrapper, logging = re.findall(r"```text\n(import mlflow\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    Path("credibly_model.py").write_text(wrapper, encoding="utf-8")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    names: dict = {}
    exec(compile(logging, "export.md", "exec"), names)
    loaded = mlflow.pyfunc.load_model(names["model"].model_uri)
    # The number of rooms is an integer column in the second frame, and a column is absent from the third.
    rows = frame.drop(columns="price")
    for some in (rows, rows.dropna().astype({"rooms": int}), rows.drop(columns="city")):
        for params in (None, {"levels": [0.8]}):
            expected = RunModel("run").predict(some, params)
            pd.testing.assert_frame_equal(loaded.predict(some, params=params), expected)
