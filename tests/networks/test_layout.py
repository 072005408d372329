"""Any module to and from a flat vector."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.networks.layout import Layout


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("shift", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x))) + self.shift


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(0, 3))
def test_split_and_flatten_are_inverse(sizes, lead):
    layout = Layout(mlp(*sizes), extra={"likelihood.log_scale": (2,)})
    theta = randn(*([2] * lead), layout.dim)
    parameters, extra = layout.split(theta)
    assert all(
        tuple(parameters[e.name].shape) == (2,) * lead + e.shape for e in layout.entries if e.name not in layout.extra
    )
    assert tuple(extra["likelihood.log_scale"].shape) == (2,) * lead + (2,)
    assert torch.equal(layout.flatten(parameters, extra), theta)


def test_read_write_round_trip():
    net = mlp(3, 4, 2)
    layout = Layout(net)
    assert layout.dim == sum(p.numel() for p in net.parameters())
    x = randn(5, 3)
    theta = layout.read(net)
    assert torch.equal(layout.call(theta, x), net(x))
    assert torch.equal(layout.write(2 * theta)(x), layout.call(2 * theta, x))
    assert not torch.equal(layout.write(2 * theta)(x), net(x))


def test_tied_parameters_count_once_and_stay_tied():
    net = Tied()
    layout = Layout(net)
    assert layout.dim == 9
    x = randn(5, 3)
    w = randn(9, seed=1)
    expected = torch.tanh(x @ w.reshape(3, 3).T) @ w.reshape(3, 3).T + torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(layout.call(w, x), expected)
    torch.testing.assert_close(layout.write(w)(x), expected)
    problem = cr.Problem(net, data=(x, expected), likelihood=cr.likelihoods.Gaussian(0.1), prior=cr.priors.Normal())
    torch.testing.assert_close(problem.forward(torch.stack([w, 0 * w]), x)[0], expected)


def test_tied_layers_of_a_stack_share_one_value():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    net = nn.Sequential(a, nn.Tanh(), b)
    x = randn(4, 3)
    problem = cr.Problem(net, data=(x, x), likelihood=cr.likelihoods.Gaussian(0.1), prior=cr.priors.Normal())
    assert problem.dim == 9 + 3 + 3
    theta = randn(2, problem.dim)
    for c in range(2):
        torch.testing.assert_close(problem.forward(theta, x)[c], problem.layout.write(theta[c])(x))


@pytest.mark.parametrize(
    "pattern, dim", [("2.*", 5), ("*.bias", 5), (["0.bias", "2.bias"], 5), ("2.weight", 4), ("*", 21)]
)
def test_random_by_pattern_leaves_the_rest_as_given(pattern, dim):
    net, x, y = mlp(3, 4, 1), randn(6, 3), randn(6, seed=1)
    problem = cr.Problem(
        net, data=(x, y), likelihood=cr.likelihoods.Gaussian(0.3), prior=cr.priors.Normal(), random=pattern
    )
    assert problem.dim == dim
    theta = randn(3, dim, seed=2)
    for c in range(3):
        module = problem.layout.write(theta[c])
        torch.testing.assert_close(problem.forward(theta, x)[c], module(x))
        for name, value in net.named_parameters():
            if name not in {e.name for e in problem.layout.entries}:
                assert torch.equal(dict(module.named_parameters())[name], value)


def test_bayesian_last_layer_keeps_the_pretrained_part_through_fit_and_load(tmp_path):
    net, x, y = mlp(3, 4, 1), randn(20, 3), randn(20, seed=1)
    problem = cr.Problem(
        net, data=(x, y), likelihood=cr.likelihoods.Gaussian(0.3), prior=cr.priors.Normal(), random="2.*"
    )
    posterior = cr.DeepEnsemble(members=3, steps=20).fit(problem, seed=0)
    assert torch.equal(dict(posterior.module(1).named_parameters())["0.weight"], net[0].weight)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", mlp(3, 4, 1, seed=99))  # other weights, which the stored ones must replace
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


def test_fan_in():
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 2), nn.Embedding(10, 4), nn.Linear(7, 3), nn.LayerNorm(3)
    )
    fans = {e.name: e.fan_in for e in Layout(net).entries}
    assert fans["0.weight"] == 1 * 3 * 3
    assert fans["1.weight"] == 6 * 2 * 2
    assert fans["2.weight"] == 1
    assert fans["3.weight"] == 7
    assert fans["3.bias"] == fans["4.weight"] == 1


def test_initial_values_differ_between_members_and_repeat_with_the_seed():
    layout = Layout(mlp(3, 4, 1))
    a, b = layout.reinitialised(0, 3), layout.reinitialised(0, 3)
    assert torch.equal(a, b)
    assert not torch.equal(a[0], a[1])
    assert torch.equal(
        layout.reinitialised(0, 1, first=2)[0], a[2]
    )  # a member's initial values do not depend on the others
    assert not torch.equal(layout.reinitialised(1, 1)[0], a[0])
    assert (
        float(a[:, layout.entries[0].start : layout.entries[0].stop].abs().max()) <= 3**-0.5
    )  # torch's rule for Linear


def test_in_place_activations_do_not_touch_the_data():
    x, y = randn(6, 3), randn(6, seed=1)
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1))
    problem = cr.Problem(net, data=(x, y), likelihood=cr.likelihoods.Gaussian(0.3), prior=cr.priors.Normal())
    before = problem.x.clone()
    cr.DeepEnsemble(members=2, steps=2).fit(problem, seed=0).predict(x)
    assert torch.equal(problem.x, before)
    assert net[0].inplace  # the caller's module is unchanged


def test_dropout_is_off_in_the_density():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    problem = cr.Problem(
        net, data=(randn(6, 3), randn(6)), likelihood=cr.likelihoods.Gaussian(0.3), prior=cr.priors.Normal()
    )
    theta = randn(1, problem.dim)
    assert torch.equal(problem.log_density(theta), problem.log_density(theta))
