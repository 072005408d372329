"""Objectives: what a training step minimises, as a function of flat (M, P) parameters, some rows, and given noise."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, Tensors, map_inputs
from credibly.core.rows import sum_rows
from credibly.inference.kernels.optimisers import UpdateRule
from credibly.priors.hierarchical import BoundHierarchical
from credibly.problem import Problem


class Objective(ABC):
    """A loss of M independent parameter vectors, with its gradient: all that the training loop needs from a method.

    Attributes:
        own: per-member tensors, with first axis M. They are passed back to `evaluate`, sliced if members are evaluated
            one at a time.
        part_names: the terms that the loss is the sum of, for the progress bar and the history.
        looped: whether members must be evaluated one at a time.
        weights: weights of all rows of the problem, with a mean of 1; None for ones.
        rule: the update rule for what `evaluate` returns; None for the optimiser of the settings.
        shard: the rows of a batch that this process evaluates, if processes share batches; None for all. The noise
            of a step is drawn for all rows and sliced to these, so that it does not depend on the number of processes.
    """

    own: tuple[Tensor, ...] = ()
    part_names: tuple[str, ...] = ("loss",)
    looped: bool = False
    weights: Tensor | None = None
    rule: UpdateRule | None = None
    shard: slice | None = None

    def controls(self, step: int) -> tuple[float, ...]:
        """Return the numbers that change from step to step, such as an annealed weight; always equally many."""
        return ()

    def noise(self, step: int) -> tuple[Tensor, ...]:
        """Draw the random tensors (M, ...) of a step, outside compiled code, which has no generators."""
        return ()

    @abstractmethod
    def evaluate(
        self, theta: Tensor, own: Tensors, x: Inputs, y: Tensor, rows: Tensor | None, noise: Tensors, controls: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the parts of the loss (M, parts) and its gradient (M, P).

        x and y are all of the data; `rows` are the indices (B,) or (M, B) to use, None for all of them.
        """

    def weights_of(self, rows: Tensor | None) -> Tensor | None:
        """Return the weights of a batch, in the shape of its indices; None for ones."""
        return self.weights if self.weights is None or rows is None else self.weights[rows]

    @abstractmethod
    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Return the mean log predictive density of each member on held-out rows, weighted by them, (M,)."""


def effective_rows(problem: Problem, n: int) -> float:
    """Return N for n of the problem's rows: their number times the mean weight."""
    return n if problem.sample_weight is None else n * problem.total_weight / problem.n


@dataclass(frozen=True)
class Perturbation:
    """How members differ beyond their starting points: shifted targets (M, N, ...), shifted prior means (M, D)."""

    targets: Tensor | None = None
    anchors: Tensor | None = None


def with_mode(problem: Problem) -> Problem:
    """Return the problem, or one whose density has a mode: with the scales of a hierarchical prior fixed."""
    if not isinstance(problem.prior, BoundHierarchical):
        return problem
    held = copy.copy(problem)
    held.prior = problem.prior.held()
    return held


class NegativeLogDensity(Objective):
    """-(1/N) log p_T(w | D), or -(1/N) log p(D | w) with prior_weight 0, for M members that may be perturbed.

    Args:
        problem: the density.
        n: number of training rows. With weights, N is n times their mean over all rows, for every member alike: the
            weight of the prior against the likelihood is exact whichever rows a member trains on.
        prior_weight: weight of the log prior; 0 leaves the prior out.
        perturbation: how members differ.

    The scales of a hierarchical prior stay where they start: the joint density of weights and scales has no mode.
    Anchored members have the mean of their Normal prior moved to a draw from it, and may have shifted targets.
    """

    part_names = ("misfit", "prior")

    def __init__(
        self, problem: Problem, n: int, prior_weight: float = 1.0, perturbation: Perturbation | None = None
    ) -> None:
        self.problem, self.n, self.weights = with_mode(problem), n, problem.relative_weight
        self.looped = problem.forward.looped
        given = perturbation or Perturbation()
        self.anchored, self.shifted = given.anchors is not None, given.targets is not None
        self.own = tuple(t for t in (given.anchors, given.targets) if t is not None)
        # Factor of the mean over the batch: (N/B) / N / T.
        self.likelihood_weight = 1 / problem.tempering.likelihood
        self.prior_weight = prior_weight / problem.tempering.prior / effective_rows(problem, n)
        self.variance = torch.square(problem.prior.std) if self.anchored else torch.ones(())

    def evaluate(
        self, theta: Tensor, own: Tensors, x: Inputs, y: Tensor, rows: Tensor | None, noise: Tensors, controls: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return misfit and prior terms, and the gradient of their sum."""
        x, y = self._rows(own, x, y, rows)
        count = self.n if rows is None else rows.shape[-1]
        shared = (rows is None or rows.ndim == 1) and not self.shifted
        if self.shifted and (rows is None or rows.ndim == 1):
            x = map_inputs(lambda t: t.expand(len(theta), *t.shape), x)
        weight = self.likelihood_weight / count
        prior_weight = 0.0 if self.anchored else self.prior_weight
        log_lik, log_prior, gradient = self.problem.parts_and_grad(
            theta, x, y, weight, prior_weight, shared=shared, weight=self.weights_of(rows)
        )
        if self.anchored:
            offset = theta - own[0]
            log_prior = -0.5 * (torch.square(offset) / self.variance).sum(-1)
            gradient = gradient - self.prior_weight * offset / self.variance
        return torch.stack([-weight * log_lik, -self.prior_weight * log_prior], -1), -gradient

    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Return the mean log likelihood per row."""
        total = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        for x, y, weight in held_out.blocks(len(theta)):
            total += sum_rows(held_out.log_likelihood_rows(theta, x, y), weight)
        return total / held_out.total_weight

    def _rows(self, own: tuple[Tensor, ...], x: Inputs, y: Tensor, rows: Tensor | None) -> tuple[Inputs, Tensor]:
        if rows is None:
            return x, own[-1] if self.shifted else y
        x = map_inputs(lambda t: t[rows], x)
        if not self.shifted:
            return x, y[rows]
        targets = own[-1]
        members = torch.arange(len(targets), device=rows.device).unsqueeze(1)
        return x, targets[members, rows if rows.ndim == 2 else rows.expand(len(targets), -1)]
