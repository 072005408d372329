"""A posterior as a BoTorch model: joint samples, moments, gradients in X, and a round of optimisation."""

import sys

import pytest
import torch

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian

f64 = torch.float64
X = 2 * torch.rand(30, 2, generator=torch.Generator().manual_seed(0), dtype=f64) - 1
Y = -(X - 0.3).square().sum(1) + 0.02 * randn(30, seed=1, dtype=f64)
METHODS = {
    "ensemble": cr.DeepEnsemble(members=6, steps=200),
    "bbb": cr.BayesByBackprop(steps=200),
    "laplace": cr.Laplace(steps=200),
    "dropout": cr.MCDropout(steps=200, insert="*"),
    "hmc": cr.HMC(chains=2, draws=10, warmup=30, trajectory_length=0.3, compile=False),
}


@pytest.fixture(scope="module")
def posteriors():
    problem = cr.Problem(mlp(2, 8, 1, dtype=f64), (X, Y), Gaussian(0.05), cr.priors.Normal())
    return {name: method.fit(problem, seed=0) for name, method in METHODS.items()}


@pytest.mark.parametrize("name", METHODS)
def test_moments_samples_and_gradients(name, posteriors):
    pytest.importorskip("botorch")
    from botorch.sampling.get_sampler import get_sampler

    posterior = posteriors[name]
    model = posterior.as_botorch()
    points = randn(3, 4, 2, seed=5, dtype=f64).requires_grad_()
    found = model.posterior(points)
    settings = dict(posterior.joint_settings)
    functions = posterior.predict(points.detach().reshape(-1, 2), **settings).functions().reshape(-1, 3, 4)
    assert found.mean.shape == (3, 4, 1)
    torch.testing.assert_close(found.mean.squeeze(-1), functions.mean(0))
    torch.testing.assert_close(found.variance.squeeze(-1), functions.var(0))
    drawn = get_sampler(found, torch.Size([64]))(found)
    assert drawn.shape == (64, 3, 4, 1)
    # A sample is one of the functions at all q points.
    distance = (drawn.detach()[:, None, 0, :, 0] - functions[None, :, 0]).abs().amax(-1).amin(1)
    assert float(distance.max()) < 1e-12
    (gradient,) = torch.autograd.grad(found.mean.sum(), points)
    step = torch.zeros_like(points)
    step[1, 2, 0] = 1e-5
    ends = [model.posterior(points.detach() + sign * step).mean.sum() for sign in (1, -1)]
    assert float(gradient[1, 2, 0]) == pytest.approx(float((ends[0] - ends[1]) / 2e-5), rel=1e-5, abs=1e-8)


def test_optimisation_of_an_acquisition_function(posteriors):
    """The candidates improve on random points, and lie near the maximum of the true function at 0.3."""
    pytest.importorskip("botorch")
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim import optimize_acqf

    model = posteriors["hmc"].as_botorch()
    acquisition = qLogExpectedImprovement(model, best_f=float(Y.max()) - 0.02)
    bounds = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=f64)
    torch.manual_seed(0)
    candidates, value = optimize_acqf(
        acquisition, bounds, q=2, num_restarts=2, raw_samples=32, options={"maxiter": 30, "seed": 0}
    )
    random = acquisition(2 * torch.rand(50, 2, 2, generator=torch.Generator().manual_seed(1), dtype=f64) - 1)
    assert candidates.shape == (2, 2)
    assert float(value) >= float(random.detach().max())
    assert float((candidates - 0.3).norm(dim=1).min()) < 0.35


