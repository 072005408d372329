"""Likelihoods: what y is, given the network's output."""

from credibly.likelihoods.base import Likelihood, Parameter
from credibly.likelihoods.discrete import Bernoulli, Categorical, HeteroscedasticCategorical, Poisson
from credibly.likelihoods.real import Gaussian, HeteroscedasticGaussian, StudentT

LIKELIHOODS: dict[str, type[Likelihood]] = {
    c.__name__: c
    for c in (Gaussian, HeteroscedasticGaussian, StudentT, Bernoulli, Categorical, HeteroscedasticCategorical, Poisson)
}

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticCategorical",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Parameter",
    "Poisson",
    "StudentT",
]
