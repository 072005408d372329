"""SGHMC and SGLD steps of one large network on a CPU: the module itself, and updates in place.

The same dynamics as `inference.kernels.langevin`, to rounding. The gradient of each parameter, with that of its prior,
is written to the chain's gradient as soon as autograd has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from credibly.core.rows import Rows, sum_rows
from credibly.inference.module_leaves import LARGE, EntryPrior, ModuleLeaves, has_leaves
from credibly.inference.sampling.sgmcmc_plan import SGMCMCPlan
from credibly.inference.sampling.starts import check_start
from credibly.inference.target import ProblemTarget, Target
from credibly.problem import Problem
from credibly.runtime import release_freed_memory

# Minimum rows per evaluation before the first step, for runs with smaller batches.
LEAST_ROWS = 32


class ModuleLangevin:
    """An in-place step of one chain, called with the sampler's buffers (1, D), then rows, noise and controls."""

    def __init__(self, target: ProblemTarget, plan: SGMCMCPlan, scale: float) -> None:
        self.target, self.root, self.scale = target, plan.root, scale
        self.block = max(LEAST_ROWS, plan.batch_size or 0)
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
        noise: Iterable[tuple[slice, Tensor]],
        controls: Tensor,
    ) -> None:
        """Take one step. The noise comes in chunks, so that it is never all in memory."""
        size, heat, kept, _ = controls.tolist()
        self._add_half_step(momentum, gradient, 0.5 * size)
        self._add_half_step(theta, momentum, 0.5 * size)
        momentum.mul_(kept)
        for part, numbers in noise:
            momentum[:, part].add_(numbers, alpha=math.sqrt(1 - kept * kept) * heat)
        self._add_half_step(theta, momentum, 0.5 * size)
        value.copy_(self._evaluate(theta, gradient, rows))
        self._add_half_step(momentum, gradient, 0.5 * size)

    def _add_half_step(self, to: Tensor, direction: Tensor, half: float) -> None:
        """Add half a step along `direction`, in units of the preconditioner's root."""
        if self.root is None:
            to.add_(direction, alpha=half)
        else:
            to.addcmul_(direction, self.root, value=half)

    def _evaluate(self, theta: Tensor, gradient: Tensor, rows: Tensor | None) -> Tensor:
        """Return the rescaled log likelihood, (1,), and write the gradient of the log density."""
        every = self.target.problem.rows
        return self._add_rows(theta, gradient, every if rows is None else every.at(rows.reshape(-1)), self.scale)

    def _add_rows(self, theta: Tensor, gradient: Tensor, rows: Rows, scale: float, *, more: bool = False) -> Tensor:
        """Return `scale` times the log likelihood, (1,); write its gradient and the prior's, or add them (`more`)."""
        leaves, factor = self.leaves, scale * self.target.weights[0]
        leaves.bind(theta[0])
        views = leaves.views(gradient[0])

        def loss() -> Tensor:
            return factor * sum_rows(leaves.log_likelihood_rows(rows.x, rows.y), rows.weight).sum()

        def hand(index: int, leaf: Tensor, slope: Tensor) -> None:
            prior = self.priors[index]
            if more:
                views[index].add_(slope)
            elif prior.plain_decay is not None:
                torch.add(slope, leaf, alpha=-prior.plain_decay, out=views[index])
            else:
                negative = slope.neg()
                prior.add_to(negative, leaf)
                torch.neg(negative, out=views[index])

        return leaves.evaluate(loss, hand).double() / self.target.weights[0]

    # -- before the first step -----------------------------------------------------------------------------------------
    def gradients(self, problem: Problem, theta: Tensor, rows: Tensor | None, scale: float) -> Tensor:
        """Return gradients of the log density at theta (C, D), with `scale` times these rows, in blocks of them."""
        result = torch.empty_like(theta)
        for c in range(len(theta)):
            one = slice(c, c + 1)
            for k, block in enumerate(self._blocks(problem, rows)):
                self._add_rows(theta[one], result[one], block, scale, more=k > 0)
        release_freed_memory()
        return result

    @torch.no_grad()
    def start(self, problem: Problem, theta: Tensor, first: int) -> Tensor:
        """Return the log likelihood at theta (C, D), in blocks of rows. Raise if the density is unfit for sampling."""
        log_lik = torch.zeros(len(theta), dtype=torch.float64)
        log_prior, gap = torch.zeros_like(log_lik), torch.zeros_like(log_lik)
        scale = problem.n / len(problem.y)
        for c, row in enumerate(theta):
            self.leaves.bind(row)
            values = []
            for block in self._blocks(problem, None):
                values.append(self._log_likelihood(block))
            again = self._log_likelihood(next(self._blocks(problem, None)))
            gap[c] = (again - values[0]).abs() * len(values) * scale
            log_lik[c] = scale * torch.stack(values).sum()
            log_prior[c] = sum(prior.log_prob(leaf) for prior, leaf in zip(self.priors, self.leaves.leaves))
        check_start({"likelihood": log_lik, "prior": log_prior}, gap.max(), first)
        release_freed_memory()
        return log_lik

    def _log_likelihood(self, rows: Rows) -> Tensor:
        return sum_rows(self.leaves.log_likelihood_rows(rows.x, rows.y), rows.weight, torch.float64).sum()

    def _blocks(self, problem: Problem, rows: Tensor | None) -> Iterator[Rows]:
        """Yield these rows, or all, in blocks of about the size of a batch."""
        chosen = torch.arange(len(problem.y)) if rows is None else rows.reshape(-1)
        yield from (problem.rows.at(part) for part in chosen.split(self.block))


def module_step(target: Target, plan: SGMCMCPlan, scale: float) -> ModuleLangevin | None:
    """Return the step on the module for large networks on a CPU, unless compile=True; None for others."""
    if type(target) is not ProblemTarget or target.device.type != "cpu" or target.dim < LARGE or target.sharded:
        return None
    if plan.compile is True or plan.preconditioner == "rmsprop" or plan.control_variate:
        return None
    release_freed_memory()
    return ModuleLangevin(target, plan, scale) if has_leaves(target.problem) else None
