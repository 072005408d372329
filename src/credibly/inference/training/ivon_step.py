"""The step of IVON on a large network: the module itself runs at a draw of its weights.

The same update as `inference.kernels.ivon`, to rounding, in one pass over each parameter as soon as autograd has its
gradient: by C++ on a CPU and by Triton on a GPU, where the step is replayed as a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp import ivon as cpp
from credibly.core.cuda_graphs import Replayed
from credibly.core.inputs import map_inputs
from credibly.core.rng import stream, stream_keys, stream_seed
from credibly.core.rows import sum_rows
from credibly.inference.kernels.ivon import deviation, update_gaussian
from credibly.inference.kernels.optimisers import learning_rates
from credibly.inference.module_leaves import LARGE, EntryPrior, ModuleLeaves, has_leaves
from credibly.inference.training.batches import Batches
from credibly.inference.training.expected_loss import ExpectedLoss
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step
from credibly.priors.flat import BoundPrior
from credibly.problem import Problem

log = logging.getLogger("credibly")
PURPOSE = "variational Newton"


@functools.cache
def triton_works(device: torch.device) -> bool:
    """Return whether the Triton kernels run on a device, by a draw and an update of one value."""
    if importlib.util.find_spec("triton") is None:
        return False
    one, seed = torch.ones(1, device=device), torch.ones((), dtype=torch.int64, device=device)
    drawn, controls = torch.zeros(1, device=device), torch.ones(2, device=device)
    try:
        from credibly.backends.triton import ivon as triton

        triton.draw(drawn, one, one, one, 1.0, seed)
        triton.update((one.clone(), one.clone(), one.clone()), one, drawn, 1.0, (1.0, 0.0), (0.9, 0.9), controls)
        return bool(torch.isfinite(drawn).all())
    except Exception as error:  # failures of its compiler have no common type
        log.info("IVON without Triton (%s: %s)", type(error).__name__, (str(error).splitlines() or [""])[0][:200])
        return False


def takes_module_step(problem: Problem, options: Training, *, sharded: bool) -> bool:
    """Return whether the network is large enough to run as a module, and whether it can."""
    if problem.dim < LARGE or options.compile is True or sharded or options.clip_norm is not None:
        return False
    sample = problem.sample
    return sample.prior.is_normal and has_leaves(sample)


class IVONModuleStep(Step):
    """Steps of M Gaussians, theta (M, 2 D) = (m, h), one after another on the module.

    Args:
        problem: the rows, or the window of a stream.
        objective, options, steps: as in `Step`.
        theta: means and curvatures, changed in place.
        graph: whether a step may be captured as a CUDA graph: batches must keep their address and size.
    """

    objective: ExpectedLoss

    def __init__(
        self, problem: Problem, objective: ExpectedLoss, options: Training, steps: int, theta: Tensor, *, graph: bool
    ) -> None:
        self.problem, self.objective = problem, objective
        rule = objective.rule
        rates = learning_rates(options.schedule, options.learning_rate, steps, min(options.warmup, steps - 1))
        self.controls = [(rate, rule.corrections(t + 1)[0]) for t, rate in enumerate(rates)]
        self.leaves = ModuleLeaves(problem)
        priors = [EntryPrior(problem.prior, entry, objective.prior_weight) for entry in problem.layout.entries]  # type: ignore[arg-type]
        self.priors = [(float(prior.decay or 0.0), float(prior.loc)) for prior in priors]
        members, dim, device = len(theta), problem.dim, theta.device
        self.momentum = torch.zeros(members, dim, dtype=theta.dtype, device=device)
        self.drawn = torch.empty(dim, dtype=theta.dtype, device=device)
        self.leaves.bind(self.drawn)
        # Estimates of several draws are summed before the update.
        several = objective.samples > 1
        self.sums = torch.zeros(2, dim, dtype=theta.dtype, device=device) if several else None
        self.parts = torch.zeros(members, len(objective.part_names), dtype=theta.dtype, device=device)
        self.first_bad = torch.full((members,), math.inf, dtype=torch.float64, device=device)
        self.by_cpp = cpp.supports(theta)
        self.by_triton = device.type == "cuda" and theta.dtype == torch.float32 and triton_works(device)
        self.noise = torch.empty(0)
        one = problem.prior.same_std if isinstance(problem.prior, BoundPrior) else None
        self.delta: Tensor = objective.delta if one is None else objective.delta[:1].clone()
        self.replayed = None
        if self.by_triton:
            # Seeds, learning rates and corrections of all steps, from which a graph reads those of the current step.
            self.seeds = torch.tensor(self._seeds(steps), dtype=torch.int64, device=device)
            self.table = torch.tensor(self.controls, dtype=torch.float32, device=device)
            if graph and options.compile is not False:
                self.replayed = Replayed(self._in_place, device)

    def _seeds(self, steps: int) -> list[list[list[int]]]:
        """Return the seeds of every step, member and draw."""
        objective = self.objective
        members, draws = range(objective.first, objective.first + objective.members), range(objective.samples)
        return [[[stream_seed(objective.seed, PURPOSE, m, t, k) for k in draws] for m in members] for t in range(steps)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides theta."""
        return {"momentum": self.momentum, "parts": self.parts, "first_bad": self.first_bad}

    @property
    def backend_facts(self) -> dict[str, Any]:
        """The backend of steps on the module itself: torch, not compiled."""
        return {"name": "torch", "compiled": False}

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Take step t and return the number of the next; the complexity is for the last step before `limit`."""
        self.advance_on(theta, batches.at(t), t, active, with_complexity=t + 1 == limit)
        return t + 1

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Take step t on theta (M, 2 D), in place."""
        self.advance_on(theta, rows, t, active, with_complexity=True)

    @torch.no_grad()
    def advance_on(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor, *, with_complexity: bool) -> None:
        """Take step t; `with_complexity` also computes the complexity, which the update does not need."""
        if with_complexity:
            for m, one in enumerate(theta):
                self.parts[m, 1] = self._complexity(*one.chunk(2))
        if self.replayed is not None:
            fixed = (theta, self.momentum, self.parts, self.first_bad)
            self.replayed(fixed, (rows, self.seeds[t], self.table[t], torch.full((), t, device=theta.device)))
            return
        of_graph = (self.seeds[t], self.table[t]) if self.by_triton else (None, None)
        for m in range(len(theta)):
            if active.device.type == "cuda" or float(active[m]):
                self._update_member(theta[m], m, rows, t, *of_graph)

    def _in_place(self, *tensors: Any) -> None:
        """Take a step that a CUDA graph replays."""
        theta, (rows, seeds, controls, t) = tensors[0], tensors[-4:]
        for m in range(len(theta)):
            self._update_member(theta[m], m, rows, t, seeds, controls)

    def _update_member(self, row: Tensor, m: int, rows: Tensor | None, t: Any, seeds: Any, controls: Any) -> None:
        """Draw the weights of member m, and update it by the gradient there."""
        mean, curvature = row.chunk(2)
        own = rows[m] if rows is not None and rows.ndim == 2 else rows
        state = (mean, curvature, self.momentum[m])
        samples, total = self.objective.samples, torch.zeros((), dtype=row.dtype, device=row.device)
        for k in range(samples):
            self._draw(mean, curvature, m, t, k, seeds)
            total += self.leaves.evaluate(lambda: self._misfit(own), self._receiver(state, t, controls))
        if self.sums is not None:
            self._update_by_sums(state, self.controls[t] if controls is None else controls)
        self.parts[m : m + 1, 0].copy_(total / samples)
        bad, first = torch.isfinite(total).logical_not(), self.first_bad[m : m + 1]
        first.copy_(torch.where(bad & (first > t), t, first))

    def _draw(self, mean: Tensor, curvature: Tensor, m: int, t: Any, k: int, seeds: Any) -> None:
        objective = self.objective
        if self.by_triton:
            from credibly.backends.triton import ivon as triton

            triton.draw(self.drawn, mean, curvature, self.delta, objective.effective, seeds[m, k])
            return
        names = (objective.seed, PURPOSE, objective.first + m, t)
        if self.by_cpp:
            delta = self.delta if len(self.delta) > 1 else float(self.delta)
            cpp.draw(self.drawn, mean, curvature, delta, objective.effective, stream_keys(*names, k))
            return
        if k == 0:
            # The same random numbers as in the step on the flat vector.
            shape, own = (objective.samples, len(mean)), stream(*names, device=mean.device)
            self.noise = torch.randn(shape, generator=own, dtype=mean.dtype, device=mean.device)
        torch.mul(self.noise[k], deviation(curvature, self.delta, objective.effective), out=self.drawn).add_(mean)

    def _receiver(self, state: tuple[Tensor, Tensor, Tensor], t: Any, controls: Any) -> Any:
        """Return a function that receives the gradient of each leaf."""
        entries, rule = self.problem.layout.entries, self.objective.rule
        betas, n, sums = (rule.beta1, rule.beta2), self.objective.effective, self.sums

        def receive(index: int, leaf: Tensor, gradient: Tensor) -> None:
            entry = entries[index]
            part, prior = slice(entry.start, entry.stop), self.priors[index]
            slope = gradient.contiguous().view(-1)
            mean, curvature, momentum = (tensor[part] for tensor in state)
            if self.by_triton and sums is None:
                from credibly.backends.triton import ivon as triton

                triton.update((mean, curvature, momentum), slope, self.drawn[part], n, prior, betas, controls)
                return
            if self.by_cpp and sums is None:
                now = self.controls[t]
                cpp.update((mean, curvature, momentum), slope, self.drawn[part], n, prior, betas, *now)
                return
            found = slope * (self.drawn[part] - mean) * (n * (curvature + prior[0]))
            if sums is not None:
                sums[0, part] += slope
                sums[1, part] += found
                return
            lr, correction = self.controls[t]
            update_gaussian(mean, curvature, momentum, slope, found, *prior, betas, lr, correction)

        return receive

    def _update_by_sums(self, state: tuple[Tensor, Tensor, Tensor], controls: Any) -> None:
        """Update by the mean of the estimates of all draws."""
        assert self.sums is not None
        rule = self.objective.rule
        self.sums.div_(self.objective.samples)
        lr, correction = controls
        update_gaussian(
            *state, self.sums[0], self.sums[1], rule.delta, rule.loc, (rule.beta1, rule.beta2), lr, correction
        )
        self.sums.zero_()

    def _misfit(self, rows: Tensor | None) -> Tensor:
        objective, x, y = self.objective, self.problem.x, self.problem.y
        if rows is not None:
            x, y = map_inputs(lambda t: t[rows], x), y[rows]
        values = self.leaves.log_likelihood_rows(x, y)
        weight = 1 / (len(y) * objective.problem.tempering.likelihood)
        return -weight * sum_rows(values, objective.weights_of(rows)).sum()

    def _complexity(self, mean: Tensor, curvature: Tensor) -> Tensor:
        """Return the KL divergence per row, parameter by parameter."""
        objective, total = self.objective, torch.zeros((), dtype=torch.float64, device=mean.device)
        n, prior_weight = objective.effective, objective.prior_weight
        for entry, (delta, loc) in zip(self.problem.layout.entries, self.priors):
            for part in torch.arange(entry.start, entry.stop, 2**22).tolist():
                some = slice(part, min(part + 2**22, entry.stop))
                precision = n * (curvature[some] + delta)
                # Of the prior N(loc, s^2), tempered: delta = prior_weight / s^2.
                scale = math.sqrt(prior_weight / delta) if delta else 1.0
                moved = torch.square(mean[some] - loc) + 1 / precision
                entropy = (math.log(2 * math.pi) + 1) * (some.stop - some.start) - torch.log(precision).sum()
                total += 0.5 * (delta * moved.sum() - entropy / n)
                total += prior_weight * (some.stop - some.start) * (math.log(scale) + 0.5 * math.log(2 * math.pi))
        return total
