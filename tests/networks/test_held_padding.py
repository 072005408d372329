"""Padding: embeddings that return zeros for it, and encoders that skip it, as in plain training."""

import copy

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.networks.blueprint import build_network, describe_network
from credibly.networks.held_padding import PaddedEmbedding
from credibly.networks.layout import Layout

f64 = torch.float64
IDS = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 1], [2, 2, 3, 0]])
LABELS = torch.tensor([0, 1, 2, 1])


class Summed(nn.Module):
    """A bag of words, in which padding counts for nothing."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 3)
        if tied:
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids).sum(1))


class Masked(nn.Module):
    """An encoder as torch builds it by default, with nested tensors for padded rows."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed, self.encoder = nn.Embedding(7, 8), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=ids == 0).mean(1))


def problem(net):
    torch.manual_seed(0)
    return cr.Problem(net().to(f64), (IDS, LABELS), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))


def test_the_padding_vector_is_zero_whatever_the_weights_are():
    fitted = problem(Summed)
    theta = randn(3, fitted.dim, dtype=f64)
    padded = torch.cat([IDS, torch.zeros(4, 2, dtype=torch.int64)], 1)
    torch.testing.assert_close(fitted.forward(theta, IDS), fitted.forward(theta, padded))
    # Its gradient is that of the prior.
    gradient = fitted.log_density_and_grad(theta).gradient
    entry = next(e for e in fitted.layout.entries if e.name == "embed.weight")
    torch.testing.assert_close(gradient[:, entry.start : entry.start + 5], -theta[:, entry.start : entry.start + 5])


@pytest.mark.parametrize(
    "method", [cr.Laplace(steps=20), cr.BayesByBackprop(steps=5), cr.HMC(chains=2, draws=2, warmup=20, max_steps=4)]
)
def test_networks_with_unmasked_padding_fit_save_and_load(method, tmp_path):
    posterior = method.fit(problem(Summed), seed=0, progress=False)
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run", Summed().to(f64))
    assert torch.equal(again.predict(IDS).mean, posterior.predict(IDS).mean)
    module = posterior.module()
    assert type(module.embed) is nn.Embedding
    assert not module.embed.weight[0].any()


def test_written_modules_are_plain_and_compute_the_same():
    layout = problem(Summed).layout
    theta = randn(layout.dim, dtype=f64)
    assert type(layout.module.embed) is PaddedEmbedding
    torch.testing.assert_close(layout.write(theta)(IDS).detach(), layout.call(theta, IDS))


def test_blueprints_describe_the_plain_layer():
    net = nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    described = describe_network(Layout(net).module)
    assert described is not None
    assert described == describe_network(net)
    assert type(build_network(described)[0]) is nn.Embedding


def test_tied_and_trained_padding_vectors_stay_parameters():
    assert type(Layout(Summed(tied=True)).module.embed) is nn.Embedding
    trained = Summed()
    with torch.no_grad():
        trained.embed.weight[0] = 1.0
    assert type(Layout(trained).module.embed) is nn.Embedding
    assert type(Layout(Summed(), "head.*").module.embed) is nn.Embedding


def test_encoders_compute_the_same_with_and_without_gradients():
    fitted = problem(Masked)
    theta = fitted.layout.read(fitted.layout.module)
    module = fitted.layout.write(theta)
    expected = fitted.layout.call(theta.requires_grad_(), IDS).detach()
    with torch.no_grad():
        torch.testing.assert_close(fitted.layout.call(theta, IDS), expected)
        torch.testing.assert_close(module(IDS), expected)
    plain = copy.deepcopy(module).train()
    for part in plain.modules():
        part.p = 0.0
    torch.testing.assert_close(plain(IDS).detach(), expected)


@pytest.mark.parametrize("method", [cr.Laplace(steps=5), cr.MCDropout(steps=5)])
def test_encoders_with_padding_masks_fit(method):
    predictive = method.fit(problem(Masked), seed=0, progress=False).predict(IDS)
    assert bool(torch.isfinite(predictive.mean).all())
