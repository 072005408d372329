"""Networks that differentiate in forward without switching autograd on, as in most physics-informed code."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn

X = torch.rand(10, 2, generator=torch.Generator().manual_seed(0))
Y = randn(10, 2, seed=1)
METHODS = {
    "map": cr.MAP(steps=3),
    "ensemble": cr.DeepEnsemble(members=2, steps=3),
    "bbb": cr.BayesByBackprop(steps=3),
    "laplace": cr.Laplace(steps=3),
    "hmc": cr.HMC(chains=2, draws=2, warmup=20, max_steps=2, compile=False),
}


class Physics(nn.Module):
    """u and the residual of u_t = 0.1 u_xx."""

    def __init__(self):
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        u = self.u(x)
        first = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
        return torch.cat([u, first[:, 1:] - 0.1 * second[:, :1]], 1)


def problem(likelihood):
    torch.manual_seed(0)
    return cr.Problem(Physics(), (X, Y), likelihood, cr.priors.Normal(1.0))


@pytest.mark.parametrize("likelihood", [cr.likelihoods.Gaussian(0.5), cr.likelihoods.Gaussian()], ids=str)
def test_the_density_and_its_gradient_are_those_of_the_network(likelihood):
    found = problem(likelihood)
    theta = randn(2, found.dim)
    with torch.no_grad():
        outputs = found.forward(theta, X)
    assert not outputs.requires_grad
    expected = found.layout.write(theta[0])(X)
    torch.testing.assert_close(outputs[0], expected.detach())
    assert expected.requires_grad
    evaluation = found.log_density_and_grad(theta)
    torch.testing.assert_close(evaluation.log_density, found.log_density(theta))
    step = 1e-2 * randn(2, found.dim, seed=3)
    change = found.log_density(theta + step) - found.log_density(theta - step)
    torch.testing.assert_close(change, 2 * (evaluation.gradient * step).sum(1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", METHODS)
def test_methods_fit_predict_and_load(name, tmp_path):
    posterior = METHODS[name].fit(problem(cr.likelihoods.Gaussian()), seed=0, progress=False)
    predictive = posterior.predict(X)
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run", Physics()).predict(X)
    assert torch.equal(again.mean, predictive.mean)
    assert not again.mean.requires_grad
    with torch.no_grad():
        assert not posterior.module()(X).requires_grad


def test_the_mode_is_restored_after_an_error():
    found = problem(cr.likelihoods.Gaussian(0.5))
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            found.layout.module(X[:, :1])
        assert not torch.is_grad_enabled()
        assert not found.layout.module(X).requires_grad
