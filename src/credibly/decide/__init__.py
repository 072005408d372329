"""Decisions from predictions: expected utility, thresholds by cost, rejection, bandits and Bayesian optimisation.

Everything works on a `Predictive` (Thompson sampling on a posterior) of any method.
"""

from __future__ import annotations

from credibly.decide.bandits import thompson
from credibly.decide.optimisation import (
    BayesianOptimiser,
    expected_improvement,
    probability_of_improvement,
    upper_bound,
)
from credibly.decide.rejection import (
    Rejection,
    Selection,
    binomial_upper,
    mistakes,
    reject,
    selective,
    selective_threshold,
)
from credibly.decide.thresholds import CostCurve, Threshold, best_threshold, cost_curve, cost_threshold
from credibly.decide.utility import Choice, class_costs, expected_utility, newsvendor, pinball

__all__ = [
    "BayesianOptimiser",
    "Choice",
    "CostCurve",
    "Rejection",
    "Selection",
    "Threshold",
    "best_threshold",
    "binomial_upper",
    "class_costs",
    "cost_curve",
    "cost_threshold",
    "expected_improvement",
    "expected_utility",
    "mistakes",
    "newsvendor",
    "pinball",
    "probability_of_improvement",
    "reject",
    "selective",
    "selective_threshold",
    "thompson",
    "upper_bound",
]
