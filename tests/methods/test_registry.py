"""A new method is one class and one entry in METHODS: every part of the package finds it there."""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.cli.options import _method_list, _methods
from credibly.demo.fits import TASKS, demo_settings, run_demo
from credibly.demo.page import demo_page
from credibly.inference.method import Fit, initial
from credibly.inference.training.method import TrainingMethod
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.report import render
from credibly.tables.recipe import Recipe, settings_for
from own_tables import RUN_FILES, call, diabetes, names, read, write

X, Y = randn(30, 3), randn(30, 3).sum(1)


@dataclass(frozen=True, kw_only=True)
class Throwaway(TrainingMethod[DrawsPosterior]):
    """Jittered copies of the initial weights, a stand-in for a new method.

    A second paragraph, which no list shows.
    """

    name: ClassVar[str] = "throwaway"
    label: ClassVar[str] = "Throw-away"
    copies: int = 3
    width: float = 0.1

    def _fit(self, fit: Fit) -> DrawsPosterior:
        start = initial(fit.problem, "network", self.copies, fit.seed)
        noise = randn(*start.shape, seed=fit.seed).to(start)
        record = fit.record({"copies": self.copies})
        return DrawsPosterior(Model.of(fit.problem), (start + self.width * noise).unsqueeze(1), record)

    @classmethod
    def table_settings(cls, layers, noise):
        return {"copies": 4 + layers, "width": 0.2 if noise == "heteroscedastic" else 0.05}

    @classmethod
    def demo_settings(cls, quick):
        return {"copies": 2 if quick else 20}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(cr.METHODS, "throwaway", Throwaway)


def problem():
    return cr.Problem(mlp(3, 6, 1), data=(X, Y), likelihood=cr.likelihoods.Gaussian(), prior=cr.priors.Normal())


@pytest.fixture
def table(tmp_path):
    return write(diabetes(80), tmp_path / "house.csv")


def test_a_posterior_is_saved_and_loaded(tmp_path):
    posterior = Throwaway().fit(problem(), seed=3, out=tmp_path / "by fit")
    posterior.save(tmp_path / "by save")
    for folder in ("by fit", "by save"):
        loaded = cr.load(tmp_path / folder, mlp(3, 6, 1, seed=8))
        assert torch.equal(loaded.draws, posterior.draws)
        assert torch.equal(loaded.predict(X).log_prob(Y), posterior.predict(X).log_prob(Y))
        assert loaded.record == posterior.record
        assert loaded.record.method == "throwaway"
        assert loaded.record.settings["copies"] == 3


def test_the_command_line_lists_and_completes_it():
    found = call("methods", "--json")
    assert found.exit_code == 0, found.output
    rows = {row["name"]: row for row in json.loads(found.stdout)}
    assert list(rows) == list(cr.METHODS)
    assert rows["throwaway"] == {
        "name": "throwaway",
        "class": "Throwaway",
        "description": "Jittered copies of the initial weights, a stand-in for a new method",
    }
    assert "throwaway" in call("methods").stdout
    assert _methods("thr") == ["throwaway"]
    assert _method_list("map,thr") == ["map,throwaway"]


@pytest.mark.usefixtures("no_drawing")
def test_a_table_is_fitted_and_predicted_from_the_run_folder(table, tmp_path):
    run, out = tmp_path / "run", tmp_path / "predictions.csv"
    found = call("fit", table, "--target", "progress", "--out", run, "--method", "throwaway", "--set", "width=0.01")
    assert found.exit_code == 0, found.output
    assert "Method: throwaway" in found.stdout
    assert names(run) == RUN_FILES
    record = cr.load(run / "posterior").record
    assert record.method == json.loads((run / "results.json").read_text())["method"] == "throwaway"
    # From the method's table settings, and from --set.
    assert (record.settings["copies"], record.settings["width"]) == (5, 0.01)
    assert Throwaway.title() in (run / "report.html").read_text()
    found = call("predict", run, table, "--out", out)
    assert found.exit_code == 0, found.output
    rows = read(out)
    assert np.isfinite(rows["mean"]).all()
    assert (rows["std_epistemic"] > 0).all()
    assert len(rows["mean"]) == 80


@pytest.mark.usefixtures("no_drawing")
def test_it_is_compared_with_another_method(table, tmp_path):
    out = tmp_path / "comparison"
    words = ("--methods", "map,throwaway", "--set", "map.steps=20", "--set", "throwaway.copies=2", "--hidden", "4")
    found = call("compare", table, "--target", "progress", "--out", out, *words)
    assert found.exit_code == 0, found.output
    assert list(json.loads((out / "results.json").read_text())["methods"]) == ["map", "throwaway"]
    assert names(out / "throwaway") == [file for file in RUN_FILES if file != "folds"]
    assert Throwaway.title() in (out / "index.html").read_text()


def test_the_demo_runs_it_with_its_own_settings():
    assert (demo_settings("throwaway"), demo_settings("throwaway", quick=True)) == ({"copies": 20}, {"copies": 2})
    result = run_demo(["throwaway"], quick=True)
    assert result.methods == ("throwaway",)
    for task in TASKS:
        assert len(result.posteriors[task]["throwaway"].draws) == 2
        assert all(np.isfinite(value) for value in result.figures[task]["throwaway"].values())
    assert Throwaway.title() in render(demo_page(result))


def test_an_estimator_uses_it():
    assert settings_for("throwaway", 2, "heteroscedastic") == {"copies": 6, "width": 0.2}
    assert Recipe(method="throwaway", hidden=(4, 4)).fitter(30, 10).copies == 6
    model = cr.BayesianRegressor(method="throwaway", hidden=(4,), settings={"width": 0.01}).fit(X.numpy(), Y.numpy())
    assert model.posterior_.record.method == "throwaway"
    assert model.posterior_.record.settings["copies"] == 5
    mean, std = model.predict(X.numpy(), return_std=True)
    assert np.isfinite(mean).all()
    assert (std > 0).all()


def test_a_label_is_optional():
    assert Throwaway.short_name() == "Throw-away"
    assert cr.MAP.short_name() == "MAP"
