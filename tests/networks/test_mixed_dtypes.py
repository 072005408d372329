"""Layers of several dtypes: a head in float32 on a body in bfloat16, which training loops run under autocast."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.networks.layout import Layout

METHODS = {
    "map": cr.MAP(steps=3),
    "ensemble": cr.DeepEnsemble(members=2, steps=3),
    "bbb": cr.BayesByBackprop(steps=3),
    "laplace": cr.Laplace(steps=3),
    "dropout": cr.MCDropout(steps=3),
}


class Mixed(nn.Module):
    """Nothing here casts: plain calls raise, autocast runs it."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 4, batch_first=True).bfloat16()
        self.norm, self.drop, self.head = nn.LayerNorm(4).bfloat16(), nn.Dropout(0.2), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.drop(self.norm(torch.relu(self.cell(x)[0][:, -1]))))


X, Y = randn(8, 5, 3), torch.arange(8) % 2


def problem(**options):
    torch.manual_seed(0)
    return cr.Problem(Mixed(), (X, Y), cr.likelihoods.Categorical(), cr.priors.Normal(1.0), **options)


def test_the_head_computes_in_float32():
    layout = problem().layout
    net = layout.module
    hidden = net.norm(torch.relu(net.cell(X.bfloat16())[0][:, -1]))
    assert hidden.dtype == torch.bfloat16
    expected = nn.functional.linear(hidden.float(), net.head.weight, net.head.bias)
    assert torch.equal(net(X), expected)
    assert torch.equal(layout.write(layout.read(net))(X), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(X).dtype == torch.bfloat16


@pytest.mark.parametrize("random", [None, "head.*"], ids=["all", "head"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_fit_predict_and_load(name, random, tmp_path):
    posterior = METHODS[name].fit(problem(random=random), seed=0, progress=False)
    predictive = posterior.predict(X)
    assert predictive.mean.dtype == torch.float32
    assert bool(torch.isfinite(predictive.mean).all())
    posterior.save(tmp_path / "run")
    assert torch.equal(cr.load(tmp_path / "run", Mixed()).predict(X).mean, predictive.mean)


def test_layers_are_prepared_once_and_only_if_dtypes_differ():
    twice = Layout(Layout(Mixed()).module).module
    assert [len(part._forward_pre_hooks) for part in (twice.cell, twice.norm, twice.head)] == [1, 0, 1]
    assert not Layout(Mixed().float()).module.head._forward_pre_hooks
