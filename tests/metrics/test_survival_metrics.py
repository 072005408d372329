"""Metrics of censored times: against brute force and simulation."""

import math

import numpy as np
import pytest
import torch

import credibly as cr
from credibly.metrics.survival import censored_fraction_below, concordance_index


def test_concordance_by_brute_force():
    rng = np.random.default_rng(0)
    time, event = rng.integers(1, 8, 40).astype(float), rng.random(40) < 0.6
    predicted = np.round(time + rng.normal(0, 3, 40))
    right = pairs = 0.0
    for i in range(40):
        for j in range(40):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if predicted[i] < predicted[j] else 0.5 if predicted[i] == predicted[j] else 0.0
    got = concordance_index(*(torch.from_numpy(v) for v in (predicted, time, event)))
    assert float(got) == pytest.approx(right / pairs)


def test_concordance_of_perfect_reversed_and_constant_predictions():
    time = torch.tensor([1.0, 2.0, 3.0, 4.0])
    event = torch.tensor([1, 0, 1, 1])
    assert float(concordance_index(time, time, event)) == 1
    assert float(concordance_index(-time, time, event)) == 0
    assert float(concordance_index(torch.ones(4), time, event)) == 0.5
    assert math.isnan(float(concordance_index(time, time, torch.zeros(4))))


def test_the_true_distribution_is_calibrated_under_censoring():
    """Times of rate 1, censored at independent times: F(T) is uniform, whatever the fraction that is censored."""
    rng = np.random.default_rng(1)
    time, limit = rng.exponential(1.0, 20_000), rng.exponential(1.5, 20_000)
    cdf = torch.from_numpy(1 - np.exp(-np.minimum(time, limit)))
    levels = torch.tensor([0.05, 0.3, 0.5, 0.8, 0.95])
    found = censored_fraction_below(cdf, torch.from_numpy(time <= limit), levels)
    assert found.tolist() == pytest.approx(levels.tolist(), abs=4 * math.sqrt(0.25 / 20_000))
    # Predictions of half the rate come too late: more than half of the rows are over by the predicted median.
    late = torch.from_numpy(1 - np.exp(-0.5 * np.minimum(time, limit)))
    assert float(censored_fraction_below(late, torch.from_numpy(time <= limit), levels)[2]) > 0.6


def test_without_censoring_it_is_the_empirical_fraction():
    cdf = torch.tensor([0.1, 0.4, 0.6, 0.9])
    assert censored_fraction_below(cdf, torch.ones(4), torch.tensor([0.5, 0.95])).tolist() == [0.5, 1.0]


def test_shapes_are_checked():
    with pytest.raises(cr.InputError, match="must be one value per row"):
        concordance_index(torch.ones(3), torch.ones(4), torch.ones(4))
