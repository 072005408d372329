"""Continual learning: tasks one after another, each under the posterior of the one before."""

from credibly.continual.learning import Learned, MultiHead, learn, prior_of, with_prior

__all__ = ["Learned", "MultiHead", "learn", "prior_of", "with_prior"]
