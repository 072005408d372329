"""Tuning of the prior scale, the noise and the width on training rows: the right choice where the truth is known."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import credibly as cr
from credibly.cli import app
from credibly.errors import InputError
from credibly.tables import tuning
from credibly.tables.choices import search
from credibly.tables.choices.estimator_choice import tuning_rule
from credibly.tables.choices.table_choice import choose_table
from credibly.tables.config import Config
from credibly.tables.prepared import prepare
from credibly.tables.recipe import Recipe
from credibly.tables.tuning import SCALES, tune
from own_tables import write


@pytest.fixture
def brief(monkeypatch):
    """Short fits, for claims that do not depend on how well they are trained."""
    for settings in (tuning.SETTINGS, tuning.POINT):
        monkeypatch.setitem(settings, "steps", 60)


def wave(rows, noise, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (rows, 1))
    return x.astype(np.float32), x, rng


@pytest.mark.nightly
def test_noise_that_depends_on_the_input_is_found():
    x, raw, rng = wave(400, None)
    steady = np.sin(2 * raw[:, 0]) + 0.3 * rng.normal(size=400)
    growing = np.sin(2 * raw[:, 0]) + np.exp(raw[:, 0]) * 0.3 * rng.normal(size=400)
    recipe = Recipe(hidden=(16,))
    assert tune(recipe, x, growing, scale=False)[0].noise == "heteroscedastic"
    assert tune(recipe, x, steady, scale=False)[0].noise == "learned"


@pytest.mark.nightly
def test_a_steep_function_takes_a_wide_prior():
    x, raw, rng = wave(300, 0.05)
    chosen, trials = tune(Recipe(hidden=(30,)), x, np.sin(6 * raw[:, 0]) + 0.05 * rng.normal(size=300), noise=False)
    assert chosen.prior_scale == SCALES[-1]
    assert [t.prior_scale for t in trials] == list(SCALES)
    assert trials[-1].score > trials[0].score


def test_only_what_is_requested_is_tuned(brief):
    x, raw, rng = wave(40, 0.1)
    y = raw[:, 0] + 0.1 * rng.normal(size=40)
    recipe = Recipe(hidden=(4,), noise="student", prior_scale=0.5)
    assert tune(recipe, x, y, scale=False, noise=False) == (recipe, ())
    chosen, _ = tune(recipe, x, y, noise=False)
    assert chosen.noise == "student"
    labels = (raw[:, 0] > 0).astype(np.int64)
    chosen, trials = tune(Recipe(task="classification", hidden=(4,)), x, labels, classes=2)
    assert {t.noise for t in trials} == {"learned"}
    assert chosen.prior_scale in SCALES


def test_the_same_seed_gives_the_same_choice_and_progress_is_reported(brief):
    x, raw, rng = wave(40, 0.1)
    y = raw[:, 0] + 0.1 * rng.normal(size=40)
    seen = []
    first = tune(Recipe(hidden=(4,)), x, y, seed=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, len(SCALES) + 1) for i in range(1, len(SCALES) + 2)]
    again = tune(Recipe(hidden=(4,)), x, y, seed=1)
    assert first == again
    assert first[1][0].score == pytest.approx(again[1][0].score, abs=0)


def line(rows, weights, noise, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, len(weights)))
    return x.astype(np.float32), (x @ weights + 0.4 + noise * rng.normal(size=rows)).astype(np.float32)


def exact(x, y, scale, noise):
    """Return log evidence per row and posterior covariance of the linear model of a recipe without hidden layers."""
    design = torch.cat([torch.from_numpy(x), torch.ones(len(x), 1)], 1).double()
    prior = torch.tensor([scale**2 / x.shape[1]] * x.shape[1] + [scale**2], dtype=torch.float64)
    covariance = design * prior @ design.T + noise**2 * torch.eye(len(x), dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
    precision = design.T @ design / noise**2 + torch.diag(1 / prior)
    gap = 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision))  # of the best mean-field Gaussian
    return float(marginal.log_prob(torch.from_numpy(y).double())) / len(x), float(gap) / len(x)


@pytest.mark.parametrize(
    "weights, best", [((0.3, -0.2), 1.0), pytest.param((3.0, -2.5), 4.0, marks=pytest.mark.nightly)]
)
def test_evidence_chooses_the_scale_as_the_closed_form_does(weights, best):
    """Laplace is exact on a linear model, up to how near training came to the mode."""
    x, y = line(60, weights, 0.5)
    closed = {s: exact(x, y, s, 0.5)[0] for s in SCALES}
    assert max(SCALES, key=lambda s: closed[s]) == best
    chosen, trials = tune(Recipe(hidden=(), noise=0.5), x, y, rule="evidence", noise=False)
    assert chosen.scale == best
    for trial in trials:
        assert trial.score == pytest.approx(closed[trial.prior_scale], abs=0.2 / len(x))  # a fifth of a nat in all
        assert trial.score <= closed[trial.prior_scale] + 1e-5  # the mode is the highest there is


def test_bayes_by_backprop_is_tuned_by_its_own_elbo(monkeypatch):
    x, y = line(60, (3.0, -2.5), 0.5)
    monkeypatch.setitem(tuning.BOUND, "steps", 3000)
    monkeypatch.setattr(tuning, "SCALES", (4.0,))
    _, (trial,) = tune(Recipe(hidden=(), noise=0.5, method="bbb"), x, y, rule="evidence", noise=False)
    evidence, gap = exact(x, y, 4.0, 0.5)
    assert trial.error > 0
    assert trial.score < evidence + 4 * trial.error  # a bound from below
    assert trial.score > evidence - gap - 4 * trial.error - 1 / len(x)  # within a nat of the best that it can be


def test_evidence_finds_noise_that_depends_on_the_input_and_a_width(monkeypatch):
    monkeypatch.setitem(tuning.POINT, "steps", 500)  # finds the right noise for each of five seeds
    x, raw, rng = wave(200, None)
    draws = rng.normal(size=200)
    recipe = Recipe(hidden=(8,), prior_scale=2.0)
    growing = raw[:, 0] + np.exp(1.5 * raw[:, 0]) * 0.1 * draws
    chosen, trials = tune(recipe, x, growing, rule="evidence", scale=False, width=True)
    assert chosen.noise == "heteroscedastic"
    assert [t.hidden for t in trials[:3]] == [(4,), (8,), (16,)]
    assert chosen.hidden == max(trials[:3], key=lambda t: t.score).hidden
    steady, _ = tune(recipe, x, raw[:, 0] + 0.3 * draws, rule="evidence", scale=False)
    assert steady.noise == "learned"
    assert steady.hidden == (8,)


def test_a_richer_noise_has_to_earn_its_place():
    """By more than a factor of three in evidence, and two standard errors."""
    old = tuning._Score(-1.0, 0.0)
    for gain, error, expected in ((1.0, 0.0, False), (1.2, 0.0, True), (1.2, 1.0, False), (5.0, 2.0, True)):
        new = tuning._Score(-1.0 + gain / 100, error / 100)
        assert tuning._clearly_better(new, old, 100, None) is expected
    assert math.log(3) < 1.2


def test_an_unknown_rule_is_refused():
    x, raw, _ = wave(20, 0.1)
    with pytest.raises(InputError, match="tune must be one of 'rows', 'evidence', got 'best'"):
        tune(Recipe(), x, raw[:, 0], rule="best")


@pytest.mark.parametrize("column", ["group", "time"])
def test_validation_rows_are_of_other_groups_and_later_times(monkeypatch, tmp_path, column):
    rng = np.random.default_rng(0)
    values = {"x": rng.normal(size=60), "g": np.repeat(np.arange(6), 10), "y": rng.normal(size=60)}
    table = write(values, tmp_path / "t.csv")
    prepared = prepare(Config(str(table), "y", method="map", tune="rows", hidden=(4,), **{column: "g"}))
    seen = []

    def validate(recipe, rows, train, validation, classes, seed):
        assert not set(values["g"][train]) & set(values["g"][validation])
        if column == "time":
            assert values["g"][train].max() < values["g"][validation].min()
        seen.append((len(train), len(validation)))
        return rng.normal(size=len(validation))

    monkeypatch.setattr(tuning, "_validate", validate)
    choose_table(prepared)
    assert set(seen) <= {(50, 10), (40, 20)}


@pytest.mark.parametrize("noise, compared", [("learned", {"learned"}), ("auto", {"learned", "heteroscedastic"})])
def test_noise_that_was_given_is_not_compared_with_another(monkeypatch, tmp_path, noise, compared):
    rng = np.random.default_rng(0)
    table = write({"x": rng.normal(size=40), "y": rng.normal(size=40)}, tmp_path / "t.csv")
    tried = set()

    def validate(recipe, rows, train, validation, classes, seed):
        tried.add(recipe.noise)
        return rng.normal(size=len(validation))

    monkeypatch.setattr(tuning, "_validate", validate)
    choose_table(prepare(Config(str(table), "y", noise=noise, method="map", hidden=(4,), tune="rows")))
    assert tried == compared


# -- estimators and the command line -----------------------------------------------------------------------------------
@pytest.mark.parametrize("rule, widths", [("rows", {(8,)}), ("evidence", {(4,), (8,), (16,)})])
def test_estimators_tune(brief, rule, widths):
    x, raw, rng = wave(60, None)
    settings = {"steps": 40, "members": 2, "validation": 0.0}
    y = 50 + 4 * np.sin(raw[:, 0]) + 0.2 * rng.normal(size=60)
    model = cr.BayesianRegressor("ensemble", hidden=8, settings=settings, tune=rule).fit(x, y)
    assert {t.hidden for t in model.trials_} == widths
    best = max((t for t in model.trials_ if t.noise == "learned"), key=lambda t: t.score)
    assert (model.recipe_.scale, model.recipe_.hidden) == (best.prior_scale, best.hidden)
    assert model.posterior_.record.prior["scale"] == best.prior_scale
    labels = np.where(raw[:, 0] > 0, "yes", "no")
    sorted_out = cr.BayesianClassifier("ensemble", hidden=8, settings=settings, tune=rule).fit(x, labels)
    assert {t.prior_scale for t in sorted_out.trials_} == set(SCALES)
    with pytest.raises(InputError, match="tune must be one of 'auto', 'folds', 'rows', 'evidence', got 'best'"):
        cr.BayesianRegressor(tune="best").fit(x, y)


@pytest.fixture
def one_fold(monkeypatch):
    """Choices by one fold of short runs."""
    monkeypatch.setattr(search, "USED", ())
    monkeypatch.setattr(search, "HMC_PILOT", {"chains": 2, "warmup": 60, "draws": 20, "thin": 1, "max_steps": 20})


def test_estimators_tune_by_folds(one_fold):
    """A skewed positive target is fitted on the log scale, and predicted in its own units."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    y = np.exp(2 + 1.5 * x[:, 0] + 0.3 * rng.normal(size=120))
    x[::10, 1] = np.nan
    settings = {"chains": 2, "warmup": 60, "draws": 20, "thin": 1, "max_steps": 20}
    given = {"method": "hmc", "hidden": (4,), "settings": settings}
    model = cr.BayesianRegressor(**given, tune="folds").fit(x[:80], y[:80])
    assert model.recipe_.transform in ("log", "log1p", "power")
    assert model.recipe_.hidden == (4,)
    assert sum(trial.chosen for trial in model.trials_) == 1
    lower, _ = model.predict_interval(x[80:])
    assert (lower > 0).all()
    plain = cr.BayesianRegressor(**given).fit(x[:80], y[:80])
    assert plain.trials_ == ()
    assert plain.recipe_.transform == "none"
    assert model.log_score(x[80:], y[80:]) > plain.log_score(x[80:], y[80:]) + 0.3
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(x[80:]), model.predict(x[80:]))
    # Two targets, each with a scale of its own.
    both = cr.BayesianRegressor(**given, tune="folds").fit(x[:80], np.stack([y, 100 + x[:, 0]], 1)[:80])
    assert both.predict(x[80:]).shape == (40, 2)


