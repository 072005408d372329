"""Verdicts: which diagnostics decide, their limits, and what is said about them."""

import functools
import math

import numpy as np
import pytest

import credibly
from credibly.diagnostics import verdict
from credibly.diagnostics.summary import diagnose
from simulated_chains import autoregressive

GOOD_WEIGHTS = autoregressive(4, 500, 20, 0.0)
GOOD = autoregressive(4, 500, 120, 0.0, seed=1)


def test_good_functions_excuse_the_weights():
    apart = GOOD_WEIGHTS + 5 * np.arange(4)[:, None, None]
    d = diagnose(apart, GOOD, acceptance=0.8, divergences=0, energy=GOOD[..., 0])
    assert d.ok
    assert d.verdict.startswith("Good: the chains agree about the predictions")
    assert "The weights mix worse" in d.verdict
    assert "as expected: hidden units" in d.verdict
    both = diagnose(GOOD_WEIGHTS, GOOD)
    assert both.ok
    assert "weights" not in both.verdict
    alone = diagnose(apart)
    assert not alone.ok
    assert alone.verdict.startswith("Not mixed: the chains disagree about the weights")
    assert "This verdict is based on the weights alone" in alone.verdict


def test_functions_that_disagree_are_not_excused_by_weights():
    d = diagnose(GOOD_WEIGHTS, GOOD + 2 * np.arange(4)[:, None, None])
    assert not d.ok
    assert d.verdict.startswith("Not mixed: the chains disagree about the predictions (R-hat above 1.1 for 100%")
    assert "warm-up" in d.verdict
    shifted = 2 * np.arange(4)[:, None, None]
    assert "as expected" not in diagnose(GOOD_WEIGHTS + shifted, GOOD + shifted).verdict


def test_a_stray_prediction_is_named_not_decisive():
    y = GOOD.copy()
    y[..., 7] += 2 * np.arange(4)[:, None]
    d = diagnose(GOOD_WEIGHTS, y)
    assert d.ok
    assert "0.8% of the predictions have R-hat above 1.1" in d.verdict
    y[..., 8:12] += 2 * np.arange(4)[:, None, None]
    assert not diagnose(GOOD_WEIGHTS, y).ok


def test_one_chain():
    d = diagnose(GOOD_WEIGHTS[:1], GOOD[:1])
    assert d.ok
    assert "halves of the chain" in d.verdict
    assert "One chain cannot show modes that it never reached" in d.verdict


def test_chains_that_never_move():
    x, y = GOOD_WEIGHTS.copy(), GOOD.copy()
    x[2], y[2] = x[2, :1], y[2, :1]
    d = diagnose(x, y)
    assert d.still == (2,)
    assert not d.ok
    assert d.verdict.startswith("Not mixed: chain 2 never moved")
    x[0] = x[0, :1]
    assert diagnose(x, y).verdict.startswith("Not mixed: chains 0, 2 never moved")
    x[:] = x[:, :1]
    d = diagnose(x, y)
    assert d.verdict.startswith("Not moving")
    assert d.weights.rhat_worst == math.inf
    assert d.to_dict()["weights"]["rhat_worst"] is None
    assert diagnose(np.ones((4, 50, 3))).verdict.startswith("Not moving")


def test_nan_and_constant_predictions():
    y = GOOD.copy()
    y[3, 4, 5] = np.nan
    y[3, 4, 6] = -np.inf
    d = diagnose(GOOD_WEIGHTS, y)
    assert not d.ok
    assert d.functions.nonfinite == 2
    assert d.verdict.startswith("Broken: NaN or infinite draws in 2 of the 120 predictions")
    d = diagnose(y, GOOD)
    assert d.verdict.startswith("Broken: NaN or infinite draws in 2 of the 120 weights")
    d = diagnose(GOOD_WEIGHTS, np.ones_like(GOOD))
    assert not d.ok
    assert d.verdict.startswith("Nothing to judge: the predictions are the same in every draw")
    assert math.isnan(d.functions.rhat_worst)


