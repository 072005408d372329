"""Problems, priors, families and closed forms shared by the tests of Bayes by Backprop."""

import torch
from torch import distributions as td
from torch.distributions import MultivariateNormal

import credibly as cr
from conftest import mlp, randn
from credibly.gaussians.families import FullRank, LowRank, MeanField, inverse_softplus
from credibly.inference.training.reparameterisation import choose_estimator
from credibly.likelihoods import Gaussian
from credibly.methods.bbb import FreeEnergy
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.priors.elementwise import Laplace, Normal, ScaleMixture, StudentT
from credibly.storage.record import Record

f64 = torch.float64
X, Y = randn(40, 3, dtype=f64), randn(40, 3, dtype=f64).sum(1) + 0.1 * randn(40, seed=1, dtype=f64)


TEMPERATURES = [(1.0, 1.0), (0.25, 1.0), (0.5, 0.5)]
FAMILIES = {"mean-field": MeanField(), "low-rank": LowRank(2), "full-rank": FullRank()}


def scalar(value):
    return torch.tensor(value, dtype=f64)


def normal(loc, scale):
    """Return a float64 distribution: torch would make a float32 one from two floats."""
    return td.Normal(scalar(loc), scale)


def problem(net=None, prior=None, likelihood=None, **kwargs):
    net = net or mlp(3, 5, 1, dtype=f64)
    return cr.Problem(net, data=(X, Y), likelihood=likelihood or Gaussian(0.3), prior=prior or Normal(), **kwargs)


def free_energy(p, chosen=None, *, per_epoch=1, **options):
    """Return the objective of a fit with weight draws, and an arbitrary phi."""
    chosen, method = chosen or MeanField(), cr.BayesByBackprop(**options)
    layers = choose_estimator("weights", p, p.n, mean_field=True)
    objective = FreeEnergy(p, chosen, p.n, method, layers, seed=0, per_epoch=per_epoch)
    phi = chosen.init(0.4 * randn(method.members, p.dim, seed=2, dtype=f64), 0.2)
    phi = phi + 0.1 * randn(*phi.shape, seed=3, dtype=f64)
    if method.learn_prior_scale:
        phi = torch.cat([phi, 0.3 * randn(method.members, p.prior.groups, seed=4, dtype=f64)], 1)
    return objective, phi


def evaluate(objective, phi, noise, rows=None, step=0):
    """Return the loss terms (M, 2) and the gradient (M, P) of a step."""
    p, controls = objective.problem, torch.tensor(objective.controls(step), dtype=f64)
    return objective.evaluate(phi, (), p.x, p.y, rows, noise, controls)


def posterior_of(p, phi, chosen=None):
    return GaussianPosterior(Model.of(p), chosen or MeanField(), phi, Record(method="bbb"))


def best(conjugate, name, t_lik, t_prior):
    """Return the Gaussian of a family that minimises the free energy, in closed form."""
    mean, covariance = conjugate.exact(t_lik, t_prior)
    if name == "mean-field":
        covariance = torch.diag(1 / torch.linalg.inv(covariance).diagonal())
    return MultivariateNormal(mean, covariance_matrix=covariance)


def pack(name, q):
    """Return phi of that Gaussian."""
    dim = len(q.loc)
    scales = torch.tensor([inverse_softplus(float(v)) for v in q.scale_tril.diagonal()], dtype=f64)
    if name == "mean-field":
        return torch.cat([q.loc, scales]).unsqueeze(0)
    factor = q.scale_tril.tril(-1) + torch.diag(scales)
    rows, columns = torch.tril_indices(dim, dim)
    return torch.cat([q.loc, factor[rows, columns]]).unsqueeze(0)


PRIORS = {
    "normal": (Normal(0.7), lambda w: normal(0.0, 0.7).log_prob(w)),
    "normal off centre": (Normal(0.7, loc=0.3), lambda w: normal(0.3, 0.7).log_prob(w)),
    "laplace": (Laplace(0.4), lambda w: td.Laplace(scalar(0.0), 0.4).log_prob(w)),
    "student-t": (StudentT(3.0, 0.5), lambda w: td.StudentT(scalar(3.0), 0.0, 0.5).log_prob(w)),
    "scale mixture": (
        ScaleMixture(0.25, 1.5, 0.1),
        lambda w: torch.log(0.25 * normal(0.0, 1.5).log_prob(w).exp() + 0.75 * normal(0.0, 0.1).log_prob(w).exp()),
    ),
}


def fit(**options):
    return cr.BayesByBackprop(**{"steps": 150, "compile": False, **options}).fit(problem(likelihood=Gaussian()), seed=0)
