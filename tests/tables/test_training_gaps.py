"""Missing cells of training rows: drawn given the target, so that guesses do not become noise."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import credibly as cr
from credibly.tables import Config, prepare
from credibly.tables.columns.scaling import STANDARD
from credibly.tables.missing.imputation import COMPLETIONS, Donors
from credibly.tables.missing.training_gaps import HMC_PILOT, TrainingGaps, _draws, completed_inputs, short_method
from credibly.tables.recipe import Recipe

NOISE, SLOPE = 0.3, 3.0


def gapped(rows, seed, fraction=0.2):
    """Rows of three independent inputs, of which the first matters most and is missing in some; and their targets."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    y = SLOPE * x[:, 0] + x[:, 1] + NOISE * rng.normal(size=rows)
    x[rng.random(rows) < fraction, 0] = np.nan
    return x, y


class Linear:
    """A posterior that knows the truth."""

    def predict(self, x):
        mean = SLOPE * x[:, 0] + x[:, 1]

        class Found:
            def log_prob(self, y):
                return -0.5 * ((y - mean) / NOISE) ** 2

        return Found()


def test_draws_are_from_the_conditional_distribution():
    """With x0 ~ N(0, 1) and y = 3 x0 + x1 + e: x0 | x1, y is normal with a precision of 1 + 9 / 0.09."""
    x, y = gapped(4_000, 0)
    donors = Donors(x)
    # All donors, so that completions are draws of x0 and not those of similar rows; they stand for its distribution.
    gaps = TrainingGaps(np.isnan(x), np.tile(np.arange(2_000, dtype=np.int16), (len(x), 1)), donors)
    donors.rows = np.random.default_rng(9).normal(size=(2_000, 3))
    rows = np.flatnonzero(np.isnan(x[:, 0]))[:400]
    drawn = _draws(Linear(), np.nan_to_num(x), y, gaps, rows, STANDARD, np.random.default_rng(1))
    precision = 1 + SLOPE**2 / NOISE**2
    mean = SLOPE * (y[rows] - x[rows, 1]) / NOISE**2 / precision
    z = (drawn[:, 0] - mean) * np.sqrt(precision)
    assert abs(z.mean()) < 4 / np.sqrt(len(rows))
    # Far from 0 donors are rare and the draws are too close to them, so the variance is a little off.
    assert 0.8 < z.std() < 1.2
    np.testing.assert_array_equal(drawn[:, 1:], x[rows, 1:])


@pytest.fixture(scope="module")
def fits():
    x, y = gapped(300, 2)
    complete = gapped(300, 2, fraction=0.0)
    settings = {"chains": 2, "warmup": 100, "draws": 50, "thin": 1}
    made = {name: cr.BayesianRegressor("hmc", hidden=(), settings=settings) for name in ("gaps", "complete")}
    return made["gaps"].fit(x, y), made["complete"].fit(*complete), (x, y)


def test_noise_of_complete_rows_is_not_inflated(fits):
    """Filling x0 by a guess has a residual of 3 std(x0), so that a fifth of the rows would give a noise of 1.4."""
    with_gaps, without, (x, y) = fits
    new, target = gapped(400, 3, fraction=0.0)
    for model in (with_gaps, without):
        noise = np.sqrt(model.predictive(new).aleatoric.numpy())
        assert NOISE * 0.85 < noise.mean() < NOISE * 1.35
    lower, upper = with_gaps.predict_interval(new)
    # A noise up to 1.35 times too large covers up to 0.974; that of the guess covers everything.
    assert 0.86 < np.mean((lower <= target) & (target <= upper)) < 0.985
    # A fit to the means over completions, for comparison.
    filled = np.where(np.isnan(x), 0.0, x)
    guessed = cr.BayesianRegressor("hmc", hidden=(), settings=with_gaps.settings).fit(filled, y)
    assert np.sqrt(guessed.predictive(new).aleatoric.numpy()).mean() > 1.0


