"""Chains of tables: as long as their diagnostics need, other methods where that takes too long, and noise floors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import credibly as cr
from credibly.errors import InputError
from credibly.likelihoods import HeteroscedasticGaussian
from credibly.tables.choices import chain_plan, search, smooth_candidate, table_choice
from credibly.tables.choices.array_table import ArrayTable, ArrayTargets
from credibly.tables.choices.chain_plan import ChainPlan, plan_chains
from credibly.tables.choices.changes import MANY, UNSTOPPED, changes_of
from credibly.tables.choices.fallback import Comparison, FoldFits, compare
from credibly.tables.choices.rowset import Rowset
from credibly.tables.choices.search import choose
from credibly.tables.choices.table_choice import choose_table, small_ensemble, starting_recipe
from credibly.tables.config import Config, read_config, write_config
from credibly.tables.folds import fit_folds, fold_method
from credibly.tables.prepared import prepare
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import Rows
from own_tables import write

QUICK = {**search.HMC_PILOT, "chains": 2, "warmup": 60, "draws": 30, "max_steps": 20}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=120), rng.normal(size=120)
    values = {"a": a, "b": b, "y": 10 + 3 * a - b + 0.3 * rng.normal(size=120)}
    return write(values, tmp_path_factory.mktemp("plan") / "t.csv")


@pytest.fixture(scope="module")
def linear(table):
    """Chains of a linear model, which mix at once."""
    config = Config(str(table), "y", method="hmc", hidden=(), tune="none", settings={"warmup": 60, "max_steps": 40})
    return prepare(config)


class TestFloor:
    def test_density_is_that_of_the_sum_of_variances(self):
        output = torch.tensor([[0.3, -4.0], [-1.0, 2.0]], dtype=torch.float64)
        y = torch.tensor([[0.5], [0.1]], dtype=torch.float64)
        variance = 0.2**2 + output[:, 1].exp()
        expected = torch.distributions.Normal(output[:, 0], variance.sqrt()).log_prob(y[:, 0])
        found = HeteroscedasticGaussian(floor=0.2).log_prob(output, y, {})
        assert torch.allclose(found.reshape(-1), expected, rtol=1e-12)

    def test_density_of_an_exact_prediction_is_bounded(self):
        output, y = torch.tensor([[0.5, -80.0]]), torch.tensor([[0.5]])
        limit = -math.log(0.1) - 0.5 * math.log(2 * math.pi)
        assert float(HeteroscedasticGaussian(floor=0.1).log_prob(output, y, {})) == pytest.approx(limit, rel=1e-5)
        assert float(HeteroscedasticGaussian().log_prob(output, y, {})) > 30

    def test_no_floor_is_what_it_was(self):
        output = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
        loc, scale = HeteroscedasticGaussian().location_scale(output, {})
        assert torch.equal(scale, torch.exp(0.5 * output[:, 1:]))
        assert torch.equal(loc, output[:, :1])

    @pytest.mark.parametrize("floor", [-0.1, math.nan])
    def test_bad_floors_are_refused(self, floor):
        with pytest.raises(InputError, match="floor"):
            HeteroscedasticGaussian(floor=floor)
        with pytest.raises(InputError, match="noise_floor"):
            Recipe(noise="heteroscedastic", noise_floor=floor)

    def test_it_is_stored_with_the_settings(self, tmp_path, table):
        config = Config(str(table), "y", noise="heteroscedastic", noise_floor=0.03)
        (tmp_path / "c.toml").write_text(write_config(config))
        assert Config(**read_config(tmp_path / "c.toml")).recipe("regression").noise_floor == 0.03
        assert config.recipe("regression").likelihood() == HeteroscedasticGaussian(floor=0.03)

    def test_a_saved_posterior_keeps_it(self, tmp_path):
        x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
        problem = cr.Problem(
            torch.nn.Linear(2, 2), (x, x[:, :1]), HeteroscedasticGaussian(floor=0.3), cr.priors.Normal(1.0)
        )
        posterior = cr.MAP(steps=5).fit(problem, progress=False)
        posterior.save(tmp_path / "saved")
        assert cr.load(tmp_path / "saved").predict(x).likelihood.floor == 0.3

    def test_small_noise_lowers_it_and_repeated_values_do_not(self, monkeypatch):
        monkeypatch.setattr(search, "HMC_PILOT", {**QUICK, "warmup": 150, "max_steps": 60})
        rng = np.random.default_rng(1)
        x = rng.normal(size=(150, 1)).astype(np.float32)
        recipe = Recipe(hidden=(), noise="heteroscedastic", noise_floor=0.1, prior_scale=2.0, method="hmc")
        fixed = ("prior_scale", "transform", "inputs")
        exact = 2.0 * x[:, 0].astype(np.float64) + 0.02 * rng.normal(size=150)
        best, _ = choose(recipe, Rowset(x, exact, (), Rows(150)), fixed=fixed)
        assert best.noise_floor < 0.1 or best.noise == "learned"
        loud = x[:, 0] + rng.normal(size=150)
        best, _ = choose(recipe, Rowset(x, loud, (), Rows(150)), fixed=fixed)
        assert best.noise_floor == 0.1


class TestPlan:
    def test_there_is_time_for_chains_of_a_linear_model(self, linear):
        plan = plan_chains(linear)
        assert plan.attainable
        assert plan.effective > 100
        # About eighty seconds of work hold millions of these iterations.
        assert plan.settings["until"] == "mixed"
        assert int(plan.settings["budget"].removesuffix(" iterations")) > 10_000

    def test_less_work_shortens_chains_and_then_refuses_them(self, linear, monkeypatch):
        before = plan_chains(linear)
        monkeypatch.setattr(chain_plan, "WORK", chain_plan.WORK * before.times / 2)
        # The same trial as before, which less work would have shortened.
        monkeypatch.setattr(chain_plan, "TRIAL_STEPS", (5_000, 5_000))
        after = plan_chains(linear)
        assert after.times == pytest.approx(2, rel=1e-6)
        assert not after.attainable

    def test_more_draws_need_longer_chains(self, linear, monkeypatch):
        thin = []
        for wanted in (4, 4_000, 40_000):
            monkeypatch.setattr(chain_plan, "ESS_TOTAL", wanted)
            thin.append(plan_chains(linear).settings["thin"])
        assert thin[0] == 1
        assert thin[2] == pytest.approx(10 * thin[1], abs=10)

    def test_trajectories_that_take_too_long_become_short_ones(self, linear, monkeypatch):
        whole = plan_chains(linear)
        assert (whole.settings["trajectory_length"], whole.settings["mass"]) == (None, "diagonal")
        monkeypatch.setattr(chain_plan, "TRIAL_STEPS", (1, 1))
        short = plan_chains(linear)
        assert list(short.settings) == ["thin"]
        assert not short.attainable

    def test_without_the_output_layer_if_only_that_mixes_in_time(self, table, monkeypatch):
        """The first trial is made to look slow; the second one is without the output layer."""
        config = Config(str(table), "y", method="hmc", hidden=(4,), tune="none", settings={"warmup": 60})
        prepared = prepare(config)
        monkeypatch.setattr(chain_plan, "TRIAL", chain_plan.TRIAL | {"warmup": 60, "draws": 20})
        costs = {False: 1e9, True: 1e4}
        monkeypatch.setattr(chain_plan._Trial, "cost", lambda self, problem: costs[self.collapse])
        plan = plan_chains(prepared)
        assert plan.attainable
        assert plan.settings["collapse"]
        costs[True] = 1e9
        assert not plan_chains(prepared).settings.get("collapse")
        given = dataclasses.replace(config, settings={**config.settings, "collapse": False})
        costs[True] = 1e4
        assert not plan_chains(prepare(given)).attainable
        given = dataclasses.replace(config, settings={**config.settings, "collapse": True})
        costs[False] = 1e4
        costs[True] = 1e9
        assert not plan_chains(prepare(given)).attainable  # the trial is of the density that was asked for

    def test_folds_of_whole_trajectories_are_short(self, linear):
        method = dataclasses.replace(linear.method, **chain_plan.WHOLE, thin=9)
        found = fold_method(method, 5)
        assert (found.warmup, found.draws, found.thin) == (100, 62, 1)
        assert fold_method(method, 1) is method

    @pytest.mark.parametrize("kind", [cr.HMC, cr.SGHMC])
    def test_folds_and_the_trial_do_not_run_until_mixed(self, linear, kind):
        method = kind(until="mixed", budget="10min")
        found = fold_method(method, 5)
        assert (found.until, found.budget) == (None, None)
        assert fold_method(method, 1) is method
        trial = dataclasses.replace(cr.HMC(until="mixed", budget="10min"), **chain_plan.TRIAL)
        assert (trial.until, trial.budget) == (None, None)


class TestFallback:
    @pytest.fixture
    def quick(self, monkeypatch):
        monkeypatch.setattr(search, "HMC_PILOT", QUICK)
        monkeypatch.setattr(search, "ENSEMBLE_PILOT", {"members": 2, "epochs": 3, "patience": 2})
        monkeypatch.setattr(table_choice, "SMALL_EPOCHS", (3, 3))
        monkeypatch.setattr(smooth_candidate, "affordable_members", lambda rows, inputs, cost=1.0: 0)

    def choice(self, table, monkeypatch, times, difference=0.1, **options):
        monkeypatch.setattr(table_choice, "compare", lambda *_, **__: Comparison(difference, 0.06))
        plan = ChainPlan({"thin": 7, "target_accept": 0.95}, effective=5.0, times=times)
        monkeypatch.setattr(table_choice, "plan_chains", lambda prepared: plan)
        given = {"inputs": "standard", "transform": "none", "prior_scale": 1.0, "noise": "learned"} | options
        return choose_table(prepare(Config(str(table), "y", **given)))

    def test_a_plan_sets_the_chains(self, table, quick, monkeypatch):
        found = self.choice(table, monkeypatch, 0.5)
        assert (found.method.name, found.method.thin, found.method.target_accept) == ("hmc", 7, 0.95)

    def test_chains_that_would_not_mix_become_an_ensemble(self, table, quick, monkeypatch):
        found = self.choice(table, monkeypatch, 3.25)
        assert found.method.name == "ensemble"
        assert (found.method.schedule, found.method.patience) == ("cosine", UNSTOPPED)
        assert "3.2 times" in found.why
        assert "5 effective draws" in found.why
        assert [one.chosen for one in found.candidates].count(True) == 1

    @pytest.mark.parametrize(
        "given, expected",
        [
            ({}, ("mixed", "700 iterations")),
            ({"until": "mixed"}, ("mixed", None)),
            ({"until": "mixed", "budget": "2min"}, ("mixed", "2min")),
        ],
    )
    def test_the_budget_is_that_of_the_user_or_of_the_plan(self, table, quick, monkeypatch, given, expected):
        plan = ChainPlan({"until": "mixed", "budget": "700 iterations"}, effective=5.0, times=0.5)
        monkeypatch.setattr(table_choice, "plan_chains", lambda prepared: plan)
        fixed = {"inputs": "standard", "transform": "none", "prior_scale": 1.0, "noise": "learned"}
        found = choose_table(prepare(Config(str(table), "y", settings=given, **fixed)))
        assert (found.method.until, found.method.budget) == expected

    @pytest.mark.parametrize("difference, name", [(-0.11, "ensemble"), (-0.13, "hmc")])
    def test_an_ensemble_that_predicts_worse_replaces_nothing(self, table, quick, monkeypatch, difference, name):
        found = self.choice(table, monkeypatch, 3.25, difference)
        assert found.method.name == name
        assert f"{difference:+.3f} ± 0.060" in found.why
        best = [one.name for one in found.candidates if one.chosen]
        assert len(best) == 1
        assert ("HMC" in best[0]) == (name == "hmc")

    def test_an_ensemble_that_is_far_behind_on_one_fold_is_not_chosen_any_further(self, table, quick, monkeypatch):
        found = self.choice(table, monkeypatch, 3.25, -0.3)
        assert found.method.name == "hmc"
        assert "-0.300 ± 0.060" in found.why
        assert not any("ensemble" in one.name for one in found.candidates)

    @pytest.mark.parametrize("given", [{"method": "hmc"}, {"settings": {"jitter": 0.1}}])
    def test_hmc_that_was_asked_for_stays(self, table, quick, monkeypatch, given):
        found = self.choice(table, monkeypatch, 3.25, **given)
        assert (found.method.name, found.method.thin) == ("hmc", 7)

    def test_lengths_that_were_given_stay(self, table, quick, monkeypatch):
        found = self.choice(table, monkeypatch, 3.25, settings={"thin": 2})
        assert (found.method.name, found.method.thin) == ("hmc", 2)

    def test_the_comparison_finds_who_predicts_better(self, table):
        chains = prepare(Config(str(table), "y", method="hmc", hidden=(), tune="none", settings=QUICK))
        untrained = {"members": 2, "steps": 1, "lr": 1e-6, "prior": False, "anchored": False}
        ensemble = prepare(Config(str(table), "y", method="ensemble", hidden=(), tune="none", settings=untrained))
        ours, theirs = FoldFits(chains), FoldFits(ensemble)
        assert compare(ours, ours) == Comparison(0.0, 0.0)
        worse, better = compare(ours, theirs), compare(theirs, ours)
        assert worse.difference < -0.5
        assert not worse.replaces
        assert worse.hopeless
        assert better.replaces
        assert better == Comparison(-worse.difference, pytest.approx(worse.error))
        assert sorted(ours.for_final_fit()) == [0, 1, 2]
        assert not theirs.for_final_fit()

    def test_later_rows_are_compared_several_times_over(self, table):
        """With times there is one split instead of folds, and its comparison would depend on one extrapolation."""
        config = Config(str(table), "y", time="a", method="map", hidden=(), tune="none", settings={"steps": 5})
        fits, others = FoldFits(prepare(config)), FoldFits(prepare(config))
        assert compare(fits, others) == Comparison(0.0, 0.0)
        assert sorted(fits.posteriors) == [0, 1, 2]

    def test_fits_to_folds_are_those_of_the_final_fit(self, table, tmp_path):
        chains = prepare(Config(str(table), "y", method="hmc", hidden=(), tune="none", settings=QUICK))
        fits = FoldFits(chains)
        fits.densities(1)
        kept = dataclasses.replace(chains, fold_fits=fits.for_final_fit())
        for name, one in (("anew", chains), ("kept", kept)):
            (tmp_path / name).mkdir()
            fit_folds(one, tmp_path / name, progress=False)
        x = torch.from_numpy(chains.data.x)
        for k in range(len(chains.splits)):
            anew, again = (cr.load(tmp_path / name / "folds" / str(k)).predict(x).mean for name in ("anew", "kept"))
            assert torch.equal(anew, again)

    def test_the_ensemble_keeps_the_choices_of_the_user(self, table):
        prepared = prepare(Config(str(table), "y", hidden=(6,), embedding=False))
        chosen = dataclasses.replace(starting_recipe(prepared)[0], transform="log")
        made = small_ensemble(prepared, chosen)
        assert (made.hidden, made.embedding, made.transform, made.noise_floor) == ((6,), False, "log", 0.0)
        assert made.settings["batch_size"] <= 4 * 96 // 5


class TestRacing:
    def test_a_candidate_that_is_clearly_worse_is_not_fitted_to_every_fold(self, monkeypatch):
        rng = np.random.default_rng(0)
        fitted = []

        def densities(recipe, data, train, test, seed):
            fitted.append(recipe.noise)
            level = {"learned": -5.0, "heteroscedastic": 0.0}[recipe.noise]
            return level + np.random.default_rng(len(test) + len(fitted) % 4).normal(size=len(test))

        monkeypatch.setattr(search, "_densities", densities)
        x = rng.normal(size=(200, 1)).astype(np.float32)
        recipe = Recipe(hidden=(), noise="heteroscedastic", method="hmc")
        fixed = ("prior_scale", "transform", "inputs")
        best, found = choose(recipe, Rowset(x, x[:, 0].astype(np.float64), (), Rows(200)), fixed=fixed)
        assert best.noise == "heteroscedastic"
        assert (fitted.count("heteroscedastic"), fitted.count("learned")) == (4, 1)
        assert found[1].score == pytest.approx(found[0].score - 5, abs=6 * math.sqrt(2 / 50))
        assert [one.chosen for one in found] == [True, False]


LONG = {"members": 2, "epochs": 30, "schedule": "constant", "validation": 0.1, "patience": 5, "batch_size": 64}


class TestSmallTables:
    """The search trains on 0.675 of the rows, fewer than the fits that the batch size is chosen for."""

    def start(self, x, y, task):
        data = Rowset(x, y, (0, 1), Rows(len(x)))
        config = Config("X", "y", task=task, method="ensemble", hidden=(4,), settings={"members": 1, "epochs": 2})
        recipe, _ = starting_recipe(ArrayTable(config, data, ArrayTargets.of(task, y)))
        return recipe, data

    @pytest.mark.parametrize("task", ["regression", "counts"])
    def test_batches_fit_into_the_rows_that_a_candidate_trains_on(self, monkeypatch, task):
        monkeypatch.setattr(search, "ENSEMBLE_PILOT", {"members": 1, "epochs": 2, "patience": 2})
        rng = np.random.default_rng(0)
        x = rng.normal(size=(120, 2)).astype(np.float32)
        recipe, data = self.start(x, rng.poisson(3, 120).astype(np.float64), task)
        assert recipe.settings["batch_size"] == 96
        _, candidates = choose(recipe, data)
        assert len(candidates) > 2
        assert all(math.isfinite(one.score) for one in candidates)

    def test_invalid_settings_of_the_starting_candidate_are_reported(self, monkeypatch):
        monkeypatch.setattr(search, "ENSEMBLE_PILOT", {"members": 1, "epochs": 2, "patience": 2})
        rng = np.random.default_rng(0)
        x = rng.normal(size=(60, 2)).astype(np.float32)
        recipe, data = self.start(x, x[:, 0].astype(np.float64), "regression")
        wrong = {**recipe.settings, "validation": 0.999}
        with pytest.raises(InputError, match="validation must leave rows"):
            choose(dataclasses.replace(recipe, settings=wrong), data)

    def test_the_ensemble_that_is_compared_with_chains_has_smaller_batches(self, table):
        settings = {"members": 1, "epochs": 1, "batch_size": 100, "validation": 0.1}
        config = Config(str(table), "y", method="ensemble", hidden=(), tune="none", holdout=0.0, settings=settings)
        assert np.isfinite(FoldFits(prepare(config)).densities(0)).all()


class TestSmooth:
    def test_only_numbers_have_it_and_what_is_given_is_kept(self):
        x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
        made = []
        for task, y, fixed in (
            ("regression", x[:, 0].astype(np.float64), ("transform",)),
            ("regression", x[:, 0].astype(np.float64), ("noise", "transform", "inputs", "prior_scale")),
            ("counts", np.arange(200) % 7, ("noise", "transform", "inputs")),
            ("regression", x[:, 0].astype(np.float64), ("transform", "settings")),
        ):
            noise = "learned" if task == "counts" else "student"
            start = Recipe(
                task, (256, 256), noise=noise, method="ensemble", embedding=True, settings=LONG, prior_scale=3.0
            )
            recipe = dataclasses.replace(start, inputs="quantile")
            variants = changes_of(recipe, Rowset(x, y, (0, 1), Rows(200)), fixed)
            made.append([one for change in variants for name, one in change(recipe) if "smooth" in name])
        (free,) = made[0]
        assert (free.hidden, free.embedding, free.inputs, free.scale) == ((16, 16), False, "standard", 2.0)
        assert free.settings["members"] == 10
        free.fitter(200, 300)
        (given,) = made[1]
        assert (given.noise, given.inputs, given.scale) == ("student", "quantile", 3.0)
        assert made[2:] == [[], []]

    def test_it_has_to_gain_clearly_where_short_fits_leave_rows_out(self, monkeypatch):
        """On 6,000 rows the margin is log(6,000 / 4,000) / 2 = 0.20 nats."""
        noise = np.random.default_rng(1).normal(size=6_000)
        recipe = Recipe(hidden=(256, 256), method="ensemble", embedding=True, settings=LONG)
        found = []
        for rows, gain in ((2_000, 0.1), (6_000, 0.1), (6_000, 0.4)):
            x = np.random.default_rng(0).normal(size=(rows, 2)).astype(np.float32)

            def densities(recipe, data, train, test, seed, gain=gain):
                smooth = recipe.hidden == (16, 16)
                noisy = noise[test] * (1 + smooth)
                return noisy - noisy.mean() + gain * smooth

            monkeypatch.setattr(search, "_densities", densities)
            data = Rowset(x, x[:, 0].astype(np.float64), (0, 1), Rows(rows))
            best, _ = choose(recipe, data, fixed=("noise", "transform", "inputs"))
            found.append(best.hidden)
        assert found == [(16, 16), (256, 256), (16, 16)]


def test_many_rows_may_train_with_a_falling_learning_rate(monkeypatch):
    monkeypatch.setattr(search, "ENSEMBLE_PILOT", {"members": 1, "epochs": 1, "patience": 1})
    monkeypatch.setattr(search, "ROWS", 60)
    rng = np.random.default_rng(0)
    settings = {"members": 1, "epochs": 2, "schedule": "constant", "validation": 0.1, "patience": 1, "batch_size": 16}
    recipe = Recipe(hidden=(2,), method="ensemble", settings=settings)
    fixed = ("noise", "transform", "inputs", "embedding")
    names = []
    for rows in (MANY, MANY + 1):
        x = rng.normal(size=(rows, 1)).astype(np.float32)
        _, candidates = choose(recipe, Rowset(x, x[:, 0].astype(np.float64), (), Rows(rows)), fixed=fixed)
        names.append([one.name for one in candidates])
    assert "falling learning rate" not in names[0]
    assert "falling learning rate" in names[1]
