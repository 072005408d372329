"""Modules with other values of their parameters: tied weights, and modules under two names."""

import cProfile

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.networks.calling import call_with, find_ties

f64 = torch.float64


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.b(torch.tanh(self.a(x))))


class Tied(Twice):
    """Two layers with one weight, in a block that is under two names itself."""

    def __init__(self):
        super().__init__()
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.same = nn.ModuleList([self.b])


def made(kind):
    torch.manual_seed(0)
    return kind().to(f64)


@pytest.mark.parametrize("kind", [Twice, Tied])
def test_values_are_used_everywhere_and_nothing_stays_behind(kind):
    net, x = made(kind), randn(5, 3, dtype=f64)
    before = {name: value.clone() for name, value in net.named_parameters()}
    values = {name: value + 1 for name, value in before.items()}
    found = call_with(net, values, (x,), {})
    other = made(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    torch.testing.assert_close(found, other(x))
    every = dict(net.named_parameters(remove_duplicate=False))
    assert all(isinstance(p, nn.Parameter) for p in every.values())
    assert all(torch.equal(every[name], value) for name, value in before.items())


def test_ties_are_attributes_that_differ():
    assert find_ties(made(Twice)) == []
    assert find_ties(made(Tied)) == [[["a.weight"], ["b.weight", "same.0.weight"]]]


@pytest.mark.parametrize("kind", [Twice, Tied])
def test_a_layer_under_two_names_can_be_fitted_and_written(kind):
    x = randn(20, 3, dtype=f64)
    problem = cr.Problem(made(kind), (x, x.sum(1, keepdim=True)), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
    hmc = cr.HMC(chains=2, draws=3, warmup=20, max_steps=4, start_steps=5)
    for method in (cr.MAP(steps=5), cr.DeepEnsemble(members=2, steps=5), hmc):
        theta = method.fit(problem, seed=1).draws.reshape(-1, problem.dim)[-1]
        module = problem.layout.write(theta)
        torch.testing.assert_close(module(x).detach(), problem.layout.call(theta, x))
        assert torch.equal(problem.layout.read(problem.layout.module), problem.layout.read(made(kind)))


def test_problems_can_be_made_under_a_profiler():
    x = randn(8, 3, dtype=f64)
    with cProfile.Profile() as profiler:
        cr.Problem(made(Twice), (x, x[:, :1]), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(1.0))
    assert any("problem.py" in row.code.co_filename for row in profiler.getstats() if not isinstance(row.code, str))
