"""Predictions: the Bayesian model average, its quantiles, and targets in their own units."""

from credibly.predictive.base import DrawSource, Predictive

__all__ = ["DrawSource", "Predictive"]
