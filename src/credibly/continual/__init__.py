"""Continual learning: tasks in sequence, with the posterior of each as the prior of the next."""

from credibly.continual.learning import Learned, MultiHead, learn, prior_of, with_prior

__all__ = ["Learned", "MultiHead", "learn", "prior_of", "with_prior"]
