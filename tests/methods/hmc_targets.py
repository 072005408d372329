"""Targets with known moments, and a short call of HMC, shared by its tests."""

import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.likelihoods import Gaussian

DOUBLE = torch.float64


def hmc(target, *, seed=0, out=None, **kwargs):
    return cr.HMC(**{"compile": False, **kwargs}).fit(target, seed=seed, out=out)


SHAPE = torch.tensor([2.0, 5.0], dtype=DOUBLE)


def skewed(w):
    """Logarithms of Gamma(2) and Gamma(5) variables, and a normal variable correlated with the first."""
    a, b = SHAPE.to(w)
    residual = w[:, 2] - 0.5 * w[:, 0]
    return a * w[:, 0] - w[:, 0].exp() + b * w[:, 1] - w[:, 1].exp() - 0.5 * (residual / 0.6) ** 2


def skewed_moments():
    loc, variance = torch.digamma(SHAPE), torch.polygamma(1, SHAPE)
    mean = torch.stack([loc[0], loc[1], 0.5 * loc[0]])
    covariance = torch.diag(torch.stack([variance[0], variance[1], 0.25 * variance[0] + 0.36]))
    covariance[0, 2] = covariance[2, 0] = 0.5 * variance[0]
    return mean, covariance


def density(dtype=DOUBLE, **kwargs):
    return cr.Density(skewed, 3, batched=True, dtype=dtype, **kwargs)


SIZES = {"chains": 32, "draws": 100, "warmup": 80}


def wide(dim=40):
    return cr.Density(lambda w: -0.5 * w.square().sum(-1), dim, batched=True)


X, Y = randn(25, 3, dtype=DOUBLE), randn(25, 3, dtype=DOUBLE).sum(1) + 0.1 * randn(25, seed=1, dtype=DOUBLE)
SHORT = {"chains": 5, "draws": 8, "warmup": 20, "init": "prior", "trajectory_length": 0.5}


def problem(net=None, **kwargs):
    return cr.Problem(
        net or mlp(3, 6, 1, dtype=DOUBLE), data=(X, Y), likelihood=Gaussian(0.5), prior=cr.priors.Normal(), **kwargs
    )


def simulated_networks(sets):
    """Return a density whose chain c sees data set c, the outputs of weights at the rows, and the true weights.

    Weights are from the prior and data from the weights, for calibration by simulation.
    """
    net = mlp(1, 2, 1, dtype=DOUBLE, activation=nn.Tanh)
    layout = cr.Layout(net)
    x = torch.linspace(-2, 2, 5, dtype=DOUBLE).unsqueeze(1)

    def one(weights):
        named = {k: v[0] for k, v in layout.split(weights[None])[0].items()}
        return torch.func.functional_call(net, named, (x,)).squeeze(-1)

    output = torch.func.vmap(one)
    truth = randn(sets, layout.dim, seed=11, dtype=DOUBLE)
    y = output(truth) + randn(sets, 5, seed=12, dtype=DOUBLE)

    def log_prob(theta):
        return -0.5 * (y[: len(theta)] - output(theta)).square().sum(-1) - 0.5 * theta.square().sum(-1)

    return cr.Density(log_prob, layout.dim, batched=True), output, truth
