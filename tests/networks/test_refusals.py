"""Networks that need care: what is opened, switched off, chosen or refused, and that the results are the same."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Categorical, Gaussian
from credibly.networks.copying import copy_module
from tests.networks.module_cases import CASES
from tests.networks.plain_cases import Wrapped, small

X, Y = randn(6, 3), randn(6, seed=1)


def problem(net, x=X, y=Y, **kwargs):
    return cr.Problem(net, data=(x, y), likelihood=Gaussian(1.0), prior=cr.priors.Normal(), **kwargs)


def densities(a, b):
    theta = randn(2, a.dim, seed=7)
    return a.log_density_and_grad(theta), b.log_density_and_grad(theta)


# -- wrappers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, torch.compile, lambda net: nn.DataParallel(torch.compile(net))],
    ids=["DataParallel", "compile", "both"],
)
def test_a_wrapped_network_is_the_network_inside(wrap):
    plain, wrapped = problem(mlp(3, 4, 1)), problem(wrap(mlp(3, 4, 1)), random="0.*")
    assert [e.name for e in wrapped.layout.entries] == ["0.weight", "0.bias"]
    assert wrapped.forward.stack is not None
    a, b = cr.MAP(steps=3).fit(plain, seed=0), cr.MAP(steps=3).fit(problem(wrap(mlp(3, 4, 1))), seed=0)
    assert torch.equal(a.draws, b.draws)


def test_a_wrapped_part_is_opened_and_the_callers_network_kept():
    net = nn.Sequential(nn.Linear(3, 4), torch.compile(nn.Sequential(nn.Tanh(), nn.Linear(4, 1))))
    with_wrapper = [name for name, _ in net.named_parameters()]
    found = [e.name for e in problem(net).layout.entries]
    assert found == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    assert [name for name, _ in net.named_parameters()] == with_wrapper


def test_conversion_opens_wrappers_too():
    assert problem(nn.DataParallel(mlp(3, 4, 1)), dtype=torch.float64).layout.dtype == torch.float64


# -- weights that hooks compute ----------------------------------------------------------------------------------------
def test_both_weight_norms_define_the_same_density():
    old, new = mlp(3, 4, 1), mlp(3, 4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        weight_norm(old[0])
    parametrizations.weight_norm(new[0])
    # A forward pass stores a weight with a graph, which deepcopy refuses.
    old(X)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(old)
    a, b = problem(old), problem(new)
    # In order of registration: bias, weight_g, weight_v in both.
    assert [e.shape for e in a.layout.entries] == [e.shape for e in b.layout.entries]
    one, other = densities(a, b)
    torch.testing.assert_close(one.log_density, other.log_density)
    torch.testing.assert_close(one.gradient, other.gradient)


def test_a_written_network_computes_weights_from_its_own_parameters():
    net = mlp(3, 4, 1)
    nn.utils.spectral_norm(net[0])
    p = problem(net)
    theta = randn(2, p.dim, seed=3)
    outputs = p.forward(theta, X)
    for draw, expected in zip(theta, outputs):
        torch.testing.assert_close(p.layout.write(draw)(X), expected)


def test_copies_detach_results_and_keep_ties():
    net = mlp(3, 4, 1)
    net.kept = {"hidden": [net[0](X)]}
    net.same = net.kept["hidden"][0]
    made = copy_module(net)
    assert not made.same.requires_grad
    assert made.same is made.kept["hidden"][0]
    assert torch.equal(made.same, net.same)
    torch.func.vmap(lambda x: setattr(net, "lost", x * 2) or x)(X)
    assert bool(copy_module(net).lost.isnan().all())


# -- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_taken_as_dense(kind):
    nets = []
    for sparse in (False, True):
        layers = [kind(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(8 if kind is nn.Embedding else 4, 1)]
        nets.append(nn.Sequential(*layers))
    nets[1].load_state_dict(nets[0].state_dict())
    tokens = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 0], [1, 1], [3, 5]])
    one, other = densities(problem(nets[0], tokens), problem(nets[1], tokens))
    assert torch.equal(one.gradient, other.gradient)
    assert nets[1][0].sparse


def test_switches_of_checkpointing_are_off_in_the_copy():
    class Switched(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.body, self.head, self.grad_checkpointing = small(3, 4), nn.Linear(4, 1), on

        def forward(self, x):
            h = checkpoint(self.body, x, use_reentrant=False) if self.grad_checkpointing else self.body(x)
            return self.head(h)

    net, plain = Switched(True), Switched(False)
    plain.load_state_dict(net.state_dict())
    one, other = densities(problem(net), problem(plain))
    assert torch.equal(one.gradient, other.gradient)
    assert net.grad_checkpointing


def test_control_flow_on_rows_is_looped():
    """With shared rows it can be batched; with rows of each chain's own it cannot."""
    net = Wrapped(small(), lambda net, x: net(x) + 1 if bool(x.mean() > 0) else net(x))
    p = problem(net)
    assert p.forward.looped
    assert "control flow" in p.forward.reason
    with pytest.raises(cr.InputError, match="plan: this network cannot be batched"):
        problem(net, plan="batched")
    rows = torch.tensor([[0, 1], [4, 5]])
    theta = randn(2, p.dim, seed=2)
    both = p.minibatch(theta, rows)
    for c in range(2):
        torch.testing.assert_close(p.minibatch(theta[c : c + 1], rows[c]).gradient[0], both.gradient[c])


