"""Likelihoods: the distribution of y given the network's output."""

from credibly.likelihoods.base import Likelihood
from credibly.likelihoods.continuous import Gaussian, HeteroscedasticGaussian, HeteroscedasticStudentT, StudentT
from credibly.likelihoods.counts import NegativeBinomial
from credibly.likelihoods.discrete import Bernoulli, Categorical, HeteroscedasticCategorical, Poisson
from credibly.likelihoods.from_distribution import FromDistribution, from_distribution
from credibly.likelihoods.heads import Heads
from credibly.likelihoods.mixtures import GaussianMixture
from credibly.likelihoods.ordinal import Ordinal
from credibly.likelihoods.proportions import Beta
from credibly.likelihoods.quantile_head import Quantiles
from credibly.likelihoods.survival import Survival
from credibly.priors.parameter import Parameter

LIKELIHOODS: dict[str, type[Likelihood]] = {
    c.__name__: c
    for c in (
        Gaussian,
        HeteroscedasticGaussian,
        StudentT,
        HeteroscedasticStudentT,
        Bernoulli,
        Categorical,
        HeteroscedasticCategorical,
        Ordinal,
        Poisson,
        NegativeBinomial,
        Beta,
        Survival,
        GaussianMixture,
        Quantiles,
        Heads,
    )
}

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Beta",
    "Categorical",
    "FromDistribution",
    "Gaussian",
    "GaussianMixture",
    "Heads",
    "HeteroscedasticCategorical",
    "HeteroscedasticGaussian",
    "HeteroscedasticStudentT",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Parameter",
    "Poisson",
    "Quantiles",
    "StudentT",
    "Survival",
    "from_distribution",
]
