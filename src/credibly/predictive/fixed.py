"""Predictions of a model without a posterior, as a `Predictive` with a single draw."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, tensors_of
from credibly.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from credibly.predictive.base import Predictive


def gaussian_predictive(mean: Tensor, std: Tensor) -> Predictive:
    """Return the predictive N(mean_i, std_i^2) of each row, both (N,). It has no epistemic part."""
    outputs = torch.stack([mean.double(), 2 * std.double().log()], 1)
    return Predictive(_FixedOutputs(HeteroscedasticGaussian().bind(outputs, mean)), outputs)


def categorical_predictive(probabilities: Tensor) -> Predictive:
    """Return the predictive with the given class probabilities (N, K). It has no epistemic part."""
    outputs = probabilities.double().clamp_min(torch.finfo(torch.float64).tiny).log()
    labels = torch.zeros(len(outputs), dtype=torch.int64)
    return Predictive(_FixedOutputs(Categorical().bind(outputs, labels)), outputs)


class _FixedOutputs:
    """A source of one draw whose inputs are the outputs (N, K) themselves."""

    count = 1

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        return tensors_of(x)[0][1][None]

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        return {}

    def row_width(self) -> int:
        return 1
