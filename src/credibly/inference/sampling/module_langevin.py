"""SGHMC and SGLD steps of one large network on a CPU: the module itself, and updates in place.

The same dynamics as `inference.kernels.langevin`, to rounding. The gradient of each parameter, with that of its prior,
is written to the chain's gradient as soon as autograd has it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.core.rows import sum_rows
from credibly.inference.module_leaves import LARGE, EntryPrior, ModuleLeaves, has_leaves
from credibly.inference.sampling.sgmcmc_plan import SGMCMCPlan
from credibly.inference.target import ProblemTarget, Target


class ModuleLangevin:
    """A step in place of one chain: the sampler's buffers (1, D), then rows, noise and controls."""

    def __init__(self, target: ProblemTarget, plan: SGMCMCPlan, scale: float) -> None:
        self.target, self.root, self.scale = target, plan.root, scale
        problem = target.problem
        self.leaves = ModuleLeaves(problem)
        self.priors = [
            EntryPrior(problem.prior, entry, target.weights[1])  # type: ignore[arg-type]
            for entry in problem.layout.entries
        ]

    @torch.no_grad()
    def __call__(
        self,
        theta: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        squares: Tensor,
        value: Tensor,
        anchor: Tensor,
        anchor_gradient: Tensor,
        rows: Tensor | None,
        noise: Tensor,
        controls: Tensor,
    ) -> None:
        """Take one step."""
        size, heat, kept, _ = controls.tolist()
        self._add(momentum, gradient, 0.5 * size)
        self._add(theta, momentum, 0.5 * size)
        momentum.mul_(kept).add_(noise, alpha=math.sqrt(1 - kept * kept) * heat)
        self._add(theta, momentum, 0.5 * size)
        value.copy_(self._evaluate(theta, gradient, rows))
        self._add(momentum, gradient, 0.5 * size)

    def _add(self, to: Tensor, what: Tensor, half: float) -> None:
        """Add half a step of `what`, in units of the preconditioner's root."""
        if self.root is None:
            to.add_(what, alpha=half)
        else:
            to.addcmul_(what, self.root, value=half)

    def _evaluate(self, theta: Tensor, gradient: Tensor, rows: Tensor | None) -> Tensor:
        """Return the rescaled log likelihood, (1,), and write the gradient of the log density."""
        problem, leaves = self.target.problem, self.leaves
        x, y, weight = problem.rows if rows is None else problem.rows.at(rows.reshape(-1))
        leaves.bind(theta[0])
        views = leaves.views(gradient[0])
        factor = self.scale * self.target.weights[0]

        def loss() -> Tensor:
            return factor * sum_rows(leaves.log_likelihood_rows(x, y), weight).sum()

        def hand(index: int, leaf: Tensor, slope: Tensor) -> None:
            prior = self.priors[index]
            if prior.plain_decay is not None:
                torch.add(slope, leaf, alpha=-prior.plain_decay, out=views[index])
                return
            negative = slope.neg()
            prior.add_to(negative, leaf)
            torch.neg(negative, out=views[index])

        return leaves.evaluate(loss, hand).double() / self.target.weights[0]


def module_step(target: Target, plan: SGMCMCPlan, scale: float) -> ModuleLangevin | None:
    """Return the step on the module for large networks on a CPU, unless compile=True; None for others."""
    if type(target) is not ProblemTarget or target.device.type != "cpu" or target.dim < LARGE or target.sharded:
        return None
    if plan.compile is True or plan.preconditioner == "rmsprop" or plan.control_variate:
        return None
    return ModuleLangevin(target, plan, scale) if has_leaves(target.problem) else None
