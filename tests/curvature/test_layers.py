"""Forward passes that use a layer's weight beyond the layer's call, against Jacobians by finite differences."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian

DOUBLE = torch.float64
X = randn(6, 2, dtype=DOUBLE)


class Force(nn.Module):
    """The gradient of an energy in the inputs, as in models of molecules and Hamiltonian networks."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)
        self.double()

    def energy(self, x):
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x):
        if self.kind == "torch.func":
            return torch.func.grad(lambda z: self.energy(z).sum())(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.kind != "no graph")
        return torch.cat([energy, force], 1) if self.kind == "energy and force" else force


class UsedTwice(nn.Module):
    """Calls a layer once, and uses its weight once more."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.layer, self.head = nn.Linear(2, 3), nn.Linear(2, 2)
        self.double()

    def forward(self, x):
        return self.head(F.linear(torch.tanh(self.layer(x)), self.layer.weight.T))


class Scaled(nn.Module):
    """A scalar parameter."""

    def __init__(self):
        super().__init__()
        self.body, self.slope = mlp(2, 3, 2, dtype=DOUBLE), nn.Parameter(torch.tensor(1.5, dtype=DOUBLE))

    def forward(self, x):
        return self.slope * self.body(x)


def force_problem(net):
    with torch.no_grad():
        y = net(X) + 0.3 * randn(6, net(X).shape[1], seed=1, dtype=DOUBLE)
    return cr.Problem(net, data=(X, y), likelihood=Gaussian(0.5), prior=cr.priors.Normal(1.0))


def jacobian(problem, theta):
    """By finite differences: (N, K, D)."""
    step = 1e-5
    columns = [
        (problem.layout.call(theta + step * unit, X) - problem.layout.call(theta - step * unit, X)) / (2 * step)
        for unit in torch.eye(len(theta), dtype=DOUBLE)
    ]
    return torch.stack(columns, -1).detach()


@pytest.mark.parametrize(
    "make, layers",
    [
        (lambda: Force("torch.func"), []),
        (lambda: Force("autograd"), []),
        (lambda: Force("energy and force"), []),
        (UsedTwice, ["head"]),
        (Scaled, ["body.0", "body.2"]),
        (lambda: mlp(2, 4, 2, dtype=DOUBLE), ["0", "2"]),
    ],
    ids=["torch.func", "autograd.grad", "energy and force", "used twice", "scalar", "plain"],
)
def test_curvature_of_layers_that_are_used_beyond_their_call(make, layers):
    problem = force_problem(make())
    posterior = cr.Laplace(start="network", structure="full").fit(problem, seed=0)
    assert [layer.name for layer in posterior.parts.layers] == layers
    j = jacobian(problem, posterior.loc)
    covariance = torch.linalg.inv(torch.einsum("nkp,nkq->pq", j, j) / 0.25 + torch.eye(problem.dim, dtype=DOUBLE))
    torch.testing.assert_close(posterior.covariance(), covariance, rtol=1e-5, atol=1e-7)
    expected = torch.einsum("nkp,pq,nkq->nk", j, covariance, j)
    torch.testing.assert_close(posterior.predict(X).epistemic, expected, rtol=1e-5, atol=1e-7)
    diagonal = cr.Laplace(start="network", structure="diag").fit(problem, seed=0)
    precision = torch.einsum("nkp,nkp->p", j, j) / 0.25 + 1
    torch.testing.assert_close(diagonal.std, precision.rsqrt(), rtol=1e-5, atol=1e-7)


class Detached(nn.Module):
    """The first layer's outputs reach the head without their graph."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)).detach())


@pytest.mark.parametrize("make", [lambda: Force("no graph"), lambda: Detached(), lambda: Detached().double()])
def test_a_forward_that_hides_weights_from_autograd_is_refused_before_work(make):
    net = make()
    x = X.to(next(net.parameters()).dtype)
    with torch.no_grad():
        y = net(x)
    # A problem needs some gradient; terms that are missing from it matter to Laplace.
    with pytest.raises(cr.InputError, match=r"net: (automatic diff|its output has no grad).*torch.func.grad") as error:
        cr.Laplace(steps=10**9).fit(cr.Problem(net, (x, y), Gaussian(0.5), cr.priors.Normal(1.0)))
    assert "create_graph=True" in str(error.value)


def test_parameters_behind_the_hidden_ones_can_be_selected():
    net = Detached()
    problem = cr.Problem(net, data=(X.float(), randn(6)), likelihood=Gaussian(0.5), prior=cr.priors.Normal(1.0))
    assert cr.Laplace(start="network", random="last layer").fit(problem).count == 4


class OwnAutocast(nn.Module):
    """Runs a layer in bfloat16, and another one in float32; `own` keeps tensors of a fixed dtype."""

    def __init__(self, own):
        super().__init__()
        self.own = own
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        if self.own:
            assert x.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            hidden = F.silu(self.first(x))
        return self.last(hidden.float())


@pytest.mark.parametrize("own", [False, True])
def test_a_network_with_its_own_autocast_is_not_refused(own):
    """Finite differences of bfloat16 are all rounding: they say nothing about hidden dependences."""
    x = X.float()
    problem = cr.Problem(OwnAutocast(own), (x, x[:, :1]), Gaussian(0.5), cr.priors.Normal(1.0))
    posterior = cr.Laplace(steps=3, structure="full").fit(problem, seed=0, progress=False)
    assert torch.isfinite(posterior.predict(x).variance).all()
