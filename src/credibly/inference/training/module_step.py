"""The training step of one large network: the module itself, with parameters that are views of the flat vector.

It minimises the same loss as `steps.Step`, to rounding. Parameters are updated as soon as autograd has their gradient,
so that no second vector of the size of the network is allocated; with clipping, accumulation or the user's own
optimiser, they are updated after the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credibly.core.cuda_graphs import Replayed
from credibly.core.inputs import map_inputs
from credibly.core.rows import sum_rows
from credibly.errors import InputError
from credibly.inference.kernels.optimisers import learning_rates
from credibly.inference.module_leaves import LARGE, EntryPrior, ModuleLeaves, has_leaves
from credibly.inference.training.batches import Batches
from credibly.inference.training.module_rules import FusedRule, OwnRule, Rule, rates_by_name
from credibly.inference.training.objectives import NegativeLogDensity, Objective
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step
from credibly.problem import Problem


def needs_module(options: Training) -> bool:
    """Return whether these settings are only available for steps on the module."""
    return callable(options.optimiser) or isinstance(options.lr, Mapping) or options.accumulate > 1


def takes_module_steps(problem: Problem, objective: Objective, options: Training, *, sharded: bool = False) -> bool:
    """Return whether members are trained as modules, one after another. Raise if settings require it and it cannot be.

    `sharded` is whether processes share the rows of a batch.
    """
    asked = needs_module(options)
    if not asked and (problem.dim < LARGE or options.compile is True):
        return False
    fits = type(objective) is NegativeLogDensity and not sharded and has_leaves(problem.sample)
    if fits and isinstance(objective, NegativeLogDensity) and objective.anchored:
        fits = all(prior.decay is not None for prior in entry_priors(problem, objective))
    if asked and not fits:
        name = "optimiser" if callable(options.optimiser) else "lr" if isinstance(options.lr, Mapping) else "accumulate"
        usual = {"optimiser": '"adam" or "sgd"', "lr": "a single number", "accumulate": "1"}[name]
        raise InputError(
            name,
            f"must be {usual} for this method or prior",
            "Optimisers of your own, learning-rate groups and accumulation are for MLE, MAP, DeepEnsemble and SWAG "
            "with elementwise priors, and processes that do not share rows",
        )
    return fits


def entry_priors(problem: Problem, objective: NegativeLogDensity) -> list[EntryPrior]:
    """Return the prior's part of the loss for every entry of the flat vector."""
    anchors: list[Tensor | None] = [None] * len(problem.layout.entries)
    if objective.anchored:
        row = objective.own[0][0]
        anchors = [row[e.start : e.stop].view(e.shape) for e in problem.layout.entries]
    prior = problem.prior
    return [
        EntryPrior(prior, entry, objective.prior_weight, anchor)  # type: ignore[arg-type]
        for entry, anchor in zip(problem.layout.entries, anchors)
    ]


