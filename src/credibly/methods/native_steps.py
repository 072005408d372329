"""Training steps of small networks in compiled code of our own: many steps of all members in one call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credibly.kernels.optimisers import Adam
from credibly.methods.objectives import NegativeLogDensity, Objective
from credibly.methods.steps import Batches, Step
from credibly.native.density import Descent, NativeDensity
from credibly.problem import Problem

if TYPE_CHECKING:
    from credibly.methods.training import Training

CALL = 2**30  # rows times parameters of all members in one call: a fraction of a second
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


def native_step(
    problem: Problem, objective: Objective, options: Training, steps: int, theta: Tensor, batch: int
) -> NativeStep | None:
    """None where the loss is more than the negative log density of a small network, or other threads would be missed."""
    plain = type(objective) is NegativeLogDensity and not objective.own
    if not plain or options.compile is False or not theta.is_contiguous() or theta.dtype != problem.layout.dtype:
        return None
    if len(theta) < torch.get_num_threads() and batch * theta.shape[1] > ALONE:
        return None
    assert isinstance(objective, NegativeLogDensity)
    density = NativeDensity.of(
        problem.forward.native, problem.layout, problem.x, problem.y, problem.likelihood, problem.prior,
        (objective.likelihood_weight, objective.prior_weight),
    )  # fmt: skip
    if density is None:
        return None
    step = NativeStep(problem, objective, options, steps, theta)
    rule = step.rule
    adam = isinstance(rule, Adam)
    std = problem.prior.std.double()
    constant = objective.prior_weight * float((std.log() + 0.5 * math.log(2 * math.pi)).sum())
    decays = (rule.beta1, rule.beta2, rule.eps) if isinstance(rule, Adam) else (rule.momentum, 0.0, 0.0)
    step.density = density
    step.how = Descent(adam, *decays, options.clip_norm or 0.0, objective.likelihood_weight / batch, constant)
    return step
