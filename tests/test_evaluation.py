"""Figures of merit, against the same figures computed by hand from the predictive."""

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, Poisson

X, Y = randn(60, 3), randn(60, 3).sum(1) + 0.2 * randn(60, seed=1)


def fitted(outputs, y, likelihood):
    problem = cr.Problem(mlp(3, 6, outputs), data=(X, y), likelihood=likelihood, prior=cr.priors.Normal())
    return cr.DeepEnsemble(members=4, steps=150).fit(problem, seed=0).predict(X)


def test_real_targets():
    p = fitted(1, Y, Gaussian())
    figures = cr.evaluate(p, Y)
    lower, upper = p.interval(0.9)
    assert figures["rmse"] == pytest.approx(float((p.mean - Y).square().mean().sqrt()), rel=1e-5)
    assert figures["log_density"] == pytest.approx(float(p.log_prob(Y).mean()), rel=1e-5)
    assert figures["coverage"] == pytest.approx(float(((lower <= Y) & (upper >= Y)).float().mean()))
    assert figures["width"] == pytest.approx(float((upper - lower).mean()), rel=1e-5)
    assert 0 < figures["crps"] < figures["rmse"]
    below = torch.stack([(p.cdf(Y) <= q).float().mean() for q in torch.arange(1, 100) / 100])
    assert figures["calibration_error"] == pytest.approx(
        float((below - torch.arange(1, 100) / 100).abs().mean()), abs=1e-5
    )
    assert cr.evaluate(p, Y.numpy()) == figures


def test_wider_predictions_cover_more_and_score_worse():
    narrow, wide = fitted(1, Y, Gaussian(0.3)), fitted(1, Y, Gaussian(3.0))
    a, b = cr.evaluate(narrow, Y), cr.evaluate(wide, Y)
    assert b["coverage"] == 1.0 >= a["coverage"]
    assert b["log_density"] < a["log_density"]
    assert b["calibration_error"] > a["calibration_error"]


@pytest.mark.parametrize("likelihood, outputs", [(Bernoulli(), 1), (Categorical(), 2)])
def test_labels(likelihood, outputs):
    labels = (Y > 0).long()
    p = fitted(outputs, labels, likelihood)
    figures = cr.evaluate(p, labels)
    assert figures["accuracy"] == pytest.approx(float((p.probabilities.argmax(-1) == labels).float().mean()))
    assert figures["log_density"] == pytest.approx(float(p.log_prob(labels).mean()), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(labels, 2)
    assert figures["brier"] == pytest.approx(float((p.probabilities - one_hot).square().sum(-1).mean()), rel=1e-4)
    assert figures["coverage"] >= figures["accuracy"]
    assert 1 <= figures["set_size"] <= 2


def test_counts_have_no_calibration_error():
    counts = Y.exp().round().clamp(max=20)
    figures = cr.evaluate(fitted(1, counts, Poisson()), counts)
    assert set(figures) == {"log_density", "rmse", "crps", "coverage", "width"}
    assert 0.7 < figures["coverage"] <= 1