def mixed(rhat_most=1.0, ess_most=1000.0, moving=1000):
    values = {"rhat_worst": rhat_most, "rhat_median": 1.0, "ess_bulk_min": ess_most, "rhat": np.ones(moving)}
    fields = dict.fromkeys(verdict.Mixing.__dataclass_fields__, 0.0) | values
    counts = {"count": moving, "total": moving, "constant": 0, "nonfinite": 0}
    return verdict.Mixing(**fields | counts | {"rhat_most": rhat_most, "ess_most": ess_most})


@pytest.mark.parametrize(
    "rhat_most, word, ok",
    [
        (1.01, "Good", True),
        (1.0101, "Usable", True),
        (1.05, "Usable", True),
        (1.0501, "Poorly mixed", False),
        (1.1, "Poorly mixed", False),
        (1.1001, "Not mixed", False),
        (math.inf, "Not mixed", False),
    ],
)
def test_grades(rhat_most, word, ok):
    found, words = verdict.judge(4, mixed(), mixed(rhat_most))
    assert found is ok
    assert words.startswith(f"{word}: ")
    assert verdict.judge(4, mixed(rhat_most), mixed())[0]
    assert verdict.judge(4, mixed(rhat_most), None)[0] is ok


@pytest.mark.parametrize("chains, least", [(1, 100), (2, 200), (4, 400), (8, 400)])
def test_enough_draws(chains, least):
    assert verdict.judge(chains, mixed(), mixed(ess_most=least))[0]
    found, words = verdict.judge(chains, mixed(), mixed(ess_most=least / 3 + 1))
    assert not found
    assert words.startswith("Not yet: ")
    assert f"ESS is only {least / 3 + 1:.0f}, {least} are needed. Run about 3 times as many draws." in words
    apart = verdict.judge(chains, mixed(), mixed(rhat_most=2.0, ess_most=5))[1]
    assert "times as many" not in apart  # more draws are no remedy
    assert "Run about 4 times as long" in verdict.judge(4, mixed(), mixed(rhat_most=1.08, ess_most=101))[1]


def test_other_faults():
    def say(**given):
        return verdict.judge(4, mixed(), mixed(), **given)

    assert say(divergences=0, e_bfmi=(0.3, 1.0, math.nan, 1.0), acceptance=(0.3,) * 4) == say()
    ok, words = say(divergences=3)
    assert not ok
    assert "3 trajectories diverged" in words
    assert "lower the step size" in words
    assert "1 trajectory diverged" in say(divergences=1)[1]
    ok, words = say(e_bfmi=(math.nan, 1.0, 0.29, 0.2))
    assert not ok
    assert "E-BFMI is 0.2 in chain 3, below 0.3" in words
    ok, words = say(acceptance=(0.8, 0.12, 0.9, 0.7))
    assert ok  # mentioned, not a fault
    assert "Acceptance is 12% in the worst chain" in words


def test_the_verdict_on_a_density_is_about_its_coordinates():
    def log_prob(x):
        return -0.5 * x.square().sum(-1)

    method = credibly.HMC(chains=4, draws=200, warmup=100)
    found = method.fit(credibly.Density(log_prob, 3), seed=0).diagnostics()
    assert "coordinates" in found.verdict
    assert "weights" not in found.verdict
    assert "held-out" not in found.verdict


def test_a_low_e_bfmi_counts_if_it_is_significant():
    judged = functools.partial(verdict.judge, 4, mixed(), mixed())
    assert judged(e_bfmi=(0.25, 0.6, 0.5, 0.7), draws=80)[0]  # within two standard errors of 0.3, mean above
    assert not judged(e_bfmi=(0.25, 0.6, 0.5, 0.7), draws=10_000)[0]
    assert not judged(e_bfmi=(0.05, 0.6, 0.5, 0.7), draws=80)[0]
    assert not judged(e_bfmi=(0.25, 0.28, 0.27, 0.29), draws=80)[0]  # the mean is below


def test_chains_that_are_too_hot():
    """Limits are on the mean over chains: the temperature of one chain is a noisy estimate."""
    ok, words = verdict.judge(4, mixed(), mixed(), temperature=(1.3, 1.2, 1.3, 1.2))
    assert not ok
    assert "kinetic temperature is 1.25 times" in words
    assert verdict.judge(4, mixed(), mixed(), temperature=(1.0, 1.2, 1.0, 1.1))[0]
