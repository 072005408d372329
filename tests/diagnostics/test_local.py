"""The parts of predictions within and between chains, against chains whose parts are known."""

import numpy as np
import pytest

from credibly.diagnostics.local import local_posteriors
from credibly.diagnostics.summary import diagnose
from simulated_chains import autoregressive

CHAINS, DRAWS, COLUMNS = 8, 400, 60
CALM = autoregressive(CHAINS, DRAWS, COLUMNS, 0.3, 1)
WEIGHTS = autoregressive(CHAINS, DRAWS, 20, 0.0, 2)


def shifted(between, draws=CALM):
    """Chains of variance 1 whose means have exactly this variance."""
    means = np.random.default_rng(0).standard_normal((CHAINS, 1, COLUMNS))
    means = (means - means.mean(0)) / means.std(0, ddof=1)
    inside = draws - draws.mean(1, keepdims=True)
    return inside / inside.std(1, ddof=1, keepdims=True) + np.sqrt(between) * means


@pytest.mark.parametrize("between", [0.25, 1.0, 9.0])
def test_the_fraction_between_chains(between):
    """B / (B + W) with W = 1; the Monte Carlo error of the means is W / n, 1.86 / 400 for autocorrelation 0.3."""
    found = local_posteriors(shifted(between))
    exact = between - 1.86 / DRAWS
    assert found.between == pytest.approx(exact / (exact + 1), rel=0.02)
    assert found.between <= found.between_most <= 1
    assert found.within.rhat_most < 1.01
    assert found.within.ess_bulk_median == pytest.approx(CHAINS * DRAWS / 1.86, rel=0.15)


def test_chains_that_agree_have_hardly_any_part_between_them():
    """Means differ by Monte Carlo error alone, whose expectation is subtracted."""
    found = local_posteriors(CALM)
    assert found.between < 1.86 / DRAWS
    assert diagnose(WEIGHTS, CALM, local=True).verdict.startswith("Good: the chains agree")


def test_the_verdict_tells_settled_chains_from_drifting_ones():
    settled = diagnose(WEIGHTS, shifted(1.0), local=True)
    assert settled.ok
    assert settled.verdict.startswith("An ensemble of local posteriors: each of the 8 chains has settled")
    assert "50% of the variance of a prediction lies between the chains" in settled.verdict
    assert "not draws from the posterior" in settled.verdict
    assert "between chains" in str(settled)
    assert "variance between chains" in settled._repr_html_()
    assert "rhat" not in settled.to_dict()["local"]["within"]
    drift = np.linspace(-2, 2, DRAWS)[None, :, None]
    moving = diagnose(WEIGHTS, shifted(1.0) + drift, local=True)
    assert not moving.ok
    assert moving.verdict.startswith("Not settled: the chains still move away from where they started")
    plain = diagnose(WEIGHTS, shifted(1.0))
    assert plain.verdict.startswith("Not mixed")
    assert plain.local is None


def test_faults_of_any_method_stay_faults():
    broken = shifted(1.0)
    broken[0, 3, 5] = np.nan
    assert diagnose(WEIGHTS, broken, local=True).verdict.startswith("Broken")
    still = WEIGHTS.copy()
    still[2] = 1.0
    assert "chain 2 never moved" in diagnose(still, shifted(1.0), local=True).verdict
    lost = diagnose(WEIGHTS, shifted(1.0), divergences=3, local=True)
    assert not lost.ok
    assert "3 paths diverged" in lost.verdict
    constant = diagnose(WEIGHTS, np.ones((CHAINS, DRAWS, 4)), local=True)
    assert constant.verdict.startswith("Nothing to judge")
    assert np.isnan(constant.local.between)
