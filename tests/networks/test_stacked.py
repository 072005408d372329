"""The batched forward pass of plain stacks against the network itself, in both layouts of its products."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import credibly as cr
from conftest import randn
from credibly.forward import Forward
from credibly.inference.target import ProblemTarget
from credibly.networks import stacked
from credibly.networks.dropout_masks import find_sites, masked_copy
from credibly.networks.layout import Layout

f64 = torch.float64


@pytest.mark.parametrize("rows", [5, 80], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    "random, biased", [("*", True), ("*weight", True), ("*bias", True), ("*", False), ("*weight", False)]
)
@pytest.mark.parametrize("shared", [True, False])
def test_outputs_and_gradients_are_those_of_the_network(rows, random, biased, shared):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(40, 30, bias=biased), nn.Tanh(), nn.Linear(30, 50, bias=biased), nn.ReLU(), nn.Linear(50, 3)
    )
    layout = Layout(net.to(f64), random)
    x = torch.randn(rows, 40, dtype=f64) if shared else torch.randn(4, rows, 40, dtype=f64)
    forward = Forward(layout, "auto", x[:1] if shared else x[0, :1])
    assert forward.stack is not None
    theta = torch.randn(4, layout.dim, dtype=f64, requires_grad=True)
    given = torch.randn(4, rows, 3, dtype=f64)
    outputs = forward(theta, x, shared=shared)
    (gradient,) = torch.autograd.grad((outputs * given).sum(), theta)
    one_by_one = torch.stack(
        [functional_call(layout.module, layout.split(t)[0], (x if shared else x[c],)) for c, t in enumerate(theta)]
    )
    (expected,) = torch.autograd.grad((one_by_one * given).sum(), theta)
    torch.testing.assert_close(outputs, one_by_one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-11)


def test_axes_between_rows_and_features_are_kept_in_both_layouts():
    torch.manual_seed(0)
    layout = Layout(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2)).to(f64))
    theta = torch.randn(3, layout.dim, dtype=f64)
    for rows in (2, 40):  # 6 and 120 products per chain: fewer and more than the features
        x = torch.randn(rows, 3, 64, dtype=f64)
        outputs = Forward(layout, "auto", x[:1])(theta, x)
        torch.testing.assert_close(outputs, torch.stack([layout.call(t, x) for t in theta]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [3, 60], ids=["mask on values", "mask on weights"])
@pytest.mark.parametrize("first", [True, False], ids=["from the input on", "before the last layer"])
@pytest.mark.parametrize("inserted", [False, True])
def test_masks_on_weights_are_masks_on_values(rows, first, inserted):
    torch.manual_seed(0)
    drops = [[] if inserted else [nn.Dropout(0.3)] for _ in range(2)]
    layers = [*(drops[0] if first else []), nn.Linear(7, 9), nn.ReLU(), *drops[1], nn.Linear(9, 2, bias=False)]
    net = nn.Sequential(*layers).to(f64)
    patterns = ("*" if first else "2") if inserted else None
    masked, rates = masked_copy(Layout(net).module, patterns, 0.3)
    x = torch.randn(rows, 7, dtype=f64)
    sites, shapes = find_sites(masked, rates, x[:1])
    assert len(sites) == 1 + first
    masks = {s.mask: (torch.rand(5, 1, *shapes[s.name], dtype=f64) < 0.7) / 0.7 for s in sites}
    outputs = Forward(Layout(net), "auto", x[:1], module=masked).apply(masks, x)
    expected = [functional_call(masked, {name: m[c] for name, m in masks.items()}, (x,)) for c in range(5)]
    torch.testing.assert_close(outputs, torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 41, 4), (5, 7, 1), (2, 455, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_silu_of_a_chain_does_not_depend_on_the_others(shape, dtype):
    h = randn(*shape, dtype=dtype, seed=2) * 3
    h.requires_grad_(True)
    weights = randn(*shape, dtype=dtype, seed=3)
    together = stacked._silu(h)
    slope = torch.autograd.grad((together * weights).sum(), h)[0]
    torch.testing.assert_close(together, torch.nn.functional.silu(h))
    for chain in range(shape[0]):
        own = h[chain : chain + 1].detach().clone().requires_grad_(True)
        alone = stacked._silu(own)
        assert torch.equal(alone[0], together[chain])
        mine = torch.autograd.grad((alone * weights[chain : chain + 1]).sum(), own)[0]
        assert torch.equal(mine[0], slope[chain])


def test_silu_has_a_second_derivative():
    h = randn(3, 5, dtype=torch.float64, seed=4).requires_grad_(True)
    assert torch.autograd.gradgradcheck(stacked._silu, (h,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width, rows", [(4, 41), (13, 7), (50, 455)])
def test_a_chain_is_bit_for_bit_the_same_alone_and_among_others(width, rows, dtype):
    net = nn.Sequential(nn.Linear(5, width), nn.SiLU(), nn.Linear(width, 1)).to(dtype)
    x, y = randn(rows, 5, dtype=dtype, seed=1), randn(rows, dtype=dtype, seed=2)
    target = ProblemTarget(cr.Problem(net, (x, y), cr.likelihoods.Gaussian(scale=0.3), cr.priors.Normal(1.0)))
    theta = randn(5, target.dim, dtype=dtype, seed=3)
    value, slope = target.likelihood_and_grad(theta)
    for some in (slice(0, 1), slice(3, 4), slice(1, 3), slice(2, 5)):
        alone = target.likelihood_and_grad(theta[some].clone())
        assert torch.equal(alone[0], value[some])
        assert torch.equal(alone[1], slope[some])