def test_integers_become_categories_by_folds(one_fold):
    rng = np.random.default_rng(1)
    level = rng.integers(0, 8, size=240)
    x = np.stack([level, rng.normal(size=240)], 1).astype(float)
    labels = np.where(level % 2 == 0, "even", "odd")
    settings = {"chains": 2, "warmup": 60, "draws": 20, "thin": 1, "max_steps": 20}
    model = cr.BayesianClassifier("hmc", hidden=(), settings=settings, tune="folds").fit(x[:160], labels[:160])
    assert model.recipe_.inputs == "categories"
    assert model.score(x[160:], labels[160:]) == 1


def test_which_rule_auto_stands_for():
    assert tuning_rule("auto", Recipe()) == "folds"
    assert tuning_rule("auto", Recipe(method="hmc")) is None
    assert tuning_rule("auto", Recipe(settings={"draws": 10})) is None
    assert tuning_rule("folds", Recipe(method="hmc")) == "folds"
    assert tuning_rule(None, Recipe()) is None
    x, raw, _ = wave(60, None)
    with pytest.raises(InputError, match="tune: \"folds\" is for the methods auto, hmc, ensemble, got 'map'"):
        cr.BayesianRegressor("map", tune="folds").fit(x, raw[:, 0])
    # Fewer than 50 rows are fitted as they are.
    few = cr.BayesianRegressor("hmc", tune="folds", hidden=(), settings={"warmup": 20, "draws": 5, "chains": 2})
    assert few.fit(x[:20], raw[:20, 0]).trials_ == ()


