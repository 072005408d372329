"""Graph networks of torch-geometric on one graph, whose rows are nodes."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv

NODES, DOUBLE = 20, torch.float64


def graph():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, 50), generator=generator)
    data = Data(x=randn(NODES, 4, dtype=DOUBLE), edge_index=torch.cat([edges, edges.flip(0)], 1))
    data.y = (data.x[:, 0] > 0).long() + (data.x[:, 1] > 0).long()
    data.train_mask = torch.rand(NODES, generator=generator) < 0.6
    return data


class Network(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(4, 5), layer(5, 3)

    def forward(self, x, edge_index):
        return self.second(torch.tanh(self.first(x, edge_index)), edge_index)


def network(layer=GCNConv):
    torch.manual_seed(0)
    return Network(layer).double()


def problem(layer=GCNConv):
    nodes = cr.data.Nodes(graph(), rows=graph().train_mask)
    return cr.Problem(network(layer), nodes, cr.likelihoods.Categorical(), cr.priors.Normal(1.0))


@pytest.mark.parametrize("layer", [GCNConv, GATConv])
def test_the_density_is_that_of_the_labelled_nodes(layer):
    made, data = problem(layer), graph()
    net = network(layer)
    for theta in randn(2, made.dim, dtype=DOUBLE):
        names = {e.name: theta[e.start : e.stop].reshape(e.shape) for e in made.layout.entries}
        logits = torch.func.functional_call(net, names, (data.x, data.edge_index))
        log_p = torch.log_softmax(logits, -1).gather(1, data.y.unsqueeze(1))[data.train_mask].sum()
        want = log_p + torch.distributions.Normal(0.0, 1.0).log_prob(theta).sum()
        torch.testing.assert_close(made.log_density(theta), want)


class OfObject(Network):
    """As in the tutorials of torch-geometric: forward takes the graph object, here with weights of the edges."""

    def forward(self, data):
        weight = data.edge_weight
        hidden = torch.tanh(self.first(data.x, data.edge_index, weight))
        data.x = hidden
        return self.second(data.x, data.edge_index, weight)


def test_networks_that_take_the_graph_object_get_it(tmp_path):
    data = graph()
    data.edge_weight = torch.rand(data.edge_index.shape[1], generator=torch.Generator().manual_seed(1)).double()
    torch.manual_seed(0)
    net = OfObject(GCNConv).double()
    nodes = cr.data.Nodes(data, rows=data.train_mask)
    made = cr.Problem(net, nodes, cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    theta = made.layout.read(made.layout.module).unsqueeze(0)
    torch.testing.assert_close(made.forward(theta, torch.arange(NODES))[0], net(data.clone()).detach())
    posterior = cr.MAP(steps=3).fit(made, seed=0, progress=False)
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run", nodes.network(net))
    assert torch.equal(again.predict(torch.arange(5)).mean, posterior.predict(torch.arange(5)).mean)


def test_graphs_as_rows_are_refused_with_the_way_out():
    loader = DataLoader([graph(), graph()], batch_size=2)
    for data in (graph(), [graph(), graph()], loader):
        with pytest.raises(cr.InputError, match="credibly.data.Nodes.*one graph per row"):
            cr.Problem(network(), data, cr.likelihoods.Categorical(), cr.priors.Normal(1.0))
    pair = ((graph().x, graph().edge_index), graph().y)
    with pytest.raises(cr.InputError, match=r"credibly.data.Nodes\(\(x, edge_index\)"):
        cr.Problem(network(), pair, cr.likelihoods.Categorical(), cr.priors.Normal(1.0))


METHODS = [
    cr.MAP(steps=60, lr=0.05),
    cr.DeepEnsemble(members=3, steps=60, lr=0.05, batch_size=4),
    cr.BayesByBackprop(steps=20, batch_size=4),
    cr.SGHMC(chains=2, draws=3, warmup=20, thin=2, step_size=0.01, batch_size=4, init="map", start_steps=20),
    cr.HMC(chains=2, draws=10, warmup=20),
    cr.Laplace(steps=60, lr=0.05, structure="full"),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_methods_fit_a_graph_convolution(method):
    data = graph()
    posterior = method.fit(problem(), seed=1)
    train = data.train_mask.nonzero().squeeze(1)
    assert cr.evaluate(posterior.predict(train), data.y[train])["accuracy"] > 0.4
    assert posterior.predict(torch.arange(NODES)).mean.shape == (NODES, 3)


def test_laplace_has_the_curvature_of_autograd():
    made, data, net = problem(), graph(), network()
    posterior = cr.Laplace(start="network", structure="full").fit(made)

    def logits(t):
        names = {e.name: t[e.start : e.stop].reshape(e.shape) for e in made.layout.entries}
        return torch.func.functional_call(net, names, (data.x, data.edge_index))[data.train_mask]

    jacobian = torch.func.jacrev(logits)(posterior.loc)
    p = torch.softmax(logits(posterior.loc), -1)
    fisher = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    precision = torch.einsum("nkd,nkl,nle->de", jacobian, fisher, jacobian) + torch.eye(made.dim, dtype=DOUBLE)
    log_lik = torch.log_softmax(logits(posterior.loc), -1).gather(1, data.y[data.train_mask].unsqueeze(1)).sum()
    log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(posterior.loc).sum()
    # log p(D, w*) + (D/2) log 2 pi - 1/2 log det P
    evidence = log_lik + log_prior + 0.5 * made.dim * torch.log(torch.tensor(2 * torch.pi)) - 0.5 * precision.logdet()
    assert posterior.log_evidence == pytest.approx(float(evidence), rel=1e-6)
