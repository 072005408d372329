"""Predictions: the Bayesian model average, its quantiles, and targets in their own units."""

from credibly.predictive.base import Predictive
from credibly.predictive.source import DrawSource

__all__ = ["DrawSource", "Predictive"]
