"""Linear models and small networks among the candidates of a table, and the choice by rows of later times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from credibly.tables.choices import search, table_choice
from credibly.tables.choices.chain_candidates import few_parameters, has_few_parameters
from credibly.tables.choices.changes import changes_of
from credibly.tables.choices.rowset import Rowset
from credibly.tables.choices.search import HMC_PILOT, choose, fit_rows
from credibly.tables.choices.table_choice import choose_table, starting_recipe
from credibly.tables.config import Config
from credibly.tables.prepared import prepare
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import Rows
from own_tables import write

CHAINS = Recipe(hidden=(50,), noise="heteroscedastic", noise_floor=0.1, method="hmc", prior_scale=2.0)
WIDE = Recipe(hidden=(256, 256), method="ensemble", embedding=True, settings={"members": 2})
REST = ("noise", "transform", "inputs", "prior_scale")


def rows(count=120, columns=2, times=True, y=None):
    """Random inputs; the first is the time."""
    x = np.random.default_rng(0).normal(size=(count, columns)).astype(np.float32)
    x[:, 0] = np.linspace(-1.7, 1.7, count)
    y = x[:, 0].astype(np.float64) + 3 if y is None else y
    return Rowset(x, y, (0,), Rows(count, times=x[:, 0] if times else None))


def names(recipe, data, fixed=()):
    return [name for name, _ in few_parameters(recipe, data, fixed)]


class TestCandidates:
    def test_which_tables_have_them(self):
        counts = np.arange(120) % 5
        assert not names(CHAINS, rows(times=False))
        assert not names(WIDE, rows(times=False))
        assert names(CHAINS, rows(), REST) == ["HMC, linear model"]
        assert names(dataclasses.replace(WIDE, task="counts"), rows(times=False, y=counts)) == [
            "HMC, linear model",
            "HMC, 16 units",
        ]
        found = few_parameters(CHAINS, rows(), ("prior_scale", "transform"))
        assert {(one.noise, one.inputs) for _, one in found} == {
            (noise, kind) for noise in ("learned", "heteroscedastic") for kind in ("standard", "clipped")
        }

    def test_what_was_given_is_kept(self):
        for field in ("hidden", "embedding"):
            assert not names(CHAINS, rows(), (field,))
        for field in ("hidden", "embedding", "method", "settings"):
            assert not names(WIDE, rows(), (field,))
        assert names(CHAINS, rows(), ("method", "settings"))

    def test_not_where_chains_would_take_too_long(self):
        """Without the compiled sampler an eighth of the rows times parameters is affordable."""
        real, counted = rows(40_000, 20), rows(40_000, 20, y=np.arange(40_000) % 5)
        assert names(WIDE, real)
        assert not names(dataclasses.replace(WIDE, task="counts"), counted)

    def test_they_are_sampled(self):
        ((_, line), (_, small)) = few_parameters(
            dataclasses.replace(WIDE, task="survival"), rows(times=False, y=np.ones(120)), ()
        )
        assert (line.method, line.hidden, line.embedding) == ("hmc", (), False)
        assert small.hidden == (16,)
        assert has_few_parameters(line)
        assert has_few_parameters(small)
        assert not has_few_parameters(CHAINS)
        line.fitter(120, 3)

    def test_lines_in_time_are_not_lines_in_ranks(self):
        lines = dataclasses.replace(CHAINS, hidden=())
        for start, times, quantile in ((CHAINS, True, True), (lines, True, False), (lines, False, True)):
            tried = [name for change in changes_of(start, rows(times=times), ()) for name, _ in change(start)]
            assert ("inputs quantile" in tried) == quantile


class TestLaterRows:
    def test_a_trend_is_continued(self):
        """Later rows lie a fifth to a half of the earlier range beyond it, where the last level is off by 1 to 2.3."""
        rng = np.random.default_rng(1)
        data = rows(150)
        data = dataclasses.replace(data, y=2 * data.x[:, 0] + 0.1 * rng.normal(size=150))
        earlier, later = data.at(np.arange(100)), data.at(np.arange(120, 150))
        quick = {**HMC_PILOT, "chains": 2}
        best, _ = choose(dataclasses.replace(CHAINS, settings=quick), earlier, fixed=("transform", "prior_scale"))
        posterior, restore, encode = fit_rows(dataclasses.replace(best, settings=quick), earlier, 0)
        found = restore(posterior.predict(torch.from_numpy(encode(later.x))))
        # Four standard deviations of the noise: the error of the slope adds about one.
        assert (found.mean.numpy() - later.y).std() < 0.2
        assert abs(float((found.mean.numpy() - later.y).mean())) < 0.4

    @pytest.mark.parametrize("gains, chosen", [((0.2, 0.2, 0.2, 0.2), True), ((0.9, -0.1, 0.0, -0.1), False)])
    def test_a_network_has_to_be_better_by_more_than_chance_between_folds(self, monkeypatch, gains, chosen):
        """Rows of one fold share its extrapolation: the mean gain is about as large, but of one fold."""
        parts = []

        def densities(recipe, data, fitted, predicted, seed):
            if recipe.prior_scale == 4.0:
                parts.append(len(predicted))
                return np.full(len(predicted), gains[len(parts) - 1])
            return np.zeros(len(predicted))

        monkeypatch.setattr(search, "_densities", densities)
        monkeypatch.setattr(search, "_bar", lambda new, old: 0.25)
        monkeypatch.setattr("credibly.tables.choices.changes.SCALES", (2.0, 4.0))
        best, _ = choose(CHAINS, rows(), fixed=("hidden", "noise", "transform", "inputs"))
        assert (best.scale == 4.0) == chosen
        assert len(parts) == 4

    def test_of_two_that_extrapolate_as_well_the_one_with_few_parameters(self, monkeypatch):
        def densities(recipe, data, fitted, predicted, seed):
            gain = 0.01 if not recipe.hidden else 0.0
            return gain + np.random.default_rng(len(fitted) + 7 * len(recipe.hidden)).normal(size=len(predicted)) * 1e-3

        monkeypatch.setattr(search, "_densities", densities)
        assert choose(CHAINS, rows(), fixed=REST)[0].hidden == ()


def test_a_small_network_may_replace_an_ensemble(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=90)
    table = write({"x": x, "n": rng.poisson(np.exp(0.5 * x))}, tmp_path / "counts.csv")
    config = Config(str(table), "n", task="counts")
    assert starting_recipe(prepare(config))[0].method == "ensemble"

    def densities(recipe, data, fitted, predicted, seed):
        return np.full(len(predicted), float(recipe.method == "hmc" and not recipe.hidden))

    monkeypatch.setattr(search, "_densities", densities)
    planned = {"plan_chains": lambda found: type("Plan", (), {"settings": {"thin": 2}, "attainable": True})()}
    for name, value in planned.items():
        monkeypatch.setattr(table_choice, name, value)
    found = choose_table(prepare(config))
    assert (found.recipe.method, found.recipe.hidden) == ("hmc", ())
    assert found.why.startswith("a small linear model sampled by HMC predicts")
    kept = choose_table(prepare(dataclasses.replace(config, method="ensemble")))
    assert kept.recipe.method == "ensemble"
