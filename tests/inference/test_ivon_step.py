"""IVON on large networks: the same Gaussians as on the flat vector, in torch and in C++."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.backends.cpp import ivon as cpp
from credibly.backends.cpp.library import library
from credibly.core.rng import fill_normal
from credibly.inference.kernels.ivon import LIMIT, deviation, update_gaussian
from credibly.inference.training import ivon_step
from credibly.likelihoods import Categorical, Gaussian

f64 = torch.float64
X = randn(40, 3, dtype=f64)
Y = (X.sum(1) > 0).long()


def problem(dtype=f64, likelihood=None, prior=None, y=Y, **kwargs):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2 if likelihood is None else 1)).to(dtype)
    prior = prior or {"0.*": cr.priors.Normal(0.7), "*": cr.priors.Normal(1.3, 0.1)}
    return cr.Problem(net, (X.to(dtype), y), likelihood or Categorical(), prior, **kwargs)


@pytest.fixture
def large(monkeypatch):
    """Make networks large, or small; return the steps on the module that were made."""
    made = []

    class Watched(ivon_step.IVONModuleStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    def switch(on):
        made.clear()
        monkeypatch.setattr(ivon_step, "LARGE", 1 if on else 10**9)
        monkeypatch.setattr("credibly.methods.ivon.IVONModuleStep", Watched)
        return made

    return switch


@pytest.mark.parametrize("settings", [{}, {"members": 3, "batch_size": 8}, {"samples": 2}, {"warmup": 3}], ids=str)
@pytest.mark.parametrize("weights", [None, torch.linspace(0.5, 2, 40, dtype=f64)], ids=["plain", "weighted"])
def test_steps_on_the_module_are_those_on_the_flat_vector(large, settings, weights):
    given = problem(temperature=cr.Tempering(0.5, 2.0), sample_weight=weights)
    method = cr.IVON(steps=20, compile=False, **settings)
    assert large(False) == []
    flat = method.fit(given, seed=3)
    made = large(True)
    module = method.fit(given, seed=3)
    assert len(made) == 1
    torch.testing.assert_close(module.phi, flat.phi, rtol=1e-9, atol=1e-9)
    for part in ("misfit", "complexity"):
        mine, theirs = (torch.tensor(q.record.history["parts"][part], dtype=f64) for q in (module, flat))
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_learned_noise_is_part_of_the_gaussian(large):
    method, given = cr.IVON(steps=15, compile=False), problem(likelihood=Gaussian(), y=X.sum(1))
    large(False)
    flat = method.fit(given, seed=0)
    assert large(True) == []
    torch.testing.assert_close(method.fit(given, seed=0).phi, flat.phi, rtol=1e-9, atol=1e-9)


def test_other_priors_take_the_flat_vector(large):
    made = large(True)
    cr.IVON(steps=3, compile=False).fit(problem(prior=cr.priors.Laplace(1.0)), seed=0)
    assert made == []


def test_streams_of_large_networks(large):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    given = problem()
    net = given.layout.module
    made = large(True)
    streamed = cr.Problem(net, cr.data.Stream(loader), Categorical(), cr.priors.Normal(1.0))
    posterior = cr.IVON(steps=30, members=2, compile=False).fit(streamed, seed=0)
    assert len(made) == 1
    assert posterior.loc.shape == (2, given.dim)
    assert bool(torch.isfinite(posterior.phi).all())


def test_training_in_float32_by_cpp_approaches_the_same_gaussian(large):
    """C++ draws other numbers than torch, so the comparison is between Gaussians after many steps."""
    if library() is None:
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    x = randn(60, 3)
    given = cr.Problem(nn.Linear(3, 1), (x, x.sum(1)), Gaussian(0.3), cr.priors.Normal(0.5))
    made = large(True)
    posterior = cr.IVON(steps=2000, beta2=0.995).fit(given, seed=0)
    assert made[0].by_cpp
    design = torch.cat([x, torch.ones(60, 1)], 1).double()
    precision = design.T @ design / 0.09 + torch.eye(4, dtype=f64) / 0.25
    width, mean = precision.diagonal().rsqrt(), torch.linalg.solve(precision, design.T @ x.sum(1).double() / 0.09)
    # As in tests/methods/test_conjugate.py, with one draw per step.
    related = torch.square(precision * width * width.unsqueeze(1)).sum(1) + 1
    assert float(((posterior.std[0] / width) ** 2 - 1).abs().div((related * 0.005 / 1.995).sqrt()).max()) < 4
    assert float(((posterior.loc[0] - mean) / width).abs().max()) < 4 * float((0.007 / 2 * related).max().sqrt())


def test_a_newton_step_is_limited_by_the_width_that_one_row_would_leave():
    mean, momentum, curvature = torch.zeros(3), torch.zeros(3), torch.full((3,), 0.09)
    gradient = torch.tensor([1e6, 1e-3, -1e6])
    update_gaussian(mean, curvature, momentum, gradient, curvature.clone(), 0.0, 0.0, (0.0, 0.9), 0.5, 1.0)
    limit = 0.5 * LIMIT / 0.3
    torch.testing.assert_close(mean, torch.tensor([-limit, -0.5 * 1e-3 / 0.09, limit]))


def test_relu_networks_under_a_wide_prior_do_not_diverge():
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    y = x[:, 0] - x[:, 1] ** 2 + torch.sin(3 * x[:, 2])
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    problem = cr.Problem(net, (x, y), Gaussian(), cr.priors.Normal(1.0))
    history = cr.IVON(steps=1500).fit(problem, seed=0).record.history
    constant = -torch.distributions.Normal(y.mean(), y.std()).log_prob(y).mean()
    assert history["parts"]["misfit"][-1][0] < float(constant)


@pytest.mark.parametrize("same", [True, False])
def test_cpp_draws_and_updates_are_those_of_the_kernels(same):
    if library() is None:
        pytest.skip("no C++ compiler")
    dim, n = 1000, 50.0
    mean, momentum, gradient = (randn(dim, seed=s) for s in (1, 2, 3))
    curvature = randn(dim, seed=4).abs() + 0.5
    delta = torch.full((dim,), 0.3) if same else randn(dim, seed=5).abs()
    drawn, numbers, keys = torch.empty(dim), torch.empty(1024), (12345, 678)
    cpp.draw(drawn, mean, curvature, 0.3 if same else delta, n, keys)
    fill_normal(numbers, keys)
    torch.testing.assert_close(drawn, mean + numbers[:dim] * deviation(curvature, delta, n), rtol=1e-5, atol=1e-5)
    mine = tuple(t.clone() for t in (mean, curvature, momentum))
    cpp.update(mine, gradient, drawn, n, (0.3, 0.1), (0.9, 0.99), 0.05, 1.5)
    found = gradient * (drawn - mean) * n * (curvature + 0.3)
    before = mean.clone()
    update_gaussian(mean, curvature, momentum, gradient, found, 0.3, 0.1, (0.9, 0.99), 0.05, 1.5)
    limited = (mean - before).abs() > 0.999 * 0.05 * LIMIT * torch.rsqrt(curvature + 0.3)
    assert 0 < int(limited.sum()) < dim
    for a, b in zip(mine, (mean, curvature, momentum)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
