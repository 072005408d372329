"""Which parameters are random by default, and networks whose parameters have several dtypes."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.networks.layout import Layout
from methods.test_methods import QUICK

X = randn(40, 3)
Y = X.sum(1) + 0.1 * randn(40, seed=1)


class Adapted(nn.Module):
    """A frozen bfloat16 network with a float32 adapter, and a head that may be trained in bfloat16."""

    def __init__(self, trained_head=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = nn.Linear(3, 8)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.5 * torch.randn(p.shape, generator=generator))
        self.base.bfloat16().requires_grad_(False)
        self.head.bfloat16().requires_grad_(trained_head)

    def forward(self, x):
        h = torch.tanh(self.base(x))
        h = h + self.up(self.down(h.float())).to(h.dtype)
        return self.head(h)


def problem(net, **kwargs):
    return cr.Problem(net, (X, Y), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(), **kwargs)


def partly_frozen():
    net = mlp(3, 6, 1)
    net[0].requires_grad_(False)
    return net


def test_only_trainable_parameters_are_random():
    found = problem(partly_frozen())
    assert [e.name for e in found.layout.entries] == ["2.weight", "2.bias"]
    assert found.dim == 7
    assert found.layout.random == ("2.weight", "2.bias")
    assert "D = 7 random and 24 fixed parameters" in repr(found)
    assert "D = 7 random and 24 fixed parameters" in repr(found.layout)


def test_without_frozen_parameters_all_are_random():
    net = mlp(3, 6, 1)
    assert problem(net).layout.random == ("*",)
    assert "fixed" not in repr(problem(net))


def test_patterns_may_select_frozen_parameters():
    assert problem(partly_frozen(), random="*").dim == 31
    assert [e.name for e in problem(partly_frozen(), random="0.*").layout.entries] == ["0.weight", "0.bias"]


def test_names_are_no_patterns():
    net = nn.ParameterDict({"a[0]": nn.Parameter(torch.zeros(2)), "a0": nn.Parameter(torch.zeros(3))})
    net["a0"].requires_grad_(False)
    assert [e.name for e in Layout(net).entries] == ["a[0]"]


def test_a_network_without_trainable_parameters_is_refused():
    net = mlp(3, 6, 1).requires_grad_(False)
    with pytest.raises(cr.InputError, match=r'none of the 4 parameters .* random="\*"'):
        problem(net)
    assert problem(net, random="*").dim == 31
    # MCDropout.from_trained trains nothing.
    assert cr.MCDropout.from_trained(net, (X, Y), cr.likelihoods.Gaussian(0.5), insert="*").layout.dim == 31


def test_modules_of_a_posterior_keep_their_frozen_parameters(tmp_path):
    posterior = cr.MAP(steps=3).fit(problem(partly_frozen()), seed=0)
    posterior.save(tmp_path / "run")
    # The folder has the names of the random parameters; what the given network trains does not matter.
    for loaded in (posterior, cr.load(tmp_path / "run", partly_frozen())):
        assert [p.requires_grad for p in loaded.module().parameters()] == [False, False, True, True]
    for net in (None, mlp(3, 6, 1), mlp(3, 6, 1).requires_grad_(False)):
        other = cr.load(tmp_path / "run", net)
        assert other.layout.random == posterior.layout.random
        assert torch.equal(other.predict(X).mean, posterior.predict(X).mean)


def test_a_run_with_frozen_parameters_resumes(tmp_path):
    method = cr.SGHMC(chains=1, draws=4, warmup=4, thin=1, step_size=1e-3, compile=False)
    whole = method.fit(problem(partly_frozen()), seed=0, out=tmp_path / "run")
    again = cr.resume(tmp_path / "run", problem(partly_frozen()))
    assert torch.equal(whole.draws, again.draws)


@pytest.mark.parametrize("head", [False, True])
def test_the_flat_vector_has_the_dtype_of_the_random_parameters(head):
    found = problem(Adapted(head))
    assert found.layout.dtype == torch.float32
    assert found.x.dtype == torch.bfloat16
    assert found.dim == (41 if head else 32)
    theta = found.layout.read(found.layout.module).unsqueeze(0)
    assert theta.dtype == torch.float32
    output = found.forward(theta, found.x)
    assert output.dtype == torch.float32
    assert torch.equal(output[0], Adapted(head)(X.bfloat16()).float())


def test_gradients_through_casts_are_those_of_autograd():
    found, net = problem(Adapted(True)), Adapted(True)
    evaluation = found.log_density_and_grad(found.layout.read(net).unsqueeze(0))
    residual = (net(X.bfloat16()).float().squeeze(1) - Y) / 0.5
    prior = sum(p.float().square().sum() for p in net.parameters() if p.requires_grad)
    (-0.5 * residual.square().sum() - 0.5 * prior).backward()
    expected = torch.cat([p.grad.float().flatten() for p in net.parameters() if p.requires_grad])
    # bfloat16 keeps 8 bits, and the gradient is a sum over 40 rows.
    assert torch.allclose(evaluation.gradient[0], expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", cr.METHODS)
def test_every_method_fits_networks_of_two_dtypes(name, head, tmp_path):
    settings = {k: min(v, 12) if k == "steps" else v for k, v in QUICK[name].items()}
    if name == "swag":
        settings |= {"every": 2, "iterates": 4}
    posterior = cr.METHODS[name](**settings).fit(problem(Adapted(head)), seed=0)
    predictive = posterior.predict(X)
    assert predictive.mean.dtype == torch.float32
    assert bool(torch.isfinite(predictive.log_prob(Y)).all())
    posterior.save(tmp_path / "run")
    assert torch.equal(cr.load(tmp_path / "run", Adapted(head)).predict(X).mean, predictive.mean)


def test_networks_on_two_devices_are_refused():
    net = mlp(3, 6, 1)
    net[0].to("meta")
    with pytest.raises(cr.InputError, match=r"on \['cpu', 'meta'\]"):
        problem(net)