def test_a_fully_bayesian_model_has_the_expected_improvement_of_the_mixture(posteriors):
    pytest.importorskip("botorch")
    from botorch.acquisition.analytic import LogExpectedImprovement
    from botorch.optim import optimize_acqf

    posterior, best = posteriors["hmc"], float(Y.max())
    model = posterior.as_botorch(mixture=True)
    points = randn(5, 1, 2, seed=3, dtype=f64)
    acquisition = LogExpectedImprovement(model, best_f=best)
    exact = cr.decide.expected_improvement(posterior.predict(points.squeeze(1)), best, of="observation")
    torch.testing.assert_close(acquisition(points).exp(), exact, rtol=1e-6, atol=1e-12)
    found = model.posterior(points)
    p = posterior.predict(points.squeeze(1))
    torch.testing.assert_close(found.mixture_mean.flatten(), p.mean)
    torch.testing.assert_close(found.mixture_variance.flatten(), p.variance)
    torch.testing.assert_close(
        found.quantile(torch.tensor([0.1], dtype=f64)).flatten(), p.quantile(0.1), atol=1e-5, rtol=0
    )
    bounds = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=f64)
    torch.manual_seed(0)
    candidate, value = optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=16, options={"maxiter": 20})
    assert float(value) >= float(acquisition(points.clamp(-1, 1)).max())
    assert float((candidate - 0.3).norm()) < 0.4


def test_a_mixture_of_one_target_with_an_axis():
    """Targets of shape (n, 1), as BoTorch has them."""
    pytest.importorskip("botorch")
    problem = cr.Problem(mlp(2, 4, 1, dtype=f64), (X, Y.unsqueeze(1)), Gaussian(0.1), cr.priors.Normal())
    posterior = cr.DeepEnsemble(members=3, steps=20).fit(problem, seed=0)
    points = randn(5, 1, 2, seed=3, dtype=f64)
    found, p = posterior.as_botorch(mixture=True).posterior(points), posterior.predict(points.squeeze(1))
    torch.testing.assert_close(found.mixture_mean.squeeze(1), p.mean)
    torch.testing.assert_close(found.mixture_variance.squeeze(1), p.variance)


def test_float32_networks_take_double_points(posteriors):
    pytest.importorskip("botorch")
    problem = cr.Problem(mlp(2, 4, 2), (X.float(), torch.stack([Y, -Y], 1).float()), Gaussian(0.1), cr.priors.Normal())
    model = cr.DeepEnsemble(members=3, steps=20).fit(problem, seed=0).as_botorch()
    found = model.posterior(randn(5, 2, dtype=f64))
    assert found.mean.dtype == f64
    assert found.mean.shape == (5, 2)
    assert model.num_outputs == 2
    with pytest.raises(cr.InputError, match="has 3 inputs per point, the network takes 2"):
        model.posterior(randn(5, 3, dtype=f64))
    with pytest.raises(cr.InputError, match="mixture must be False for Gaussian with 2 targets"):
        cr.MAP(steps=2).fit(problem, seed=0).as_botorch(mixture=True)


def test_a_frozen_body(posteriors):
    pytest.importorskip("botorch")
    problem = cr.Problem(mlp(2, 4, 1, dtype=f64), (X, Y), Gaussian(0.1), cr.priors.Normal(), random="2.*")
    posterior = cr.DeepEnsemble(members=3, steps=20).fit(problem, seed=0)
    points = X[:4].clone().requires_grad_()
    found = posterior.as_botorch().posterior(points)
    torch.testing.assert_close(found.mean.squeeze(-1), posterior.predict(X[:4]).mean)
    assert bool((torch.autograd.grad(found.mean.sum(), points)[0] != 0).any())


def test_without_botorch(posteriors, monkeypatch):
    monkeypatch.setitem(sys.modules, "botorch.models.ensemble", None)
    with pytest.raises(cr.InputError, match=r"as_botorch: needs botorch.*credibly\[botorch\]"):
        posteriors["ensemble"].as_botorch()


def test_points_are_vectors():
    images = cr.Problem(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1)),
        (randn(5, 2, 2), randn(5)),
        Gaussian(0.1),
        cr.priors.Normal(),
    )
    pytest.importorskip("botorch")
    with pytest.raises(cr.InputError, match="points are vectors of numbers"):
        cr.MAP(steps=2).fit(images, seed=0).as_botorch()
