"""How good a predictive is on known targets: one table of figures, chosen by what kind of y it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credibly import metrics
from credibly.predictive import Predictive

SAMPLES = 400  # predictive draws behind the continuous ranked probability score


def evaluate(predictive: Predictive, y: Any, *, level: float = 0.9, seed: int = 0) -> dict[str, float]:
    """Figures of merit on targets y.

    Every kind of y has `log_density` (mean log predictive density a row, higher is better) and `coverage` (share of targets
    inside the `level` interval, or inside the prediction set for labels; near `level` is right). Real targets and counts add
    rmse, crps and width, real ones calibration_error as well (mean gap between nominal and observed frequencies); labels add
    accuracy, brier, ece and the mean set size.
    """
    target = y if isinstance(y, Tensor) else torch.as_tensor(getattr(y, "values", y))
    target = target.to(predictive.mean.device)
    figures = {"log_density": float(predictive.log_prob(target).double().mean())}
    if predictive.likelihood.ordered:
        return figures | _ordered(predictive, target.to(predictive.mean.dtype), level, seed)
    return figures | _labels(predictive, target, level)


def _ordered(predictive: Predictive, y: Tensor, level: float, seed: int) -> dict[str, float]:
    lower, upper = predictive.interval(level)
    samples = predictive.sample(SAMPLES, seed=seed)
    # The distribution function at the targets is uniform where predictions are calibrated; for counts it is not even then.
    calibration = {}
    if predictive.likelihood.support == "real":
        calibration["calibration_error"] = float(metrics.regression_calibration_error(predictive.cdf(y).flatten()))
    return {
        "rmse": float(metrics.rmse(predictive.mean, y)),
        "crps": float(metrics.crps_from_samples(samples, y)),
        "coverage": float(metrics.coverage(lower, upper, y)),
        "width": float(metrics.width(lower, upper)),
        **calibration,
    }


def _labels(predictive: Predictive, y: Tensor, level: float) -> dict[str, float]:
    p = predictive.probabilities
    labels = y.long()
    chosen = predictive.prediction_set(level)
    return {
        "accuracy": float(metrics.accuracy(p, labels)),
        "brier": float(metrics.brier(p, labels)),
        "ece": float(metrics.ece(p, labels)),
        "coverage": float(chosen.gather(-1, labels.unsqueeze(-1)).double().mean()),
        "set_size": float(chosen.sum(-1).double().mean()),
    }