# -- curvature ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_in_place_operations_after_layers_leave_the_curvature_right(structure):
    def edited(net, x):
        h = net[0](x)
        return net[2](h.mul_(0.5).tanh_())

    def plain(net, x):
        return net[2](torch.tanh(0.5 * net[0](x)))

    fits = [
        cr.Laplace(start="network", structure=structure).fit(problem(Wrapped(mlp(3, 4, 1), f)), seed=0)
        for f in (edited, plain)
    ]
    torch.testing.assert_close(fits[0].covariance(), fits[1].covariance())


def test_experts_that_see_some_rows_get_their_exact_curvature():
    p = CASES["Mixture of experts (rows routed by index)"].problem()
    posterior = cr.Laplace(start="network", structure="full").fit(p, seed=0)
    theta = posterior.loc
    rows = torch.func.jacrev(lambda t: p.layout.call(t, p.x).squeeze(-1))(theta)
    expected = torch.linalg.inv(rows.mT @ rows + torch.eye(p.dim))
    torch.testing.assert_close(posterior.covariance().float(), expected, rtol=1e-3, atol=1e-5)


def test_networks_with_lengths_are_saved_and_loaded(tmp_path):
    """A row of zeros is no input of this network: its lengths start at 1."""
    p = CASES["Packed sequences (lengths as second input)"].problem()
    posterior = cr.Laplace(steps=3).fit(p, seed=0)
    posterior.save(tmp_path / "run")
    loaded = cr.load(tmp_path / "run", p.layout.module)
    assert torch.equal(loaded.predict(p.x).variance, posterior.predict(p.x).variance)


# -- buffers -----------------------------------------------------------------------------------------------------------
def test_a_cache_that_the_first_call_fills_is_no_changing_buffer():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()
            self.register_buffer("positions", torch.zeros(0), persistent=False)

        def forward(self, x):
            if len(self.positions) != x.shape[-1]:
                self.positions = torch.arange(x.shape[-1], dtype=x.dtype)
            return self.net(x + self.positions)

    assert problem(Cached()).dim == 21


def test_refused_buffers_name_the_way_out():
    with pytest.raises(cr.InputError, match="'seen'.*self.training"):
        CASES["Buffer reassigned in forward"].problem()


# -- data --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "ragged",
    [[[1.0, 2.0], [3.0]], [np.ones(2), np.ones(3)], [torch.ones(2), torch.ones(3)]],
    ids=["list", "np", "torch"],
)
def test_ragged_rows_are_refused_with_the_way_out(ragged):
    with pytest.raises(cr.InputError, match="x: .*different lengths.*Pad the rows"):
        problem(mlp(2, 1), ragged, Y[:2])


def test_channels_first_outputs_name_the_axis():
    net = nn.Conv2d(2, 3, 1)
    x, y = randn(4, 2, 5, 5), torch.zeros(4, 5, 5, dtype=torch.long)
    y[0, 0] = torch.tensor([0, 1, 2, 1, 0])
    for likelihood, targets in ((Categorical(), y), (Gaussian(1.0), randn(4, 3, 5, 5)[..., :4])):
        with pytest.raises(cr.InputError) as error:
            cr.Problem(net, data=(x, targets), likelihood=likelihood, prior=cr.priors.Normal())
        assert ("axis=1" in str(error.value)) is (targets is y)
    assert cr.Problem(net, data=(x, y), likelihood=Categorical(axis=1), prior=cr.priors.Normal()).n == 4
