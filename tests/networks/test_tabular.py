"""Periodic embeddings of numeric columns."""

from __future__ import annotations

import math

import pytest
import torch

import credibly as cr
from credibly.likelihoods import Gaussian
from credibly.networks.tabular import PeriodicEmbedding, tabular_mlp


def test_outputs_follow_the_formula():
    layer = PeriodicEmbedding(4, [2, 0], frequencies=3, width=2, scale=0.5)
    x = torch.randn(7, 4)
    out = layer(x)
    assert out.shape == (7, layer.outputs) == (7, 8)
    torch.testing.assert_close(out[:, :4], x)
    for row in range(7):
        for k, j in enumerate((2, 0)):
            angles = [2 * math.pi * float(c) * float(x[row, j]) for c in layer.frequency]
            waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
            for unit in (2 * k, 2 * k + 1):
                expected = torch.relu(layer.weight[unit] @ waves + layer.bias[unit])
                torch.testing.assert_close(out[row, 4 + unit], expected, rtol=1e-5, atol=1e-6)


def test_absurd_inputs_are_clipped():
    layer = PeriodicEmbedding(2, [0], limit=8.0)
    torch.testing.assert_close(layer(torch.tensor([[1e6, -50.0]])), layer(torch.tensor([[8.0, -8.0]])))


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    return cr.Problem(
        tabular_mlp(5, (6,), embedded=[1, 3]), (x, x[:, 0]), Gaussian(0.1), cr.priors.Normal(1.0, fan_in=True)
    )


def test_many_networks_at_once_equal_one_after_the_other(problem):
    theta = problem.prior.sample(3, torch.Generator().manual_seed(1))
    together = problem.forward(theta, problem.x)
    for k in range(3):
        torch.testing.assert_close(together[k], problem.layout.call(theta[k], problem.x), rtol=1e-5, atol=1e-5)


def test_fan_in_is_that_of_the_own_column(problem):
    assert {e.name: e.fan_in for e in problem.layout.entries}["0.weight"] == 32


def test_a_stored_network_is_rebuilt(problem, tmp_path):
    posterior = cr.DeepEnsemble(members=2, steps=5).fit(problem, progress=False)
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run").predict(problem.x)
    assert torch.equal(again.mean, posterior.predict(problem.x).mean)


@pytest.mark.parametrize("columns", [[], [5], [-1], [1.5], ["a"]])
def test_bad_columns(columns):
    with pytest.raises(cr.InputError, match="columns"):
        PeriodicEmbedding(5, columns)


def test_without_columns_it_is_a_plain_network():
    assert all(not isinstance(part, PeriodicEmbedding) for part in tabular_mlp(3, (4,)))
