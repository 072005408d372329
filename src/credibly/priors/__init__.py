"""Priors: elementwise densities, by parameter name, and a posterior as the next prior."""

from credibly.priors.elementwise import PRIORS, Laplace, Normal, Prior, ScaleMixture, StudentT

__all__ = ["PRIORS", "Laplace", "Normal", "Prior", "ScaleMixture", "StudentT"]
