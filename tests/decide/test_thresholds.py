"""Thresholds by cost, against brute force and the closed form for calibrated probabilities."""

import math

import numpy as np
import pytest
import torch

import credibly as cr
from credibly.decide.thresholds import best_threshold, cost_curve, cost_threshold, outcome


def brute_force(p, y, threshold, fp, fn):
    flagged = p >= threshold
    return (fp * (flagged & (y == 0)).sum() + fn * (~flagged & (y == 1)).sum()) / len(p)


def calibrated(rows=500, seed=0):
    rng = np.random.default_rng(seed)
    p = np.round(rng.beta(0.5, 3, size=rows), 3)  # with ties
    return p, (rng.uniform(size=rows) < p).astype(int)


@pytest.mark.parametrize("fp, fn", [(1, 1), (1, 10), (3, 2)])
def test_the_curve_is_the_cost_at_every_threshold(fp, fn):
    p, y = calibrated()
    curve = cost_curve(p, y, false_positive=fp, false_negative=fn)
    assert curve.threshold[:-1].tolist() == sorted(set(p.tolist()))
    for at, cost, flagged in zip(curve.threshold, curve.cost, curve.flagged):
        assert float(cost) == pytest.approx(brute_force(p, y, float(at), fp, fn))
        assert int(flagged) == (p >= float(at)).sum()
    best = best_threshold(p, y, false_positive=fp, false_negative=fn)
    assert best.cost == pytest.approx(min(brute_force(p, y, t, fp, fn) for t in [*p, np.inf]))
    again = outcome(p, y, best.threshold, false_positive=fp, false_negative=fn)
    assert again == best


def test_between_two_probabilities_the_higher_one_decides():
    found = outcome([0.2, 0.4, 0.9], [0, 1, 1], 0.3)
    assert (found.threshold, found.recall, found.precision, found.flagged) == (0.3, 1.0, 1.0, 2)
    none = outcome([0.2, 0.4], [0, 1], 0.95)
    assert (none.flagged, none.recall, none.cost) == (0, 0.0, 0.5)
    assert math.isnan(none.precision)


def test_the_best_threshold_of_calibrated_probabilities_is_the_ratio_of_costs():
    """With p uniform the expected cost is exactly quadratic around fp / (fp + fn); 200,000 rows find it."""
    rng = np.random.default_rng(1)
    p = rng.uniform(size=200_000)
    y = rng.uniform(size=len(p)) < p
    for fp, fn in ((1, 1), (1, 4), (9, 1)):
        wanted = cost_threshold(false_positive=fp, false_negative=fn)
        assert wanted == fp / (fp + fn)
        found = best_threshold(p, y, false_positive=fp, false_negative=fn)
        # The minimum is flat: a distance d costs (fp + fn) d^2 / 2, and the noise of the difference is of order
        # (fp + fn) sqrt(d (1 - d) wanted (1 - wanted) / n), which makes d of the order of n^(-1/3).
        assert found.threshold == pytest.approx(wanted, abs=4 * len(p) ** (-1 / 3))
        least = outcome(p, y, wanted, false_positive=fp, false_negative=fn).cost
        assert found.cost <= least < found.cost + 2e-3 * (fp + fn)


def test_predictions_of_two_classes():
    p = torch.tensor([0.1, 0.7, 0.9])
    toy = cr.data.gap_regression(seed=0)
    labels = (toy.y > 0).long().flatten()
    problem = cr.Problem(cr.zoo.mlp(1, (4,), 1), (toy.x, labels), cr.likelihoods.Bernoulli(), cr.priors.Normal())
    predictive = cr.MAP(steps=20).fit(problem, seed=0).predict(toy.x)
    mine, plain = best_threshold(predictive, labels), best_threshold(predictive.probabilities[:, 1], labels)
    assert mine == plain
    with pytest.raises(cr.InputError, match="labels must be 0 or 1 per row"):
        best_threshold(p, [0, 1, 2])
    with pytest.raises(cr.InputError, match="probabilities must be numbers from 0 to 1"):
        best_threshold([0.1, 1.2], [0, 1])
    with pytest.raises(cr.InputError, match="false_negative must be"):
        best_threshold(p, [0, 1, 1], false_negative=0)
