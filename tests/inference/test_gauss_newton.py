"""Damped Gauss-Newton training: closed forms of linear models, brute-force Jacobians, and where it applies."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import credibly as cr
from credibly.core.inputs import blank_row, describe
from credibly.curvature import choose_names, find_parts
from credibly.curvature.gauss_newton import gauss_newton_matrix
from credibly.errors import InputError
from credibly.inference.training import gauss_newton
from credibly.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian
from credibly.networks.zoo import mlp
from credibly.priors.elementwise import Normal

NEWTON = {"optimiser": "gauss-newton"}


def linear(likelihood, rows=40, prior=0.7, weight=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    y = x @ [[1.0], [-2.0], [0.5]] + 0.3 * rng.normal(size=(rows, 1))
    net = nn.Linear(3, 1).double()
    return cr.Problem(net, (torch.from_numpy(x), torch.from_numpy(y)), likelihood, Normal(prior), sample_weight=weight)


def curved(likelihood, outputs=1, noise=0.1, rows=50, weight=None, hidden=4, prior=2.0):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 2))
    y = np.sin(2 * x[:, :1]) * x[:, 1:] + noise * rng.normal(size=(rows, 1))
    torch.manual_seed(0)
    net = mlp(2, (hidden, hidden), outputs, "tanh").double()
    y = (y > 0).astype(float) if isinstance(likelihood, Bernoulli) else y
    return cr.Problem(net, (torch.from_numpy(x), torch.from_numpy(y)), likelihood, Normal(prior), sample_weight=weight)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_a_linear_model_ends_in_its_mode(weighted):
    weight = np.linspace(0.5, 2.0, 40) if weighted else None
    given = linear(Gaussian(0.3), weight=weight)
    found = cr.MAP(**NEWTON, steps=12).fit(given, progress=False).draws.flatten()
    x = torch.cat([given.x, torch.ones(40, 1, dtype=torch.float64)], 1)
    v = torch.ones(40, dtype=torch.float64) if weight is None else torch.from_numpy(weight)
    precision = (x.mT * v) @ x / 0.09 + torch.eye(4, dtype=torch.float64) / 0.49
    expected = torch.linalg.solve(precision, (x.mT * v) @ given.y[:, 0] / 0.09)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)


def test_the_noise_is_that_of_the_residuals():
    given = linear(Gaussian(scale_prior=Normal(scale=1e3)), prior=1e3)
    theta = cr.MLE(**NEWTON, steps=12).fit(given, progress=False).draws.flatten()
    x = torch.cat([given.x, torch.ones(40, 1, dtype=torch.float64)], 1)
    residuals = given.y - x @ torch.linalg.lstsq(x, given.y).solution
    assert float(theta[-1]) == pytest.approx(0.5 * math.log(float(residuals.square().mean())), abs=1e-6)


@pytest.mark.parametrize("likelihood", [Gaussian(0.2), Bernoulli()], ids=["gaussian", "bernoulli"])
def test_the_matrix_is_the_sum_of_jacobians_and_fisher_information(likelihood):
    weight = np.linspace(0.5, 2.0, 50)
    given = curved(likelihood, weight=weight)
    theta = 0.5 * torch.randn(given.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    row = blank_row(describe(given.x), given.device)
    parts = find_parts(given.layout, choose_names(given.layout, None, row), row)

    def outputs(at):
        return given.forward(at.unsqueeze(0), given.x)[0, :, 0]

    jacobian, f = torch.func.jacrev(outputs)(theta), outputs(theta)
    fisher = torch.sigmoid(f) * torch.sigmoid(-f) if isinstance(likelihood, Bernoulli) else torch.full_like(f, 25.0)
    expected = (jacobian.mT * (torch.from_numpy(weight) * fisher)) @ jacobian
    found = gauss_newton_matrix(given, theta, parts)
    torch.testing.assert_close(found, expected[parts.indices][:, parts.indices], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "likelihood, outputs",
    [(Gaussian(), 1), (HeteroscedasticGaussian(), 2), (Bernoulli(), 1)],
    ids=["gaussian", "heteroscedastic", "bernoulli"],
)
def test_every_step_lowers_the_loss_until_the_gradient_vanishes(likelihood, outputs):
    given = curved(likelihood, outputs, noise=0.3, rows=100, hidden=3, prior=0.5)
    fitted = cr.MAP(**NEWTON, steps=60).fit(given, progress=False)
    losses = [loss[0] for loss in fitted.record.history["loss"]]
    assert all(after <= before for before, after in itertools.pairwise(losses))
    gradient = given.log_density_and_grad(fitted.draws.reshape(1, -1)).gradient
    start = cr.MAP(steps=1, lr=1e-12).fit(given, progress=False).draws.reshape(1, -1)
    assert float(gradient.abs().max()) < 1e-4 * float(given.log_density_and_grad(start).gradient.abs().max())


def test_smooth_targets_without_noise_are_fitted_much_closer_than_by_gradients():
    given = curved(Gaussian(), noise=0.0, rows=300, hidden=8)
    ensemble = cr.DeepEnsemble(members=2, **NEWTON, steps=60, validation=0.1, noise_from="held-out", init="fresh")
    fitted = ensemble.fit(given, progress=False)
    x = torch.from_numpy(np.random.default_rng(5).uniform(-1, 1, size=(200, 2)))
    truth = torch.sin(2 * x[:, :1]) * x[:, 1:]
    error = float((fitted.predict(x).mean.reshape(-1, 1) - truth).square().mean().sqrt())
    assert error < 0.01 * float(truth.std())
    adam = cr.DeepEnsemble(members=2, steps=200, validation=0.1, init="fresh").fit(given, progress=False)
    assert error < 0.2 * float((adam.predict(x).mean.reshape(-1, 1) - truth).square().mean().sqrt())
    # All members have one noise: that of the rows that they have not seen.
    assert fitted.record.history["held_out_noise"] * 2 == pytest.approx(fitted.draws.reshape(2, -1)[:, -1].tolist())


def test_members_stop_when_rows_that_they_have_not_seen_are_predicted_worse():
    given = curved(Gaussian(), noise=0.5, rows=60, hidden=8)
    method = cr.DeepEnsemble(members=2, **NEWTON, steps=60, validation=0.2, patience=3, init="fresh")
    history = method.fit(given, progress=False).record.history
    assert history["steps"] < 60
    assert len(history["validation"]) == history["steps"]


def test_large_tables_sum_the_matrix_over_other_rows_in_every_step(monkeypatch):
    seen = []
    real = gauss_newton.gauss_newton_matrix

    def watched(problem, theta, parts):
        seen.append(problem.y[:, 0].clone())
        return real(problem, theta, parts)

    monkeypatch.setattr(gauss_newton, "gauss_newton_matrix", watched)
    monkeypatch.setattr(gauss_newton, "FEWEST", 10)
    given = linear(Gaussian(0.3))
    found = cr.MAP(**NEWTON, steps=30).fit(given, progress=False).draws.flatten()
    # Four parameters have 16 rows of 40, in turn the even and the odd ones.
    assert [len(rows) for rows in seen[:2]] == [20, 20]
    torch.testing.assert_close(seen[0], given.y[::2, 0])
    torch.testing.assert_close(seen[1], given.y[1::2, 0])
    # The gradient has all rows, so that the mode is the same.
    gradient = given.log_density_and_grad(found.reshape(1, -1)).gradient
    assert float(gradient.abs().max()) < 1e-4


def test_what_it_cannot_train_is_refused(monkeypatch):
    given = curved(Gaussian())
    with pytest.raises(InputError, match='optimiser must be "adam" or "sgd" for this method, got \'gauss-newton\''):
        cr.BayesByBackprop(**NEWTON, steps=2).fit(given, progress=False)
    monkeypatch.setattr(gauss_newton, "LARGEST", 20)
    with pytest.raises(InputError, match="'gauss-newton' is for at most 20 parameters, and this network has 38"):
        cr.MAP(**NEWTON).fit(given, progress=False)
