"""Bayes by Backprop: the optimum and the evidence where both are known, the objective term by term, and the posterior."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch import distributions as td
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.nn.functional import softplus

import credibly as cr
from conftest import mlp, randn
from credibly.families import FullRank, LowRank, MeanField, inverse_softplus
from credibly.gaussian_posterior import GaussianPosterior
from credibly.likelihoods import Categorical, Gaussian
from credibly.methods.bbb import FreeEnergy, kl_share
from credibly.methods.reparameterise import choose_estimator
from credibly.posterior import Model, Record
from credibly.priors import Laplace, Normal, ScaleMixture, StudentT
from credibly.rng import stream

f64 = torch.float64
X, Y = randn(40, 3, dtype=f64), randn(40, 3, dtype=f64).sum(1) + 0.1 * randn(40, seed=1, dtype=f64)
TEMPERATURES = [(1.0, 1.0), (0.25, 1.0), (0.5, 0.5)]


def problem(net=None, prior=None, likelihood=None, **kwargs):
    net = net or mlp(3, 5, 1, dtype=f64)
    return cr.Problem(net, data=(X, Y), likelihood=likelihood or Gaussian(0.3), prior=prior or Normal(), **kwargs)


def free_energy(p, chosen=None, *, estimator="weights", batch=None, n=None, per_epoch=1, **options):
    """The objective of a fit, and a phi of no particular shape."""
    chosen = chosen or MeanField()
    method = cr.BayesByBackprop(**options)
    layers = choose_estimator(estimator, p, batch or p.n, mean_field=isinstance(chosen, MeanField))
    objective = FreeEnergy(p, chosen, n or p.n, method, layers, seed=0, per_epoch=per_epoch)
    phi = chosen.init(0.4 * randn(method.members, p.dim, seed=2, dtype=p.layout.dtype), 0.2)
    phi = phi + 0.1 * randn(*phi.shape, seed=3, dtype=p.layout.dtype)
    if method.learn_prior_scale:
        phi = torch.cat([phi, torch.zeros(method.members, len(p.prior.segments), dtype=phi.dtype)], 1)
    return objective, phi


def parts_of(objective, phi, noise, rows=None, step=0):
    p = objective.problem
    figures = torch.tensor(objective.figures(step), dtype=f64)
    return objective.evaluate(phi, (), p.x, p.y, rows, noise, figures)


def gaussian_posterior(p, phi, chosen=None):
    return GaussianPosterior(Model.of(p), chosen or MeanField(), phi, Record(method="bbb"))


# -- linear regression, where the posterior and the evidence are known -----------------------------------------------------
def sigma_points(size, members=1):
    """Noise with mean 0 and covariance I exactly: expectations of quadratics over it are those over N(0, I)."""
    points = math.sqrt(size) * torch.eye(size, dtype=f64)
    return torch.cat([points, -points]).expand(members, -1, -1)


@pytest.fixture
def exact_noise(monkeypatch):
    """Free energies of linear models without Monte Carlo error."""

    def noise(self, step):
        return (sigma_points(self.family.noise_size(self.problem.dim), self.options.members),)

    monkeypatch.setattr(FreeEnergy, "noise", noise)


def exact_phi(name, mean, covariance):
    """phi of the Gaussian of a family that is closest to N(mean, covariance) by KL(q || .)."""
    undo = torch.vectorize = lambda values: torch.tensor([inverse_softplus(float(v)) for v in values], dtype=f64)
    if name == "mean-field":
        return torch.cat([mean, undo(torch.linalg.inv(covariance).diagonal().rsqrt())]).unsqueeze(0)
    factor = torch.linalg.cholesky(covariance)
    factor = factor.tril(-1) + torch.diag(undo(factor.diagonal()))
    rows, columns = torch.tril_indices(len(mean), len(mean))
    return torch.cat([mean, factor[rows, columns]]).unsqueeze(0)