@pytest.mark.parametrize(
    "kind",
    ["numbers", pytest.param("two", marks=pytest.mark.nightly), pytest.param("three", marks=pytest.mark.nightly)],
)
def test_a_table_is_tuned_from_the_command_line(brief, tmp_path, kind):
    """The choice is stored in the settings of the run, which reproduce it; explicit settings are kept."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=80)
    target = {"numbers": 3 * x + rng.normal(size=80), "two": x > 0, "three": np.digitize(x, [-0.5, 0.5])}[kind]
    words = [f"c{v}" for v in target.astype(int)] if kind != "numbers" else target
    table = tmp_path / "t.csv"
    table.write_text("x,y\n" + "\n".join(f"{a},{b}" for a, b in zip(x, words)))
    line_ = [
        "fit",
        str(table),
        "--target",
        "y",
        "--method",
        "map",
        "--hidden",
        "4",
        "--set",
        "steps=20",
        "--tune",
        "evidence",
    ]
    answer = CliRunner().invoke(app, [*line_, "--out", str(tmp_path / "run"), "--prior-scale", "3"])
    assert answer.exit_code == 0, answer.output
    facts = json.loads((tmp_path / "run" / "table.json").read_text())["config"]
    assert facts["prior_scale"] == 3.0
    assert tuple(facts["hidden"]) in {(2,), (4,), (8,)}
    assert "by evidence: prior scale 3" in answer.output.replace("\n", " ")
    refused = CliRunner().invoke(app, [*line_[:-1], "luck", "--out", str(tmp_path / "other")])
    assert refused.exit_code != 0
    assert "--tune" in refused.output
