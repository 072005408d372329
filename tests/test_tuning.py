"""The prior's scale and the noise are chosen by training rows, and the right ones where the truth is known."""

import numpy as np
import pytest

from credibly.recipe import Recipe
from credibly.tuning import SCALES, tune


def wave(rows, noise, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (rows, 1))
    return x.astype(np.float32), x, rng


def test_noise_that_depends_on_the_input_is_found():
    x, raw, rng = wave(400, None)
    steady = np.sin(2 * raw[:, 0]) + 0.3 * rng.normal(size=400)
    growing = np.sin(2 * raw[:, 0]) + np.exp(raw[:, 0]) * 0.3 * rng.normal(size=400)
    recipe = Recipe(hidden=(16,))
    assert tune(recipe, x, growing, scale=False)[0].noise == "heteroscedastic"
    assert tune(recipe, x, steady, scale=False)[0].noise == "learned"


def test_a_steep_function_takes_a_wide_prior():
    x, raw, rng = wave(300, 0.05)
    chosen, trials = tune(Recipe(hidden=(30,)), x, np.sin(6 * raw[:, 0]) + 0.05 * rng.normal(size=300), noise=False)
    assert chosen.prior_scale == SCALES[-1]
    assert [t.prior_scale for t in trials] == list(SCALES)
    assert trials[-1].score > trials[0].score


def test_what_is_not_asked_for_stays():
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


def test_the_same_seed_gives_the_same_choice_and_progress_is_told():
    x, raw, rng = wave(40, 0.1)
    y = raw[:, 0] + 0.1 * rng.normal(size=40)
    seen = []
    first = tune(Recipe(hidden=(4,)), x, y, seed=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, len(SCALES) + 1) for i in range(1, len(SCALES) + 2)]
    again = tune(Recipe(hidden=(4,)), x, y, seed=1)
    assert first == again
    assert first[1][0].score == pytest.approx(again[1][0].score, abs=0)
