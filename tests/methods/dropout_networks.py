"""Networks, problems and masks that the tests of MC-Dropout share."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

import credibly as cr
from conftest import randn
from credibly.core.rng import stream
from credibly.inference.training.dropout_objective import DropoutObjective, Dropped
from credibly.likelihoods import Gaussian
from credibly.networks.dropout_masks import find_sites
from credibly.posterior.dropout import draw_masks

f64 = torch.float64
X, Y = randn(40, 3, dtype=f64), randn(40, 3, dtype=f64).sum(1) + 0.1 * randn(40, seed=1, dtype=f64)
X32, Y32 = X.float(), Y.float()
LABELS = (Y > 0).long() + (Y > 1).long()
NOTHING = torch.tensor(())
NOISE, PRIOR = 0.4, 0.6


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return build()


def dropped_mlp(inputs=3, hidden=8, outputs=1, first=0.2, second=0.3, dtype=f64):
    """Dropout before both layers."""
    return seeded(
        lambda: nn.Sequential(
            nn.Dropout(first), nn.Linear(inputs, hidden), nn.Tanh(), nn.Dropout(second), nn.Linear(hidden, outputs)
        ).to(dtype)
    )


class Residual(nn.Module):
    """Not a plain stack of layers, so it is batched by vmap or looped."""

    def __init__(self):
        super().__init__()
        self.drop, self.a, self.late, self.b, self.c = (
            nn.Dropout(0.2),
            nn.Linear(3, 6),
            nn.Dropout(0.3),
            nn.Linear(6, 1),
            nn.Linear(3, 1),
        )

    def forward(self, x):
        return self.b(self.late(torch.tanh(self.a(self.drop(x))))) + self.c(x)


def residual():
    return seeded(lambda: Residual().double())


class Reader(nn.Module):
    """An LSTM over (N, T, F), dropout on its last state, a Linear head."""

    def __init__(self, dropout=0.25):
        super().__init__()
        self.rnn, self.drop, self.head = nn.LSTM(2, 5, batch_first=True), nn.Dropout(dropout), nn.Linear(5, 1)

    def forward(self, x):
        out = self.rnn(x)[0]
        return self.head(self.drop(out[:, -1]))


def convolutional(outputs=3):
    return seeded(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6, 6)),
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(16, outputs),
        )
    )


def build(net, data=(X, Y), likelihood=None, prior=None, **kwargs):
    return cr.Problem(net, data, likelihood or Gaussian(NOISE), prior or cr.priors.Normal(PRIOR), **kwargs)


def objective_of(problem, *, insert=None, rate=None, members=None, rates=None, n=None, batch=None, **kwargs):
    network = Dropped(problem, insert, rate)
    given = torch.tensor(rates or [network.rate_row(rate)], dtype=problem.layout.dtype)
    given = given if members is None else given.expand(members, -1)
    options = {"seed": 0, "concrete": False, "fixed_scale": False, **kwargs}
    return DropoutObjective(problem, network, n or problem.n, given, batch=batch or problem.n, **options)


def every_mask(network):
    """All masks: their probabilities (K,), and by name of the mask whether each value is kept, (K, 1, *shape)."""
    sizes = [math.prod(network.shapes[s.name]) for s in network.sites]
    kept = torch.tensor(list(itertools.product((0.0, 1.0), repeat=sum(sizes))), dtype=f64)
    parts = kept.split(sizes, 1)
    chance = torch.ones(len(kept), dtype=f64)
    for site, part in zip(network.sites, parts):
        chance = chance * (part * (1 - site.rate) + (1 - part) * site.rate).prod(1)
    assert float(chance.sum()) == pytest.approx(1)
    shaped = {s.mask: p.reshape(-1, 1, *network.shapes[s.name]) for s, p in zip(network.sites, parts)}
    return chance, shaped


def scaled(network, kept):
    return {s.mask: kept[s.mask] * s.gain for s in network.sites}


def some_weights(problem, count=5):
    return 0.8 * randn(count, problem.dim, seed=7, dtype=f64)


ROWS = 4


def tiny(net=None, **kwargs):
    net = dropped_mlp(2, 3, first=0.25, second=0.4) if net is None else net
    return build(net, (randn(ROWS, 2, seed=4, dtype=f64), randn(ROWS, seed=5, dtype=f64)), **kwargs)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.one, self.two = nn.Dropout(0.3), nn.Linear(2, 1), nn.Linear(2, 1, bias=False)

    def forward(self, x):
        x = self.drop(x)
        return self.one(x) + torch.tanh(self.two(x))


def wrap(net, likelihood=None, data=(X, Y), **kwargs):
    """A posterior without training, for tests that hold for any weights."""
    return cr.MCDropout.from_trained(net, data, likelihood or Gaussian(NOISE), **kwargs)


def masks_of(posterior, x, passes, seed):
    sites, shapes = find_sites(posterior.masked, posterior.rates, x[:1])
    return draw_masks(sites, shapes, passes, seed, posterior.theta)


def one_by_one(posterior, x, passes, seed):
    """Outputs (passes, N) of the masked network, called once per pass."""
    masks = masks_of(posterior, x, passes, seed)
    with torch.no_grad():
        rows = [functional_call(posterior.masked, {k: m[s] for k, m in masks.items()}, x) for s in range(passes)]
    return torch.stack(rows)


def close_in_distribution(a, b):
    """Means and variances of two samples (S, ...) within 4.5 standard errors."""
    error = ((a.var(0) / len(a)) + b.var(0) / len(b)).sqrt()
    assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < 4.5
    squares = [torch.square(s - s.mean(0)) for s in (a, b)]
    error = (squares[0].var(0) / len(a) + squares[1].var(0) / len(b)).sqrt()
    assert float(((squares[0].mean(0) - squares[1].mean(0)) / error).abs().max()) < 4.5


def gradients_at(objective, point, count, seed=0):
    """Gradients (count, P) of N times the objective, each for its own uniform numbers."""
    problem, shapes = objective.problem, objective.network.shapes
    noise = tuple(
        torch.rand(count, problem.n, *shapes[s.name], generator=stream(seed, "test noise", index), dtype=f64)
        for index, s in enumerate(objective.network.sites)
    )
    theta = point.expand(count, -1).clone()
    return problem.n * objective.evaluate(theta, objective.own, problem.x, problem.y, None, noise, NOTHING)[1]
