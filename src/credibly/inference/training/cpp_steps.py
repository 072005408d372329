"""Training steps of small networks in the C++ backend: many steps of all members per call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.backends.cpp.density import CppDensity, DropoutSettings, OptimiserSettings
from credibly.backends.cpp.stack import padded_rows
from credibly.inference.backend import Backend, select_for_training
from credibly.inference.kernels.optimisers import Adam
from credibly.inference.training.batches import Batches
from credibly.inference.training.dropout_objective import DropoutObjective
from credibly.inference.training.objectives import NegativeLogDensity, Objective
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step
from credibly.networks.dropout_masks import sites_of_layers
from credibly.problem import Problem

# Rows times parameters of all members per call: a fraction of a second.
CALL = 2**30
# Steps per call with dropout, whose uniform numbers are drawn before it.
DROPOUT_STEPS = 64


class CppStep(Step):
    """The step of the plain negative log density; `advance_to` takes as many as have contiguous rows."""

    density: CppDensity
    descent: OptimiserSettings

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Take steps from t up to `limit` or the end of the current shuffles, in place; return the next step."""
        count = min(limit - t, batches.left(t), max(1, CALL // (len(theta) * batches.batch * theta.shape[1])))
        rows, controls = batches.span(t, count), self.table[t : t + count]
        with torch.no_grad():
            self.density.training_steps(
                self.descent, theta, self.state, self.parts, self.first_bad, rows, controls, active
            )
        return t + count


class CppDropoutStep(CppStep):
    """The step with dropout on the inputs of layers, by the uniform numbers that the torch step would draw.

    Attributes:
        sites: the dropout site of each layer among those of the objective; None for a layer without.
    """

    objective: DropoutObjective
    sites: list[int | None]
    dropping: DropoutSettings

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Take steps from t up to `limit` or the end of the current shuffles, in place; return the next step."""
        work = len(theta) * batches.batch * theta.shape[1]
        count = min(limit - t, batches.left(t), max(1, CALL // work), DROPOUT_STEPS)
        drawn = [self.objective.noise(step) for step in range(t, t + count)]
        uniform = [None if site is None else _columns([noise[site][0] for noise in drawn]) for site in self.sites]
        rows, controls = batches.span(t, count), self.table[t : t + count]
        with torch.no_grad():
            self.density.training_steps(
                self.descent,
                theta,
                self.state,
                self.parts,
                self.first_bad,
                rows,
                controls,
                active,
                self.dropping,
                uniform,
            )
        return t + count


def _columns(drawn: list[Tensor]) -> Tensor:
    """Return the numbers (B, inputs) of several steps as (steps, inputs, B padded with zeros)."""
    rows, inputs = drawn[0].shape
    columns = torch.zeros(len(drawn), inputs, padded_rows(rows), dtype=drawn[0].dtype)
    for column, numbers in zip(columns.numpy(), drawn):
        column[:, :rows] = numbers.numpy().T
    return columns


def cpp_step(
    problem: Problem, objective: Objective, options: Training, steps: int, theta: Tensor, batch: int
) -> CppStep | None:
    """Return the C++ step, or None if the backend is not selected or does not support the objective."""
    if isinstance(objective, DropoutObjective):
        return _dropout_step(problem, objective, options, steps, theta, batch)
    if type(objective) is not NegativeLogDensity or objective.own:
        return None
    weights = (objective.likelihood_weight, objective.prior_weight)
    backend = select_for_training(problem, weights, options.compile, theta, batch)
    if not backend.fused:
        return None
    step = CppStep(problem, objective, options, steps, theta, backend)
    std = problem.prior.std.double()
    constant = objective.prior_weight * float((std.log() + 0.5 * math.log(2 * math.pi)).sum())
    step.density = backend.density
    step.descent = _descent(step, options, objective.likelihood_weight / batch, constant)
    return step


def _dropout_step(
    problem: Problem, objective: DropoutObjective, options: Training, steps: int, theta: Tensor, batch: int
) -> CppDropoutStep | None:
    stack, network = problem.forward.cpp_stack, objective.network
    starts = {entry.name: entry.start for entry in problem.layout.entries}
    sites = None if stack is None else sites_of_layers(stack.layers, starts, network.sites)
    if sites is None or objective.concrete or objective.looped:
        return None
    weight = 1 / problem.tempering.likelihood
    backend: Backend = select_for_training(problem, (weight, 0.0), options.compile, theta, batch)
    if not backend.fused:
        return None
    step = CppDropoutStep(problem, objective, options, steps, theta, backend)
    step.density, step.sites = backend.density, sites
    step.descent = _descent(step, options, weight / batch, 0.0)
    rates = objective.own[0]
    none = torch.zeros(len(rates), dtype=rates.dtype)
    by_layer = torch.stack([none if site is None else rates[:, site] for site in sites], -1).contiguous()
    precision = (objective.decay(rates) / objective.effective).contiguous()
    fixed = problem.layout.network_dim if objective.fixed_scale else problem.dim
    step.dropping = DropoutSettings(by_layer, precision, fixed)
    return step


def _descent(step: Step, options: Training, weight: float, constant: float) -> OptimiserSettings:
    rule = options.rule
    decays = (rule.beta1, rule.beta2, rule.eps) if isinstance(rule, Adam) else (rule.momentum, 0.0, 0.0)
    return OptimiserSettings(isinstance(rule, Adam), *decays, options.clip_norm or 0.0, weight, constant)