def test_rows_with_gaps_stay_covered(fits):
    new, target = gapped(400, 4, fraction=1.0)
    lower, upper = fits[0].predict_interval(new)
    assert np.mean((lower <= target) & (target <= upper)) > 0.85


def test_completions_and_their_rows():
    x, y = gapped(60, 5)
    gaps = TrainingGaps.of(x)
    rows = np.flatnonzero(gaps.missing.any(1))
    every = gaps.completions(np.nan_to_num(x), rows[:3])
    np.testing.assert_array_equal(every, gaps.donors.complete(x)[rows[:3]])
    assert every.shape == (3, COMPLETIONS, 3)
    part = gaps.at(rows)
    np.testing.assert_array_equal(part.completions(np.nan_to_num(x[rows]), np.arange(3)), every)
    assert TrainingGaps.of(np.nan_to_num(x)) is None
    recipe = Recipe(hidden=(), method="hmc", settings={"chains": 2, "warmup": 20, "draws": 5})
    filled = gaps.donors.fill(x)
    found = [completed_inputs(recipe, filled, y, gaps, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()
    assert (found[0] != filled)[rows, 0].any()
    np.testing.assert_array_equal(found[0][~gaps.missing], x[~gaps.missing])
    complete = np.setdiff1d(np.arange(60), rows)
    assert completed_inputs(recipe, filled[complete], y[complete], gaps.at(complete)) is not None


def test_short_fits():
    """They are as long whether a setting was given or is the default, and no longer than the fit."""
    laplace = short_method(Recipe(method="laplace"), 100, 500)
    assert isinstance(laplace, cr.HMC)
    assert {name: getattr(laplace, name) for name in HMC_PILOT} == HMC_PILOT
    assert isinstance(short_method(Recipe(method="laplace"), 100_000, 500), cr.DeepEnsemble)
    assert isinstance(short_method(Recipe("counts", method="hmc"), 100, 50), cr.DeepEnsemble)
    full = Recipe(method="hmc").fitter(100, 500)
    given = {name: getattr(full, name) for name in HMC_PILOT}
    assert short_method(Recipe(method="hmc"), 100, 500) == short_method(Recipe(method="hmc", settings=given), 100, 500)
    assert short_method(Recipe(method="hmc", settings={"warmup": 30}), 100, 500).warmup == 30
    large = Recipe(method="ensemble", settings={"epochs": 10, "batch_size": 32, "validation": 0.1, "patience": 9})
    short = short_method(large, 100_000, 500)
    assert (short.epochs, short.batch_size, short.patience, short.members) == (10, 32, 5, 3)


def test_rows_held_out_stay_unseen(tmp_path):
    """The problem of a fold does not depend on the targets of its other rows."""
    x, y = gapped(100, 6)
    problems = []
    for other in (0.0, 100.0):
        changed = y.copy()
        changed[80:] = y[80:] + other * (-1) ** np.arange(20)
        columns = {name: pa.array(x[:, j], from_pandas=True) for j, name in enumerate("abc")}
        pyarrow.parquet.write_table(pa.table(columns | {"y": changed}), tmp_path / "t.parquet")
        config = Config(str(tmp_path / "t.parquet"), "y", method="hmc", hidden=(2,), tune="none", transform="none")
        prepared = prepare(config)
        mean, std = prepared.preparation.scale.mean[0], prepared.preparation.scale.std[0]
        problem = prepared.completed_problem(np.arange(80))
        problems.append((problem.x, problem.y.double() * std + mean))
        assert not torch.equal(problem.x, prepared.problem_of(np.arange(80)).x)
    torch.testing.assert_close(problems[0][1], problems[1][1], rtol=1e-4, atol=1e-4)
    # The scale of the target is that of all rows, which rounds differently; draws are the same but for ties.
    assert float((problems[0][0] == problems[1][0]).all(1).double().mean()) > 0.5
