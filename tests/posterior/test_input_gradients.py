"""Predictions as functions of the inputs: their gradients against finite differences."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian

f64 = torch.float64
X = randn(20, 3, dtype=f64)
Y = X.sum(1) + 0.1 * randn(20, seed=1, dtype=f64)
METHODS = {
    "ensemble": cr.DeepEnsemble(members=3, steps=60),
    "bbb": cr.BayesByBackprop(steps=60),
    "laplace": cr.Laplace(steps=60),
    "swag": cr.SWAG(steps=60, rank=3, iterates=6, every=5),
    "dropout": cr.MCDropout(steps=60, insert="*"),
}
RESULTS = {
    "mean": lambda p, y: p.mean,
    "variance": lambda p, y: p.variance,
    "aleatoric": lambda p, y: p.aleatoric,
    "epistemic": lambda p, y: p.epistemic,
    "log_prob": lambda p, y: p.log_prob(y),
    "functions": lambda p, y: p.functions(3),
    "sample": lambda p, y: p.sample(2),
}


def check(posterior, x, y, results):
    for name in results:
        assert torch.autograd.gradcheck(
            lambda at, name=name: RESULTS[name](posterior.predict(at, grad=True), y), (x.clone().requires_grad_(),)
        ), name


@pytest.mark.parametrize("name", METHODS)
def test_mlp(name):
    problem = cr.Problem(mlp(3, 5, 2, dtype=f64), (X, Y), HeteroscedasticGaussian(), cr.priors.Normal())
    posterior = METHODS[name].fit(problem, seed=0)
    check(posterior, X[:3], Y[:3], RESULTS)
    with_graph, without = posterior.predict(X.clone().requires_grad_(), grad=True), posterior.predict(X)
    assert with_graph.mean.requires_grad
    assert not without.mean.requires_grad
    if name != "laplace":  # whose differentiable predictions are joint
        torch.testing.assert_close(with_graph.variance, without.variance)
        torch.testing.assert_close(with_graph.interval(0.9)[0], without.interval(0.9)[0])


def test_cnn_and_labels():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3)).double()
    images, labels = randn(12, 1, 4, 4, dtype=f64), torch.arange(12) % 3
    problem = cr.Problem(net, (images, labels), Categorical(), cr.priors.Normal())
    check(METHODS["ensemble"].fit(problem, seed=0), images[:2], labels[:2], ("mean", "epistemic", "log_prob"))
    check(METHODS["laplace"].fit(problem, seed=0), images[:1], labels[:1], ("mean",))


def test_through_a_frozen_body():
    problem = cr.Problem(mlp(3, 5, 1, dtype=f64), (X, Y), Gaussian(0.3), cr.priors.Normal(), random="2.*")
    check(METHODS["ensemble"].fit(problem, seed=0), X[:2], Y[:2], ("mean", "epistemic"))


def test_each_result_has_its_own_graph_and_dicts_keep_theirs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = mlp(3, 4, 1, dtype=f64)

        def forward(self, a, b):
            return self.layer(a + b)

    problem = cr.Problem(Two(), ({"a": X, "b": X}, Y), Gaussian(0.3), cr.priors.Normal())
    posterior = METHODS["ensemble"].fit(problem, seed=0)
    a = X[:2].clone().requires_grad_()
    p = posterior.predict({"a": a, "b": X[:2]}, grad=True)
    p.mean.sum().backward()
    first = a.grad.clone()
    p.epistemic.sum().backward()
    assert bool((first != 0).any())
    assert not torch.equal(a.grad, first)


def test_x_has_to_require_a_gradient():
    problem = cr.Problem(mlp(3, 5, 1, dtype=f64), (X, Y), Gaussian(0.3), cr.priors.Normal())
    posterior = cr.MAP(steps=3).fit(problem, seed=0)
    with pytest.raises(cr.InputError, match=r"x: requires no gradient.*x\.requires_grad_\(\)"):
        posterior.predict(X, grad=True)
