"""Metrics of predictions of one or several targets, and of the constant prediction that a useful model beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.core.inputs import Inputs, row_count
from credibly.likelihoods import Gaussian, Likelihood
from credibly.metrics import evaluation
from credibly.predictive.base import Predictive
from credibly.predictive.one_target import one_target
from credibly.tables.preparation import Preparation

Array = npt.NDArray[Any]

# Metrics of a constant prediction that are shown beside those of the fit.
SHOWN = ("log_density", "rmse", "accuracy", "brier", "concordance", "coverage", "width")
# Newton-like steps of the constant prediction's two or three parameters.
STEPS = 200


def target_metrics(
    predictive: Predictive, y: Tensor, targets: Sequence[str] = (), *, seed: int = 0
) -> dict[str, float]:
    """Return the metrics of `evaluation.evaluate`; for several targets the joint log density, then those of each."""
    if y.ndim < 2 or len(targets) < 2:
        return evaluation.evaluate(predictive, y, seed=seed)
    found = {"log_density": float(predictive.log_prob(y).double().mean())}
    for k, name in enumerate(targets):
        each = evaluation.evaluate(one_target(predictive, k), y[:, k], seed=seed)
        found |= {f"{key}_{name}": value for key, value in each.items()}
    return found


def constant_metrics(known: Preparation, likelihood: Likelihood, y: Array, training: Array) -> dict[str, float]:
    """Return metrics on targets y of a constant prediction, the best of its kind for the training targets.

    For regression it has the mean and standard deviation of the training targets (on the scale of the fit), for classes
    their training frequencies; for other tasks the likelihood's parameters are fitted without inputs.

    Args:
        known: preparation of the table.
        likelihood: of the fit.
        y: targets to predict, as `Preparation.target_values` returns them.
        training: training targets, or a sample of them.
    """
    if known.classes is not None:
        return _frequencies(y, training, len(known.classes))
    x = torch.zeros(len(y), 1)
    if known.task == "regression":
        # The training targets have mean 0 and standard deviation 1 on the scale of the fit.
        targets = len(known.scale.mean)
        source = _Constant(Gaussian(1.0, squeeze=y.ndim == 1), torch.zeros(targets), {})
        metrics = target_metrics(known.in_units(Predictive(source, x)), torch.from_numpy(y), known.targets)
    else:
        constant = Predictive(_fitted(likelihood, torch.from_numpy(training)), x)
        metrics = evaluation.evaluate(constant, torch.from_numpy(y))
    return {key: value for key, value in metrics.items() if key.startswith(SHOWN)}


def constant_density(known: Preparation, y: Array, training: Array) -> Array | None:
    """Return the log density per row of the constant prediction; None for tasks without a simple one."""
    if known.classes is not None:
        counts = np.bincount(training, minlength=len(known.classes)) + 1.0
        return np.asarray(np.log(counts / counts.sum())[y])
    if known.task != "regression" or y.ndim > 1:
        return None
    source = _Constant(Gaussian(1.0, squeeze=True), torch.zeros(1), {})
    return np.asarray(known.in_units(Predictive(source, torch.zeros(len(y), 1))).log_prob(torch.from_numpy(y)))


def _frequencies(y: Array, training: Array, classes: int) -> dict[str, float]:
    counts = np.bincount(training, minlength=classes) + 1.0
    frequency = counts / counts.sum()
    truth = np.eye(classes)[y]
    found = {
        "log_density": float(np.log(frequency[y]).mean()),
        "accuracy": float((y == frequency.argmax()).mean()),
        "brier": float(((frequency - truth) ** 2).sum(-1).mean()),
    }
    seen = np.bincount(y, minlength=classes) / len(y)
    if (seen > 0).sum() > 1:
        # Without skill the average precision of a class is its frequency.
        precision = float(seen.min() if classes == 2 else seen[seen > 0].mean())
        found |= {"balanced_accuracy": 1 / float((seen > 0).sum()), "roc_auc": 0.5, "average_precision": precision}
    return found


class _Constant:
    """A source with the same output at every input."""

    count = 1

    def __init__(self, likelihood: Likelihood, output: Tensor, extra: dict[str, Tensor]) -> None:
        self.likelihood, self._output, self._extra = likelihood, output, extra

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        return self._output.double().expand(stop - start, row_count(x), len(self._output))

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        return self._extra

    def row_width(self) -> int:
        return 1


def _fitted(likelihood: Likelihood, y: Tensor) -> _Constant:
    """Return the likelihood with the output and parameters of largest likelihood for y."""
    target = likelihood.prepare(y, torch.float64)
    output = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    extra = {
        name: torch.full((1, *p.shape), float(np.mean(p.init)), dtype=torch.float64, requires_grad=True)
        for name, p in likelihood.parameters().items()
    }
    optimiser = torch.optim.LBFGS([output, *extra.values()], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -likelihood.log_prob(output.expand(1, len(target), 1), target, extra).mean()
        value.backward()
        return value

    optimiser.step(loss)
    return _Constant(likelihood, output.detach(), {name: value.detach() for name, value in extra.items()})
