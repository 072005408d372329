"""Metrics of a `Predictive` on known targets and its distance from another, chosen by the support of y."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from credibly.core.inputs import to_values
from credibly.errors import InputError
from credibly.metrics import scores as metrics
from credibly.metrics.classes import class_metrics, summary_of_classes
from credibly.metrics.survival import censored_fraction_below, concordance_index
from credibly.predictive.base import Predictive
from credibly.predictive.heads import HeadsPredictive

SAMPLES = 400  # predictive samples for the continuous ranked probability score (CRPS)
CELLS = 128  # intervals of the range of y over which two predictives are compared
OUTSIDE = 1e-3  # probability of either predictive outside that range, which counts as two more cells


def evaluate(predictive: Predictive, y: Any, *, level: float = 0.9, seed: int = 0) -> dict[str, float]:
    """Return metrics of the predictions on targets y.

    All have `log_density` (mean log predictive density per row, higher is better) and `coverage` (fraction of targets
    inside the `level` interval, or inside the prediction set for labels; ideally `level`). Real targets and counts add
    rmse, crps and width; real targets also calibration_error (mean gap between nominal and observed frequencies);
    labels add accuracy, brier, ece and set_size, the mean size of the prediction set. One label per row adds
    balanced_accuracy, roc_auc and average_precision: of the rarer of two classes, else the mean over classes.
    Times of `Survival` have concordance, width and calibration_error; a censored time counts in coverage and
    calibration by the probability that the prediction gives it. Several heads, with a dict y, have the metrics of each
    as "head.metric", and the joint log_density.
    """
    if not hasattr(predictive, "log_prob"):
        found = f"must be a Predictive, got {type(predictive).__name__}"
        raise InputError("predictive", found, "Evaluate predictions: evaluate(posterior.predict(x), y)")
    if isinstance(y, (Dataset, DataLoader)):
        found = f"must hold the targets, got a {type(y).__name__}"
        raise InputError("y", found, "Predict it, and pass predictive.targets as y")
    if isinstance(predictive, HeadsPredictive):
        joint = {"log_density": float(predictive.log_prob(y).double().mean())}
        return joint | {
            f"{name}.{metric}": value
            for name, one in predictive.heads.items()
            for metric, value in evaluate(one, y[name], level=level, seed=seed).items()
        }
    target = to_values(y, "y").to(predictive.mean.device)
    density, kept = predictive.log_prob(target).double(), predictive.likelihood.counted(target)
    values = {"log_density": float((density if kept is None else density[kept]).mean())}
    if predictive.likelihood.support == "time":
        return values | _times(predictive, predictive.prepared(target).squeeze(-1), level)
    if predictive.likelihood.ordered:
        return values | _ordered(predictive, target.to(predictive.mean.dtype), level, seed)
    return values | _labels(predictive, target, level)


def compare(predictive: Predictive, reference: Predictive) -> dict[str, float]:
    """Return the distance of a predictive from a reference, such as HMC's, at the same inputs and for the same y.

    `total_variation` (mean over rows of half the integral of |p - q|) is the largest difference between the
    probabilities that the two assign to any event: 0 if they are equal, 1 if they are disjoint. Labels add `agreement`,
    the fraction of rows with the same most probable class; real targets and counts add `mean_shift`, the mean distance
    between the two means in standard deviations of the reference.
    """
    if (predictive.mean.shape, predictive.likelihood.support) != (reference.mean.shape, reference.likelihood.support):
        shapes = [f"{p.likelihood.support} of shape {tuple(p.mean.shape)}" for p in (predictive, reference)]
        found = f"is {shapes[1]}, the predictive {shapes[0]}"
        raise InputError("reference", found, "Predict the same targets at the same inputs with both")
    if not reference.likelihood.ordered:
        p, q = predictive.probabilities, reference.probabilities
        return {
            "total_variation": float(metrics.total_variation(p, q)),
            "agreement": float(metrics.agreement(p, q)),
        }
    ends = [p.interval(1 - OUTSIDE) for p in (predictive, reference)]
    low, high = torch.minimum(ends[0][0], ends[1][0]), torch.maximum(ends[0][1], ends[1][1])
    points = [low + (high - low) * (i / CELLS) for i in range(CELLS + 1)]
    if reference.likelihood.support == "count":
        points = [at.floor() for at in points]
    p, q = (torch.stack([one.cdf(at) for at in points]) for one in (predictive, reference))
    shift = (predictive.mean - reference.mean).abs() / reference.std
    return {
        "total_variation": float(metrics.total_variation_from_cdf(p, q)),
        "mean_shift": float(shift.double().mean()),
    }


def _ordered(predictive: Predictive, y: Tensor, level: float, seed: int) -> dict[str, float]:
    lower, upper = predictive.interval(level)
    samples = predictive.sample(SAMPLES, seed=seed)
    # The CDF at the targets is uniform for calibrated predictions of real targets, but not of counts.
    calibration = {}
    if predictive.likelihood.support == "real":
        calibration["calibration_error"] = float(metrics.regression_calibration_error(predictive.cdf(y).flatten()))
    return {
        "rmse": float(metrics.rmse(predictive.mean, y)),
        # Noise that overflows has samples at infinity, and so does the score.
        "crps": torch.inf if bool(samples.isinf().any()) else float(metrics.crps_from_samples(samples, y)),
        "coverage": float(metrics.coverage(lower, upper, y)),
        "width": float(metrics.width(lower, upper)),
        **calibration,
    }


def _times(predictive: Predictive, signed: Tensor, level: float) -> dict[str, float]:
    """Return metrics on times that are negative if they are censored."""
    time, event = signed.abs(), signed > 0
    lower, upper = predictive.interval(level)
    levels = torch.linspace(0.05, 0.95, 19, dtype=torch.float64, device=time.device)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=time.device)
    cdf = predictive.cdf(time)
    below = censored_fraction_below(cdf, event, torch.cat([ends, levels]))
    return {
        "concordance": float(concordance_index(predictive.quantile(0.5), time, event)),
        "coverage": float(below[1] - below[0]),
        "width": float(metrics.width(lower, upper)),
        "calibration_error": float((below[2:] - levels).abs().mean()),
    }


def _labels(predictive: Predictive, y: Tensor, level: float) -> dict[str, float]:
    p, chosen, one_per_row = predictive.probabilities, predictive.prediction_set(level), y.ndim == 1
    labels, kept = y.long(), predictive.likelihood.counted(y)
    if kept is not None:
        p, chosen, labels = p[kept], chosen[kept], labels[kept]
    return {
        "accuracy": float(metrics.accuracy(p, labels)),
        "brier": float(metrics.brier(p, labels)),
        "ece": float(metrics.ece(p, labels)),
        "coverage": float(chosen.gather(-1, labels.unsqueeze(-1)).double().mean()),
        "set_size": float(chosen.sum(-1).double().mean()),
        **(summary_of_classes(class_metrics(p, labels)) if one_per_row else {}),
    }
