"""Cutting a network where values begin to depend on random parameters."""

import logging
from typing import ClassVar

import pytest
import torch
from frozen_networks import NETWORKS, Branches, X, stack
from torch import nn

import credibly as cr
from conftest import randn
from credibly.core.inputs import call, map_inputs
from credibly.frozen import features
from credibly.frozen.body import split
from credibly.frozen.replay import NotSplit
from credibly.networks.layout import Layout

Y = X.sum(1) + 0.1 * randn(30, seed=1)


def problem(net, x=X, random=None, **kwargs):
    return cr.Problem(net, (x, Y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(), random=random, **kwargs)


def make(name):
    build, x, random, kind = NETWORKS[name]
    torch.manual_seed(0)
    return build(), x, random, kind


@pytest.mark.parametrize("name", NETWORKS)
def test_head_of_body_is_the_network(name):
    net, x, random, kind = make(name)
    layout = Layout(net, random)
    body = split(layout, layout.module, x)
    assert type(body.head).__name__ == kind
    some = map_inputs(lambda t: t[3:7], x)
    assert torch.equal(call(body.head, body(some)), call(layout.module, some))
    assert {e.name for e in layout.entries} <= set(dict(body.head.named_parameters()))


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "branches"])
def test_density_and_gradient_are_those_of_the_network(name):
    net, x, random, _ = make(name)
    whole = problem(net, x, random)
    part = whole.reduced()
    assert part.whole is whole
    theta = whole.layout.read(net) + 0.1 * randn(3, whole.dim)
    mine, theirs = part.log_density_and_grad(theta), whole.log_density_and_grad(theta)
    # Float32 sums of 30 rows, in another order.
    assert torch.allclose(mine.log_density, theirs.log_density, rtol=1e-5)
    assert torch.allclose(mine.gradient, theirs.gradient, rtol=1e-4, atol=1e-4 * float(theirs.gradient.abs().max()))


def test_the_body_is_the_part_before_the_first_random_layer():
    calls = []
    net = stack()
    whole = problem(net, random="4.*")
    whole.layout.module[0].register_forward_hook(lambda m, args, out: calls.append(len(args[0])))
    part = whole.reduced()
    assert part.x.shape == (30, 8)
    assert torch.equal(part.x, net[:4](X))
    calls.clear()
    posterior = cr.MAP(steps=5, compile=False).fit(whole, seed=0)
    cr.DeepEnsemble(members=2, steps=5).fit(whole, seed=0)
    assert calls == []
    # One row tries the shape, then every row once for all draws.
    assert posterior.predict(X).mean.shape == (30,)
    assert calls == [1, 30]


def test_the_cut_costs_few_passes_of_the_body():
    class Body(nn.Sequential):
        passes: ClassVar[list[int]] = []

        def forward(self, x):
            self.passes.append(len(x))
            return super().forward(x)

    net = nn.Sequential(Body(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), nn.Linear(16, 1)).eval()
    images = randn(30, 1, 4, 4)
    whole = problem(net, images, random="1.*")
    # It runs, twice with the same result; one row alone; in which layout; what depends on what; with a gradient.
    assert Body.passes == [2, 2, 1, 2, 2, 2]
    Body.passes.clear()
    part = whole.reduced()
    # Two passes of three rows show that the parts make the whole. Then every row once, and nothing else.
    assert Body.passes == [3, 3, 30]
    with torch.no_grad():
        assert torch.allclose(part.x, net[0](images), atol=1e-6)
    # The plan of the whole network is tried out only where it is used.
    assert whole.forward.reason == "batched by vmap"
    assert len(Body.passes) > 3


def test_activations_of_other_rows_are_compared_with_the_network():
    whole = problem(stack(), random="4.*")
    frozen = whole.split()
    features = frozen.features(whole.x)
    assert frozen.agrees(whole.x, features)
    assert frozen.agrees(whole.x.flip(0), features.flip(0))
    assert not frozen.agrees(whole.x, features.flip(0))
    assert not frozen.agrees(whole.x.flip(0), features)


def test_a_stack_takes_the_backend_of_a_stack():
    part = problem(stack(), random="4.*").reduced()
    hand = problem(nn.Sequential(nn.Linear(8, 1)), randn(30, 8))
    assert (part.forward.small_stack is None) == (hand.forward.small_stack is None) is False
    assert part.forward.small_stack.layers == hand.forward.small_stack.layers


def test_nothing_is_cut_where_there_is_little_to_gain(caplog):
    with caplog.at_level(logging.INFO, "credibly"):
        whole = problem(stack(), random=("0.bias", "2.*", "4.*"))
        assert whole.reduced() is whole
    assert "frozen body: no activations are stored" in caplog.text
    assert problem(stack()).reduced().whole is None


def test_embeddings_alone_are_no_body():
    net = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(8, 1))
    whole = problem(net, torch.arange(60).reshape(30, 2) % 50, random="2.*")
    assert whole.reduced() is whole


@pytest.mark.parametrize("in_place", [lambda h: h.add_(1.0), lambda h: h.mul_(2.0)])
def test_code_that_changes_activations_in_place_is_not_cut(in_place):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            h = self.a(x)
            late = self.c(torch.tanh(self.b(h)))
            in_place(h)
            return late + self.c(h)

    layout = Layout(Changes(), ("b.*", "c.*"))
    with pytest.raises(NotSplit, match="in place"):
        split(layout, layout.module, X)


def test_branches_on_values_give_the_right_answer():
    torch.manual_seed(0)
    net = Branches()
    order = X.sum(1).argsort()
    whole = problem(net, X[order], "fc.*")
    part = whole.reduced()
    theta = whole.layout.read(net).unsqueeze(0)
    assert torch.allclose(part.log_density(theta), whole.log_density(theta), rtol=1e-5)


def test_autocast_keeps_the_whole_network():
    whole = problem(stack(), random="4.*", precision="bf16")
    assert whole.reduced() is whole


def test_large_activations_are_kept_on_disk(monkeypatch, caplog):
    net = stack()
    expected = problem(net, random="4.*").reduced().x
    monkeypatch.setattr(features, "MEMORY_BYTES", 100)
    monkeypatch.setattr(features, "BODY_VALUES", 200)
    whole = problem(net, random="4.*")
    with caplog.at_level(logging.INFO, "credibly"):
        part = whole.reduced()
    assert "activations of 30 rows" in caplog.text
    assert "on disk" in caplog.text
    assert torch.allclose(part.x, expected, atol=1e-6)
    posterior = cr.MAP(steps=3).fit(whole, seed=0)
    found = posterior.record.history["frozen_body"]
    assert found == {"boundary": "input of 4 (8 values per row)", "bytes": 30 * 8 * 4, "on_disk": True}


def test_subsets_and_further_rows_keep_their_activations():
    whole = problem(stack(), random="4.*")
    whole.reduced()
    rows = torch.tensor([3, 1, 7])
    part = whole.subset(rows)
    assert torch.allclose(part.features, stack_features(whole, X[rows]), atol=1e-6)
    more = whole.subset(torch.arange(5)).with_rows((X[5:9], whole.y[5:9]))
    assert torch.allclose(more.features, stack_features(whole, X[:9]), atol=1e-6)
    assert more.reduced().n == 9
    assert more.reduced().fingerprint() == more.fingerprint() == whole.subset(torch.arange(9)).fingerprint()


def stack_features(whole, x):
    with torch.no_grad():
        return whole.layout.module[:4](x)
