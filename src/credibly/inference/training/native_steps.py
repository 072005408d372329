"""Training steps of small networks in compiled code of our own: many steps of all members in one call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credibly.backends.cpp.density import Descent, Dropping, NativeDensity
from credibly.backends.cpp.stack import padded_rows
from credibly.inference.kernels.optimisers import Adam
from credibly.inference.training.dropout_objective import DropoutObjective
from credibly.inference.training.objectives import NegativeLogDensity, Objective
from credibly.inference.training.steps import Batches, Step
from credibly.networks.dropout_masks import sites_of_layers
from credibly.problem import Problem

if TYPE_CHECKING:
    from credibly.inference.training.loop import Training

CALL = 2**30  # rows times parameters of all members in one call: a fraction of a second
DROPOUT_STEPS = 64  # in one call, for which uniform numbers are drawn before it
ALONE = 2**22  # rows of a batch times parameters that one thread still takes sooner than many share out


class NativeStep(Step):
    """The same step, of the plain negative log density alone; `advance_to` takes as many as there are rows at hand for."""

    density: NativeDensity
    how: Descent

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Steps t up to `limit` or the end of the shuffles that are at hand, on theta (M, P), in place; the next step."""
        work = len(theta) * batches.batch * theta.shape[1]
        count = min(limit - t, batches.left(t), max(1, CALL // work))
        rows = batches.span(t, count)
        with torch.no_grad():
            self.density.training_steps(
                self.how, theta, self.state, self.parts, self.first_bad, rows, self.table[t : t + count], active
            )
        return t + count


class NativeDropoutStep(NativeStep):
    """The same with dropout on the inputs of layers, by the uniform numbers that the plain step has."""

    objective: DropoutObjective
    places: list[int | None]  # the site of each layer among those of the objective
    dropping: Dropping

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Steps t up to `limit` or the end of the shuffles that are at hand, on theta (M, P), in place; the next step."""
        work = len(theta) * batches.batch * theta.shape[1]
        count = min(limit - t, batches.left(t), max(1, CALL // work), DROPOUT_STEPS)
        drawn = [self.objective.noise(step) for step in range(t, t + count)]
        uniform = [None if place is None else _columns([noise[place][0] for noise in drawn]) for place in self.places]
        with torch.no_grad():
            self.density.training_steps(
                self.how, theta, self.state, self.parts, self.first_bad, batches.span(t, count), self.table[t : t + count], active,
                self.dropping, uniform,
            )  # fmt: skip
        return t + count


def _columns(drawn: list[Tensor]) -> Tensor:
    """Numbers (B, inputs) of so many steps as (steps, inputs, B and zeros)."""
    rows, inputs = drawn[0].shape
    columns = torch.zeros(len(drawn), inputs, padded_rows(rows), dtype=drawn[0].dtype)
    places = columns.numpy()
    for place, numbers in zip(places, drawn):
        place[:, :rows] = numbers.numpy().T
    return columns


def native_step(
    problem: Problem, objective: Objective, options: Training, steps: int, theta: Tensor, batch: int
) -> NativeStep | None:
    """None where the loss is more than that of a small network, as it is or with dropout, or other threads would be missed."""
    if options.compile is False or not theta.is_contiguous() or theta.dtype != problem.layout.dtype:
        return None
    if len(theta) < torch.get_num_threads() and batch * theta.shape[1] > ALONE:
        return None
    if isinstance(objective, DropoutObjective):
        return _dropout_step(problem, objective, options, steps, theta, batch)
    if type(objective) is not NegativeLogDensity or objective.own:
        return None
    density = NativeDensity.of(
        problem.forward.native, problem.layout, problem.x, problem.y, problem.likelihood, problem.prior,
        (objective.likelihood_weight, objective.prior_weight),
    )  # fmt: skip
    if density is None:
        return None
    step = NativeStep(problem, objective, options, steps, theta)
    std = problem.prior.std.double()
    constant = objective.prior_weight * float((std.log() + 0.5 * math.log(2 * math.pi)).sum())
    step.density, step.how = density, _descent(step, options, objective.likelihood_weight / batch, constant)
    return step


def _dropout_step(
    problem: Problem, objective: DropoutObjective, options: Training, steps: int, theta: Tensor, batch: int
) -> NativeDropoutStep | None:
    stack, network = problem.forward.native, objective.network
    starts = {entry.name: entry.start for entry in problem.layout.entries}
    places = None if stack is None else sites_of_layers(stack.layers, starts, network.sites)
    weight = 1 / problem.tempering.likelihood
    density = NativeDensity.of(
        stack, problem.layout, problem.x, problem.y, problem.likelihood, problem.prior, (weight, 0.0)
    )
    if places is None or density is None or objective.concrete or objective.looped:
        return None
    step = NativeDropoutStep(problem, objective, options, steps, theta)
    step.density, step.how, step.places = density, _descent(step, options, weight / batch, 0.0), places
    rates = objective.own[0]
    spared = torch.zeros(len(rates), dtype=rates.dtype)
    by_layer = torch.stack([spared if place is None else rates[:, place] for place in places], -1).contiguous()
    precision = (objective.decay(rates) / objective.n).contiguous()
    fixed = problem.layout.network_dim if objective.fixed_scale else problem.dim
    step.dropping = Dropping(by_layer, precision, fixed)
    return step


def _descent(step: Step, options: Training, weight: float, constant: float) -> Descent:
    rule = step.rule
    decays = (rule.beta1, rule.beta2, rule.eps) if isinstance(rule, Adam) else (rule.momentum, 0.0, 0.0)
    return Descent(isinstance(rule, Adam), *decays, options.clip_norm or 0.0, weight, constant)
