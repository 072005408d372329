"""Problems whose rows are nodes of one graph."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn

NODES, DOUBLE = 12, torch.float64
X = randn(NODES, 3, dtype=DOUBLE)
EDGES = torch.randint(NODES, (2, 30), generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (NODES,), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(NODES, generator=torch.Generator().manual_seed(2)) < 0.6


class Convolution(nn.Module):
    """Mean over neighbours by a dense adjacency matrix, then two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x, edges):
        adjacency = torch.eye(len(x), dtype=x.dtype).index_put((edges[0], edges[1]), torch.ones((), dtype=x.dtype))
        adjacency = adjacency / adjacency.sum(1, keepdim=True)
        return adjacency @ self.second(torch.tanh(adjacency @ self.first(x)))


def network():
    torch.manual_seed(0)
    return Convolution().double()


def problem(rows=MASK, net=None, **kwargs):
    nodes = cr.data.Nodes((X, EDGES), rows, Y)
    return cr.Problem(net or network(), nodes, cr.likelihoods.Categorical(), cr.priors.Normal(1.0), **kwargs)


def brute_force(made, theta, rows=MASK):
    """The density from the network as it was given, on the whole graph."""
    names = {e.name: theta[e.start : e.stop].reshape(e.shape) for e in made.layout.entries}
    logits = torch.func.functional_call(network(), names, (X, EDGES))[rows]
    log_lik = torch.log_softmax(logits, -1).gather(1, Y[rows].unsqueeze(1)).sum()
    return log_lik + torch.distributions.Normal(0.0, 1.0).log_prob(theta).sum()


def test_the_density_is_that_of_the_labelled_nodes():
    made = problem()
    assert (made.n, made.dim) == (int(MASK.sum()), 31)
    for theta in randn(3, made.dim, dtype=DOUBLE):
        torch.testing.assert_close(made.log_density(theta), brute_force(made, theta))


def test_parameters_keep_their_names_and_the_network_is_not_changed():
    net = network()
    made = problem(net=net, random="second.*")
    assert [e.name for e in made.layout.entries] == ["second.weight", "second.bias"]
    assert type(net) is Convolution
    assert not dict(net.named_buffers())


def test_minibatches_of_nodes_are_unbiased():
    """The mean over all minibatches of a partition of the rows, each with N / |B|, weighted by |B|, is the whole."""
    made = problem()
    theta = randn(1, made.dim, dtype=DOUBLE)
    parts = torch.arange(made.n).chunk(3)
    mean = sum(len(part) / made.n * made.minibatch(theta, part).gradient for part in parts)
    torch.testing.assert_close(mean, made.log_density_and_grad(theta).gradient)


METHODS = [
    cr.MAP(steps=5, batch_size=3),
    cr.DeepEnsemble(members=2, steps=5, batch_size=3),
    cr.BayesByBackprop(steps=5, batch_size=3),
    cr.SWAG(steps=8, iterates=3, rank=2, sgd_lr=1e-3, every=2, batch_size=3),
    cr.SGHMC(chains=2, draws=2, warmup=5, thin=2, step_size=1e-3, batch_size=3, init="fresh"),
    cr.HMC(chains=2, draws=3, warmup=20),
    cr.Laplace(steps=5),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_every_method_fits_nodes_and_predicts_others(method):
    posterior = method.fit(problem())
    others = (~MASK).nonzero().squeeze(1)
    assert torch.isfinite(posterior.predict(others).mean).all()
    torch.testing.assert_close(posterior.predict(others).mean, posterior.predict(torch.arange(NODES)).mean[others])


def test_laplace_has_the_curvature_of_autograd():
    """Full Gauss-Newton matrix of the nodes, from Jacobians of the network on the whole graph."""
    made, net = problem(), network()
    posterior = cr.Laplace(start="network", structure="full").fit(made)
    theta = posterior.loc

    def logits(t):
        names = {e.name: t[e.start : e.stop].reshape(e.shape) for e in made.layout.entries}
        return torch.func.functional_call(net, names, (X, EDGES))[MASK]

    jacobian = torch.func.jacrev(logits)(theta)
    p = torch.softmax(logits(theta), -1)
    fisher = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    precision = torch.einsum("nkd,nkl,nle->de", jacobian, fisher, jacobian) + torch.eye(made.dim, dtype=DOUBLE)
    draws = posterior.sample(40_000, seed=0) - theta
    whitened = draws @ torch.linalg.cholesky(precision)
    # The covariance of 40,000 white draws differs from the identity by at most 5 / sqrt(40,000) per entry.
    assert (whitened.T @ whitened / len(draws) - torch.eye(made.dim, dtype=DOUBLE)).abs().max() < 0.05


def test_saved_posteriors_are_loaded_with_the_graph(tmp_path):
    nodes = cr.data.Nodes((X, EDGES), MASK, Y)
    posterior = cr.MAP(steps=5).fit(problem(), out=tmp_path / "run")
    loaded = cr.load(tmp_path / "run", nodes.network(network()))
    assert torch.equal(loaded.predict(torch.arange(4)).mean, posterior.predict(torch.arange(4)).mean)


def test_graphs_and_rows_are_checked():
    with pytest.raises(cr.InputError, match="rows must be indices from 0 to 11, got 0 to 12"):
        cr.data.Nodes((X, EDGES), [0, 12], Y)
    with pytest.raises(cr.InputError, match="rows must be a mask of 12 nodes"):
        cr.data.Nodes((X, EDGES), MASK[:5], Y)
    with pytest.raises(cr.InputError, match="y must be given: the graph has no y"):
        cr.data.Nodes((X, EDGES))
    with pytest.raises(cr.InputError, match="y: has 5 entries, the graph 12 nodes"):
        cr.data.Nodes((X, EDGES), MASK, Y[:5])
    with pytest.raises(cr.InputError, match="graph: has no tensor 'x'"):
        cr.data.Nodes(object(), MASK, Y)
    with pytest.raises(cr.InputError, match="x must be node indices"):
        cr.MAP(steps=1).fit(problem()).predict(MASK)
