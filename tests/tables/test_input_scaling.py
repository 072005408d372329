"""Normal scores and categories of numeric inputs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import stats

import credibly as cr
from credibly.export.columns import ScalingGraph
from credibly.tables import Config, TableRun, fit_table, prepare
from credibly.tables.columns.scaling import FEW, KINDS, InputScaling
from credibly.tables.files.reading import read_table
from own_tables import write


@pytest.fixture(scope="module")
def x():
    rng = np.random.default_rng(0)
    skewed, few = rng.lognormal(size=2000), rng.integers(0, 6, 2000)
    return np.stack([(skewed - skewed.mean()) / skewed.std(), (few - 2.5) / 1.7, rng.integers(0, 2, 2000)], 1)


def test_skewed_columns_become_normal(x):
    scaling = InputScaling.fit("quantile", x, (0, 1))
    assert scaling.columns == (0,)
    out = scaling(x)
    assert stats.kstest(out[:, 0], "norm").statistic < 0.02
    np.testing.assert_array_equal(out[:, 1:], x[:, 1:].astype(np.float32))
    assert len(np.unique(x[:, 1])) <= FEW


def test_clipped_inputs_stay_within_the_training_range(x):
    scaling = InputScaling.fit("clipped", x, (0,))
    np.testing.assert_array_equal(scaling(x), x.astype(np.float32))
    beyond = np.array([[-50.0, 9.0, 0.5], [50.0, -9.0, 1.0]])
    low, high = x.min(0), x.max(0)
    np.testing.assert_allclose(scaling(beyond), np.clip(beyond, low, high), rtol=1e-6)
    inputs = torch.from_numpy(beyond.astype(np.float32))
    np.testing.assert_array_equal(ScalingGraph(scaling)(inputs).numpy(), scaling(beyond.astype(np.float32)))


def test_the_order_is_kept_also_beyond_the_training_rows(x):
    scaling = InputScaling.fit("quantile", x, (0,))
    grid = np.zeros((500, 3))
    grid[:, 0] = np.linspace(-20, 40, 500)
    out = scaling(grid)[:, 0]
    assert (np.diff(out) > 0).all()
    # A row far outside is no further away than it was.
    assert out[-1] < 40


def test_categories_add_an_input_per_value(x):
    scaling = InputScaling.fit("categories", x, (0, 1))
    assert scaling.columns == (1,)
    assert scaling.outputs(3) == 9
    out = scaling(x.astype(np.float32))
    np.testing.assert_array_equal(out[:, 3:].sum(1), 1)
    np.testing.assert_array_equal(out[:, 3:].argmax(1), np.unique(x[:, 1], return_inverse=True)[1])
    other = x[:1].copy()
    other[0, 1] = 0.123
    assert scaling(other)[0, 3:].sum() == 0


def test_stored_and_restored(x):
    for kind in ("standard", "quantile", "categories"):
        scaling = InputScaling.fit(kind, x, (0, 1))
        again = InputScaling.from_dict(json.loads(json.dumps(scaling.to_dict())))
        assert again == scaling
        np.testing.assert_array_equal(again(x), scaling(x))
    with pytest.raises(cr.StoreError, match="input scaling"):
        InputScaling.from_dict({"kind": "magic", "columns": [], "points": []})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_any_encoding_loads_and_predicts(kind, tmp_path):
    rng = np.random.default_rng(0)
    grade = rng.integers(0, 4, 80)
    y = grade**2 + rng.normal(size=80)
    table = write({"grade": grade, "x": rng.lognormal(size=80), "y": y}, tmp_path / "table.csv")
    settings = {"draws": 6, "warmup": 20, "chains": 2, "thin": 1}
    config = Config(str(table), "y", method="hmc", hidden=(4,), settings=settings, tune="none", inputs=kind)
    fitted = fit_table(prepare(config), tmp_path / "run")
    assert fitted.model.preparation.scaling.kind == kind
    rows = read_table(table)
    loaded = TableRun.load(tmp_path / "run").model.predict_table(rows)
    assert torch.equal(loaded.mean, fitted.model.predict_table(rows).mean)
