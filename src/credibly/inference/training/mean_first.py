"""A start for networks that predict their noise: the mean is fitted by least squares before the noise.

Fitted together from random weights, the two compete: where the mean is still far from the targets, the predicted noise
grows, the rows there lose their weight, and the mean never catches up. A mean that has been fitted with the same noise
for all rows has no such regions. The predicted scale then starts at the root mean square of what is left.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from credibly.inference.training.data import Data
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.scale_outputs import outputs_at, scale_biases
from credibly.likelihoods.base import Extra
from credibly.likelihoods.continuous import LocationScale
from credibly.problem import Problem

# The scale in the least squares, in standard deviations of the targets: small enough for the prior to have little
# weight. Held-out rows stop the training.
SCALE = 0.01
# Smallest fraction of the remaining variance that a floor of the scale leaves to the network's output.
LEFT = 0.01


@dataclass(frozen=True, kw_only=True)
class CommonScale(LocationScale):
    """Noise of a given scale per target for all rows, for outputs that hold locations and scales."""

    scales: tuple[float, ...]
    outputs_per_target: ClassVar[int] = 2

    def location_scale(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the locations and the given scales."""
        loc, _ = output.chunk(2, -1)
        return loc, torch.tensor(self.scales, dtype=output.dtype, device=output.device)


@dataclass(frozen=True, eq=False)
class MeanFirst:
    """Least squares of the means that a network predicts along with their noise.

    Attributes:
        objective: the negative log density with a common scale.
        data: the same rows as those of the density, with the common scale.
        place: where the parameters have the biases of the log squared scales.
    """

    objective: NegativeLogDensity
    data: Data
    place: slice

    @classmethod
    def of(cls, objective: NegativeLogDensity, theta: Tensor, data: Data) -> MeanFirst | None:
        """Return the least squares for an objective; None if its network does not predict a scale with own biases."""
        problem = objective.problem
        place = scale_biases(problem, theta[:1])
        if place is None:
            return None
        std = problem.y.double().flatten(0, -2).std(0, correction=0)
        scales = tuple((SCALE * torch.where(std > 0, std, 1.0)).tolist())
        least = copy.copy(objective)
        least.problem = _with_scale(problem, scales)
        held_out = None if data.held_out is None else _with_scale(data.held_out, scales)
        parts = tuple(_with_scale(part, scales) for part in data.parts)
        return cls(least, dataclasses.replace(data, held_out=held_out, parts=parts), place)

    @property
    def problem(self) -> Problem:
        """The problem with the common scale."""
        return self.objective.problem

    def start(self, problem: Problem, theta: Tensor) -> Tensor:
        """Return one parameter vector (1, D) with the scale of its errors in the rows of the problem.

        Rows that it has not been fitted to keep the scale from starting far too small.
        """
        loc, log_square = outputs_at(problem, theta)[0].chunk(2, -1)
        left = _mean(torch.square(problem.y.double() - loc), problem)
        floor = getattr(problem.likelihood, "floor", 0.0) ** 2
        wanted = torch.log(torch.maximum(left - floor, LEFT * left).clamp_min(torch.finfo(theta.dtype).tiny))
        moved = theta.clone()
        moved[0, self.place] += (wanted - _mean(log_square, problem)).to(theta)
        return moved


def _with_scale(problem: Problem, scales: tuple[float, ...]) -> Problem:
    other = copy.copy(problem)
    other.likelihood = CommonScale(scales=scales, axis=problem.likelihood.axis, squeeze=problem.likelihood.squeeze)
    return other


def _mean(values: Tensor, problem: Problem) -> Tensor:
    """Return the mean of (N, ..., K) per target, weighted by the rows of the problem."""
    rows = values.flatten(1, -2).mean(1) if values.ndim > 2 else values
    weight = problem.sample_weight
    return rows.mean(0) if weight is None else (weight.double() @ rows) / weight.double().sum()