class ModuleStep(Step):
    """A step of one member, theta (1, D), on the module itself.

    Args:
        problem, objective, options, steps: as in `Step`.
        theta: the flat vector, changed in place.
        scale: preconditioner (D,) of SGD: multiplies the gradients.
    """

    objective: NegativeLogDensity

    def __init__(
        self,
        problem: Problem,
        objective: NegativeLogDensity,
        options: Training,
        steps: int,
        theta: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        self.problem, self.objective, self.clip = problem, objective, options.clip_norm
        self.accumulate = options.accumulate
        warmup = min(options.warmup, steps - 1)
        self.factors = learning_rates(options.schedule, 1.0, steps, warmup)
        self.leaves = ModuleLeaves(problem)
        self.leaves.probe(theta[0])
        self.rule_of_leaves = self._rule(options, theta, scale)
        self.priors = entry_priors(problem, objective)
        self.parts = torch.zeros(1, len(objective.part_names), dtype=theta.dtype, device=theta.device)
        self.first_bad = torch.full((1,), math.inf, dtype=torch.float64, device=theta.device)
        one_pass = self.clip is None and self.accumulate == 1 and self.rule_of_leaves.one_by_one
        closed = not objective.prior_weight or all(prior.decay is not None for prior in self.priors)
        self.in_backward = one_pass and closed and self.leaves.safe
        # The kernel launches of a small batch take longer than its arithmetic.
        on_gpu = theta.device.type == "cuda" and self.in_backward and options.compile is not False
        self.replayed = Replayed(self._in_place, theta.device) if on_gpu else None
        if on_gpu:
            table = [(float(t), factor) for t, factor in enumerate(self.factors)]
            self.table = torch.tensor(table, dtype=torch.float32, device=theta.device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides theta; the user's own optimiser keeps its own state."""
        rule = self.rule_of_leaves
        state = rule.state if isinstance(rule, FusedRule) else ()
        moments = {f"state.{i}": tensor for i, tensor in enumerate(state)}
        return {**moments, "parts": self.parts, "first_bad": self.first_bad}

    @property
    def backend_facts(self) -> dict[str, Any]:
        """The backend of steps on the module itself: torch, not compiled."""
        return {"name": "torch", "compiled": False}

    def _rule(self, options: Training, theta: Tensor, scale: Tensor | None) -> Rule:
        names = [entry.name for entry in self.problem.layout.entries]
        groups = rates_by_name(options.lr, names) if isinstance(options.lr, Mapping) else None
        if callable(options.optimiser):
            return OwnRule(options.optimiser, self.leaves.leaves, groups)
        rates = groups or [float(options.lr)] * len(names)  # type: ignore[arg-type]
        return FusedRule(options.optimiser, options.momentum, rates, self.leaves, theta, scale)

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Take step t and return the number of the next; the prior's part of the loss is for the last of them."""
        self.advance_on(theta, batches.at(t), t, active, with_prior=t + 1 == limit)
        return t + 1

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Take step t on theta (1, D), in place."""
        self.advance_on(theta, rows, t, active, with_prior=True)

    def advance_on(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor, *, with_prior: bool) -> None:
        """Take step t; `with_prior` also computes the prior's part of the loss, which the gradient does not need."""
        if active.device.type == "cpu" and not float(active[0]):
            return
        if with_prior:
            with torch.no_grad():
                self.parts[:, 1].copy_(self._prior_part(theta))
        if self.leaves.leaves[0].data_ptr() != theta.data_ptr():
            self.leaves.bind(theta[0])
        if self.replayed is not None and isinstance(self.rule_of_leaves, FusedRule):
            fixed = (theta, *self.rule_of_leaves.state, self.parts, self.first_bad)
            self.replayed(fixed, (rows, self.table[t]))
            return
        self._run_step(rows, t, self.factors[t])

    def _in_place(self, *tensors: Any) -> None:
        """Take a step that a CUDA graph replays: its rows, then its number and factor as a tensor, are last."""
        rows, controls = tensors[-2:]
        self._run_step(rows, controls[0], controls[1])

    def _run_step(self, rows: Tensor | None, t: Any, factor: Any) -> None:
        rule, priors = self.rule_of_leaves, self.priors
        rule.begin(t, factor)
        if self.in_backward:
            misfit = self.leaves.evaluate(
                lambda: self._misfit(rows, 1.0), lambda i, leaf, gradient: rule.update(i, leaf, gradient, priors[i])
            )
        else:
            misfit = self._collect(rows)
            self._update_collected()
        rule.end(self.leaves.leaves)
        self.parts[:, 0].copy_(misfit)
        bad = torch.isfinite(misfit).logical_not()
        self.first_bad.copy_(torch.where(bad & (self.first_bad > t), t, self.first_bad))

    def _collect(self, rows: Tensor | None) -> Tensor:
        """Return the misfit of a batch, in microbatches, and leave its gradient in the leaves."""
        if self.accumulate == 1:
            return self.leaves.evaluate(lambda: self._misfit(rows, 1.0), None)
        every = torch.arange(len(self.problem.y), device=self.problem.device) if rows is None else rows.reshape(-1)
        total = torch.zeros((), dtype=self.parts.dtype, device=self.parts.device)
        for chunk in every.chunk(self.accumulate):
            fraction = len(chunk) / len(every)
            total += self.leaves.evaluate(lambda c=chunk, f=fraction: self._misfit(c, f), None)  # type: ignore[misc]
        return total

    @torch.no_grad()
    def _update_collected(self) -> None:
        rule, leaves = self.rule_of_leaves, self.leaves.leaves
        gradients = []
        for leaf, prior in zip(leaves, self.priors):
            gradient, leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, None
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            if self.clip is not None:
                prior.add_to(gradient, leaf)
            gradients.append(gradient)
        if self.clip is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, self.clip / norm.clamp_min(self.clip))
        for index, (leaf, prior) in enumerate(zip(leaves, self.priors)):
            rule.update(index, leaf, gradients[index], None if self.clip is not None else prior)

    def _misfit(self, rows: Tensor | None, fraction: float) -> Tensor:
        objective, problem = self.objective, self.problem
        x, y = problem.x, objective.own[-1][0] if objective.shifted else problem.y
        count = len(y)
        if rows is not None:
            rows = rows.reshape(-1)
            x, y, count = map_inputs(lambda t: t[rows], x), y[rows], len(rows)
        values = self.leaves.log_likelihood_rows(x, y)
        weight = fraction * objective.likelihood_weight / count
        return -weight * sum_rows(values, objective.weights_of(rows)).sum()

    def _prior_part(self, theta: Tensor) -> Tensor:
        objective = self.objective
        if objective.anchored:
            log_prior = -0.5 * (torch.square(theta - objective.own[0]) / objective.variance).sum(-1)
        else:
            log_prior = self.problem.prior.log_prob(theta)
        return -objective.prior_weight * log_prior
