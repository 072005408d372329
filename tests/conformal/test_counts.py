"""Randomised intervals of counts: who is covered, thresholds, and exact coverage under wrong models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from credibly.conformal.counts import covered, randomised_threshold, steps_of
from credibly.likelihoods import Poisson
from tests.conformal.simulated import predictive


def steps(y, rate):
    return torch.from_numpy(np.stack([stats.poisson.cdf(y - 1, rate), stats.poisson.cdf(y, rate)]))


def test_covered_is_the_fraction_of_random_numbers_inside():
    rng = np.random.default_rng(0)
    y, rate = rng.poisson(1.2, size=40), rng.uniform(0.4, 3, size=40)
    found = covered(steps(y, rate), 1.1).numpy()
    lower, upper = steps(y, rate).numpy()
    u = lower + rng.uniform(size=(20_000, 40)) * (upper - lower)
    drawn = (np.abs(stats.norm.ppf(u)) <= 1.1).mean(0)
    assert np.abs(found - drawn).max() < 4.5 * np.sqrt(0.25 / 20_000)
    assert 0 < found.mean() < 1


def test_without_steps_the_threshold_is_the_usual_rank():
    z = torch.randn(49, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = torch.special.ndtr(z)
    found = randomised_threshold(torch.stack([u, u]), 0.9)
    assert found == pytest.approx(float(z.abs().sort().values[44]), rel=1e-9)


@pytest.mark.parametrize("wrong", [0.5, pytest.param(1.0, marks=pytest.mark.nightly), 2.0])
def test_randomised_coverage_is_exact_where_plain_intervals_cover_more(wrong):
    rng = np.random.default_rng(1)
    exact, plain = [], []
    for _ in range(300):
        rate = rng.uniform(0.2, 1.5, size=160)
        y = rng.poisson(rate)
        ranges = steps(y, wrong * rate)
        t = randomised_threshold(ranges[:, :80], 0.9)
        exact.append(float(covered(ranges[:, 80:], t).mean()))
        # Both ends belong to a plain interval.
        plain.append(float((covered(ranges[:, 80:], t) > 0).double().mean()))
    error = 4 * np.std(exact) / np.sqrt(300)
    assert 0.9 - error < np.mean(exact) < 0.9 + 1 / 81 + error
    assert np.mean(plain) > np.mean(exact) + 0.03


def test_steps_are_those_of_the_predictive():
    rate = torch.tensor([0.5, 2.0, 4.0])
    y = np.array([0, 1, 7])
    found = steps_of(predictive(rate.log().reshape(1, 3), Poisson()), y)
    assert torch.allclose(found.reshape(2, 3), steps(y, rate.numpy()), atol=1e-6)
