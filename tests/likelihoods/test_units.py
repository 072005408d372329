"""Outputs and targets whose units give a meaningless fit are reported when the problem is built."""

import logging

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, StudentT

X = randn(30, 4)


def warned(caplog, net, y, likelihood):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "credibly"):
        cr.Problem(net, (X, y), likelihood, cr.priors.Normal(1.0))
    return "Standardise y" in caplog.text


@pytest.mark.parametrize(
    "likelihood, outputs", [(Gaussian(), 1), (Gaussian(50.0), 1), (StudentT(), 1), (HeteroscedasticGaussian(), 2)]
)
def test_targets_in_units_of_their_own_are_reported(caplog, likelihood, outputs):
    assert warned(caplog, nn.Linear(4, outputs), 1000 + 200 * X[:, 0], likelihood)
    assert warned(caplog, nn.Linear(4, outputs), 200 * X[:, 0], likelihood)
    assert not warned(caplog, nn.Linear(4, outputs), 3 + 5 * X[:, 0], likelihood)


def test_a_trained_network_may_have_any_units(caplog):
    net = nn.Linear(4, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[200.0, 0.0, 0.0, 0.0]]))
        net.bias.fill_(1000.0)
    assert not warned(caplog, net, 1000 + 200 * X[:, 0] + randn(30, seed=1), Gaussian())


class OwnGradient(nn.Linear):
    """Returns outputs with a graph, also without gradients outside."""

    def forward(self, x):
        with torch.enable_grad():
            return super().forward(x)


def test_outputs_may_carry_a_graph(caplog):
    net = OwnGradient(4, 1)
    assert not warned(caplog, net, X[:, 0], Gaussian())


def test_probabilities_are_no_logits():
    y = torch.arange(30) % 3
    with pytest.raises(cr.InputError, match="sum to 1.* logits are expected.* softmax"):
        cr.Problem(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), (X, y), Categorical(), cr.priors.Normal(1.0))
    pixels = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Softmax(1))
    data = (randn(4, 1, 3, 3), torch.zeros(4, 3, 3, dtype=torch.int64))
    with pytest.raises(cr.InputError, match="sum to 1"):
        cr.Problem(pixels, data, Categorical(axis=1), cr.priors.Normal(1.0))
    logarithms = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1))
    assert cr.Problem(logarithms, (X, y), Categorical(), cr.priors.Normal(1.0)).n == 30
