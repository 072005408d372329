"""Runs whose metrics come from folds: fits that have not seen a row predict it, and the model is fitted to all rows."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

from conftest import undrawn
from credibly.tables.choices.rowset import Rowset
from credibly.tables.choices.search import choose
from credibly.tables.choices.table_choice import choose_table
from credibly.tables.config import Config
from credibly.tables.files.reading import read_table
from credibly.tables.guarantee import guaranteed
from credibly.tables.prepared import prepare
from credibly.tables.recipe import Recipe
from credibly.tables.run import TableRun, fit_table
from credibly.tables.splitting import Rows
from own_tables import call, refused, write

FIXED = {"method": "map", "hidden": (4,), "settings": {"steps": 60}, "tune": "none"}


def columns(rows=120, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=rows), rng.normal(size=rows)
    customer = np.arange(rows) % 12
    return {
        "a": a,
        "b": b,
        "customer": [f"c{k}" for k in customer],
        "day": [f"2024-{1 + k // 28:02d}-{1 + k % 28:02d}" for k in range(rows)],
        "y": 10 + 3 * a - b + 0.3 * rng.normal(size=rows),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("folds")
    table = write(columns(), place / "t.csv")
    return fit_table(prepare(Config(str(table), "y", drop=("customer", "day"), **FIXED)), place / "run")


class TestRuns:
    def test_the_model_is_fitted_to_all_rows(self, run):
        prepared = prepare(run.config)
        assert (run.facts["rows"], run.facts["folds"], prepared.problem.n) == (120, 5, 120)
        again = prepared.method.fit(prepared.problem, seed=0, progress=False)
        x = torch.from_numpy(prepared.data.x)
        torch.testing.assert_close(run.model.posterior.predict(x).mean, again.predict(x).mean)

    def test_every_row_is_predicted_by_a_fit_to_the_other_folds(self, run):
        prepared = prepare(run.config)
        rows, on = run.rows()
        assert on == "cross-validated"
        assert rows.num_rows == 120
        inputs = run.model.inputs(rows)[0]
        found = run.predict_rows(inputs)
        for k, (fitted, predicted) in enumerate(prepared.splits):
            assert (np.array(run.facts["fold_of_row"])[predicted] == k).all()
            alone = prepared.method.fit(prepared.problem_of(fitted), seed=0, progress=False)
            own = prepared.preparation.in_units(alone.predict(torch.from_numpy(inputs[predicted])))
            torch.testing.assert_close(found.mean[predicted], own.mean)

    def test_metrics_are_of_those_predictions(self, run):
        rows, _ = run.rows()
        y = torch.from_numpy(run.model.preparation.target_values(rows))
        found = run.predict_rows(run.model.inputs(rows)[0])
        assert run.figures["log_density"] == pytest.approx(float(found.log_prob(y).mean()), rel=1e-6)
        # Those of the model itself, which has seen the rows, are better.
        assert float(run.model.predict_table(rows).log_prob(y).mean()) > run.figures["log_density"]

    def test_a_loaded_run_is_the_same(self, run):
        again = TableRun.load(run.path)
        inputs = run.model.inputs(run.rows()[0])[0]
        assert torch.equal(again.predict_rows(inputs).mean, run.predict_rows(inputs).mean)
        promised = [guaranteed(one.model, inputs, one.model.predict(inputs)).interval(0.9) for one in (run, again)]
        assert all(torch.equal(a, b) for a, b in zip(*promised))

    def test_the_guarantee_is_measured_on_other_folds(self, run):
        found = run.facts["guarantee"]
        assert found["kind"] == "cross-conformal"
        assert found["rows"] == 120
        assert abs(found["measured"] - 0.9) < 4 * np.sqrt(0.9 * 0.1 / 120)

    def test_new_rows_are_covered_as_promised(self, run):
        new = columns(4000, seed=1)
        inputs = run.model.inputs(read_table(write(new, run.path.parent / "new.csv")))[0]
        lower, upper = guaranteed(run.model, inputs, run.model.predict(inputs)).interval(0.9)
        y = torch.tensor(new["y"])
        coverage = float(((y >= lower) & (y <= upper)).double().mean())
        # The guarantee averages over calibration rows; 120 of them vary by 0.03.
        assert coverage > 0.9 - 3 * 0.03


class TestGroupsAndTimes:
    def test_groups_stay_together_and_are_no_input(self, tmp_path):
        table = write(columns(), tmp_path / "t.csv")
        ready = prepare(Config(str(table), "y", drop=("day",), group="customer", **FIXED))
        assert ready.preparation.names == ("a", "b")
        customers = np.array(columns()["customer"])
        for fitted, predicted in ready.splits:
            assert not set(customers[fitted]) & set(customers[predicted])

    def test_the_latest_rows_are_predicted(self, tmp_path):
        table = write(columns(), tmp_path / "t.csv")
        ready = prepare(Config(str(table), "y", drop=("customer",), time="day", **FIXED))
        ((fitted, predicted),) = ready.splits
        days = np.array(columns()["day"])
        assert max(days[fitted].tolist()) < min(days[predicted].tolist())
        assert len(predicted) == 24

    def test_new_customers_are_harder_than_the_metrics_without_groups_say(self, tmp_path):
        """Each customer has a level of its own, so that rows of known customers are predicted too well."""
        rng = np.random.default_rng(0)
        level = rng.normal(size=20)
        who = np.repeat(np.arange(20), 12)
        known = {"customer": who.astype(float), "city": [f"city {k}" for k in who]}
        table = write(known | {"y": level[who] + 0.05 * rng.normal(size=240)}, tmp_path / "t.csv")
        settings = FIXED | {"hidden": (), "settings": {"steps": 800}}
        errors = {}
        for group in (None, "customer"):
            drop = ("customer",) if group is None else ()
            ready = prepare(Config(str(table), "y", drop=drop, group=group, **settings))
            errors[group] = fit_table(ready, tmp_path / f"run{group}").figures["rmse"]
        assert errors["customer"] > 3 * errors[None]

    @pytest.mark.parametrize(
        "options, words",
        [
            (("--group", "one"), ("--group", "has 1 group")),
            (("--group", "nobody"), ("--group", "no column 'nobody'")),
            (("--time", "a text"), ("--time", "holds 'x'")),
            (("--time", "one"), ("--time", "is the same in all rows")),
            (("--time", "b", "--group", "b"), ("--time", "cannot be given with --group")),
            (("--group", "y"), ("--group", "is the target")),
            (("--target", "y,b", "--group", "b"), ("--group", "'b' is a target")),
            (("--target", "y,b", "--time", "b"), ("--time", "'b' is a target")),
            (("--target", "y,b", "--weight", "b"), ("--weight", "'b' is a target")),
            (("--time", "late"), ("--time", "'late' holds 'soon' in row 4.")),
            (("--time", "count"), ("--time", "'count' holds 'x' in row 2, and no time in 2 rows in all")),
            (("--tune", "luck"), ("--tune", "must be one of")),
            (("--inputs", "luck"), ("--inputs", "must be one of")),
        ],
    )
    def test_bad_input_leaves_nothing_behind(self, tmp_path, options, words):
        rng = np.random.default_rng(0)
        table = write(
            {
                "b": rng.normal(size=60),
                "one": np.ones(60),
                "a text": ["x", "z"] * 30,
                "late": [*(f"2024-01-{k:02d}" for k in (1, 2, 3)), "soon", *["2024-02-01"] * 56],
                "count": ["0", "x", *map(str, range(2, 59)), ""],
                "y": rng.normal(size=60),
            },
            tmp_path / "t.csv",
        )
        refused(call("fit", table, "--target", "y", "--out", tmp_path / "run", *options), *words)
        assert not (tmp_path / "run").exists()


class TestChoices:
    @pytest.fixture
    def quick(self, monkeypatch):
        monkeypatch.setattr(
            "credibly.tables.choices.search.HMC_PILOT",
            {"chains": 2, "warmup": 60, "draws": 30, "thin": 1, "max_steps": 20},
        )
        monkeypatch.setattr(
            "credibly.tables.choices.search.ENSEMBLE_PILOT", {"members": 2, "epochs": 15, "patience": 5}
        )

    def rows(self, y, x=None, rows=240):
        x = np.random.default_rng(1).normal(size=(rows, 2)).astype(np.float32) if x is None else x
        return Rowset(x, y(x.astype(np.float64), np.random.default_rng(2)), (0, 1), Rows(len(x)))

    def test_prices_are_fitted_on_a_log_scale(self, quick):
        data = self.rows(lambda x, rng: np.exp(3 + x[:, 0] + 0.2 * rng.normal(size=len(x))))
        recipe = Recipe(hidden=(8,), noise="learned", method="hmc", prior_scale=1.0)
        best, candidates = choose(recipe, data, fixed=("noise", "prior_scale", "inputs"))
        assert best.transform in ("log", "power")
        assert [one.chosen for one in candidates].count(True) == 1
        assert next(one for one in candidates if one.chosen).score > candidates[0].score + 0.3

    def test_noise_that_changes_is_found(self, quick):
        data = self.rows(lambda x, rng: x[:, 0] + np.exp(1.2 * x[:, 1]) * 0.2 * rng.normal(size=len(x)))
        recipe = Recipe(hidden=(8,), noise="learned", method="hmc", prior_scale=1.0)
        best, _ = choose(recipe, data, fixed=("prior_scale", "inputs", "transform"))
        assert best.noise == "heteroscedastic"

    def test_what_was_given_is_kept(self, tmp_path, quick):
        table = write(columns(), tmp_path / "t.csv")
        config = Config(
            str(table), "y", method="hmc", noise="learned", prior_scale=0.7, hidden=(3,), drop=("customer", "day")
        )
        found = choose_table(prepare(config))
        assert (found.recipe.noise, found.recipe.prior_scale, found.recipe.hidden) == ("learned", 0.7, (3,))
        assert found.config.tune == "none"
        assert len(found.candidates) >= 2

    def test_large_tables_have_embeddings(self, tmp_path, quick, monkeypatch):
        monkeypatch.setattr("credibly.tables.choices.chain_candidates.AFFORDABLE", 1)
        table = write(columns(300), tmp_path / "t.csv")
        found = choose_table(
            prepare(
                Config(
                    str(table), "y", drop=("customer", "day"), settings={"members": 2, "epochs": 2}, method="ensemble"
                )
            )
        )
        assert found.recipe.method == "ensemble"
        assert found.candidates[0].name.startswith("ensemble, 256 and 256 units, periodic embeddings")


def test_the_file_has_both_intervals(run):
    new = run.path.parent / "few.csv"
    write(columns(6, seed=3), new)
    out = run.path.parent / "p.csv"
    assert call("predict", run.path, new, "--out", out, "--level", "0.8,0.9", "--quiet").exit_code == 0
    with open(out, newline="") as handle:
        head = next(csv.reader(handle))
    assert {"lower_80", "upper_80", "bayes_lower_90", "bayes_upper_90"} <= set(head)
    refused(call("predict", run.path, new, "--out", run.path.parent / "q.csv", "--level", "0.999"), "999")
    assert not (run.path.parent / "q.csv").exists()


def test_prediction_sets_of_classes(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=150)
    table = write({"x": x, "kind": np.where(x + 0.3 * rng.normal(size=150) > 0, "up", "down")}, tmp_path / "t.csv")
    words = ("--target", "kind", "--method", "map", "--set", "steps=50", "--hidden", "4", "--quiet")
    with undrawn():
        assert call("fit", table, "--out", tmp_path / "run", *words).exit_code == 0
    assert call("predict", tmp_path / "run", table, "--out", tmp_path / "p.csv", "--quiet").exit_code == 0
    with open(tmp_path / "p.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert {row["set_90"] for row in rows} <= {"up", "down", "down | up"}
    assert json.loads((tmp_path / "run" / "results.json").read_text())["on"] == "cross-validated"
