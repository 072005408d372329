"""Least squares of the mean before predicted noise: closed forms, the start of the noise, and what it is for."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.errors import InputError
from credibly.inference.training.data import Data
from credibly.inference.training.gauss_newton import train_gauss_newton
from credibly.inference.training.mean_first import MeanFirst
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.settings import Training
from credibly.likelihoods import Gaussian, HeteroscedasticGaussian, HeteroscedasticStudentT

NEWTON = {"optimiser": "gauss-newton", "init": "fresh"}
X = randn(60, 3).double()
Y = torch.stack([X.sum(1), X[:, 0] - 2 * X[:, 1] ** 2], 1) + 0.3 * randn(60, 2, seed=1).double()


def problem(likelihood, net=None, weight=None):
    net = (net or nn.Linear(3, 4)).double()
    return cr.Problem(net, data=(X, Y), likelihood=likelihood, prior=cr.priors.Normal(), sample_weight=weight)


def first(p, prior_weight=0.0):
    theta = 0.1 * randn(1, p.dim, seed=2).double()
    found = MeanFirst.of(NegativeLogDensity(p, p.n, prior_weight), theta, Data(p.n, None))
    assert found is not None
    return found, theta


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), HeteroscedasticStudentT(floor=0.1)], ids=repr)
def test_a_linear_mean_is_that_of_least_squares_and_the_noise_starts_at_what_is_left(likelihood, weighted):
    weight = torch.linspace(0.5, 2, 60).double() if weighted else None
    p = problem(likelihood, weight=weight)
    found, theta = first(p)
    options = Training(optimiser="gauss-newton", steps=10)
    fitted = train_gauss_newton(found.problem, found.objective, theta, options, found.data, title="", progress=False)
    design = torch.cat([X, torch.ones(60, 1, dtype=torch.float64)], 1)
    v = torch.ones(60, dtype=torch.float64) if weight is None else weight
    exact = torch.linalg.solve((design.T * v) @ design, (design.T * v) @ Y)
    started = found.start(p, fitted.theta)
    mean, log_square = p.forward(started, X)[0].chunk(2, -1)
    torch.testing.assert_close(mean, design @ exact, rtol=1e-6, atol=1e-6)
    left = (v @ (Y - design @ exact).square()) / v.sum()
    scale = (v @ log_square) / v.sum()
    torch.testing.assert_close(torch.exp(scale) + likelihood.floor**2, left, rtol=1e-6, atol=1e-8)


def test_networks_without_a_predicted_scale_are_trained_as_they_are():
    p = problem(Gaussian(), nn.Linear(3, 2))
    assert MeanFirst.of(NegativeLogDensity(p, p.n), torch.zeros(1, p.dim).double(), Data(p.n, None)) is None
    with_it, without = (cr.MAP(**NEWTON, steps=5, mean_first=on).fit(p, progress=False) for on in (True, False))
    assert torch.equal(with_it.draws, without.draws)


def test_the_mean_of_a_smooth_target_comes_closer():
    rng = np.random.default_rng(1)

    def rows(count):
        x = torch.from_numpy(rng.normal(size=(count, 2)))
        return x, torch.sin(2 * x[:, :1]) * x[:, 1:]

    (x, y), (x_new, y_new) = rows(300), rows(400)
    torch.manual_seed(0)
    net = mlp(2, 8, 8, 2).double()
    p = cr.Problem(net, data=(x, y), likelihood=HeteroscedasticGaussian(), prior=cr.priors.Normal(scale=2.0))
    common = {**NEWTON, "members": 3, "steps": 60, "validation": 0.1, "noise_from": "held-out"}
    errors = {}
    for on in (True, False):
        posterior = cr.DeepEnsemble(**common, mean_first=on).fit(p, progress=False)
        errors[on] = float((posterior.predict(x_new).mean - y_new).square().mean().sqrt())
        history = posterior.record.history
        assert ("mean_steps" in history) is on
        assert all(math.isfinite(value) for row in history["loss"] for value in row)
    assert errors[True] < 0.8 * errors[False]


def test_it_needs_gauss_newton_steps():
    with pytest.raises(InputError, match='mean_first must be False unless optimiser is "gauss-newton", got True'):
        cr.MAP(mean_first=True)
