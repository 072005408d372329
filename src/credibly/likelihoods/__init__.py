"""Likelihoods: the distribution of y given the network's output."""

from credibly.likelihoods.base import Likelihood, Parameter
from credibly.likelihoods.continuous import Gaussian, HeteroscedasticGaussian, StudentT
from credibly.likelihoods.discrete import Bernoulli, Categorical, HeteroscedasticCategorical, Poisson

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
