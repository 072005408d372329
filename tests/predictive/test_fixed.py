"""Predictions of models without a posterior, against closed forms of scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm

import credibly as cr
from credibly.predictive.fixed import categorical_predictive, gaussian_predictive


def test_a_gaussian_per_row():
    mean, std = np.array([1.0, -2.0, 300.0]), np.array([0.5, 2.0, 10.0])
    y = np.array([1.2, -5.0, 290.0])
    p = gaussian_predictive(torch.from_numpy(mean), torch.from_numpy(std))
    np.testing.assert_allclose(p.mean.numpy(), mean)
    np.testing.assert_allclose(p.std.numpy(), std)
    assert p.epistemic.tolist() == [0, 0, 0]
    np.testing.assert_allclose(p.log_prob(y).numpy(), norm.logpdf(y, mean, std))
    np.testing.assert_allclose(p.cdf(y).numpy(), norm.cdf(y, mean, std))
    for end, level in zip(p.interval(0.9), (0.05, 0.95)):
        np.testing.assert_allclose(end.numpy(), norm.ppf(level, mean, std))
    some = p.subset(torch.tensor([2, 0]))
    np.testing.assert_allclose(some.mean.numpy(), mean[[2, 0]])
    assert set(cr.evaluate(p, y)) == {"log_density", "rmse", "crps", "coverage", "width", "calibration_error"}


def test_class_probabilities():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])
    p = categorical_predictive(probabilities)
    np.testing.assert_allclose(p.probabilities.numpy(), probabilities.numpy(), atol=1e-7)
    np.testing.assert_allclose(p.log_prob([1, 2]).numpy(), np.log([0.2, 0.5]), rtol=1e-6)
    assert float(p.epistemic.max()) == 0
    assert p.prediction_set(0.8).tolist() == [[True, True, False], [False, True, True]]
    # A class of probability zero is all but impossible, not an error.
    assert float(p.log_prob([0, 0])[1]) < -700
    assert cr.evaluate(p, [0, 1])["accuracy"] == pytest.approx(1.0)
