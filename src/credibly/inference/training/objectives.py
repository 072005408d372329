"""What a training step minimises, as a function of flat (M, P) parameters, some rows, and noise drawn outside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, map_inputs
from credibly.problem import Problem


class Objective(ABC):
    """A loss of M independent parameter vectors, with its gradient. The training loop asks nothing else of a method.

    Attributes:
        own: tensors with a first axis M that belong to the members; they come back in `evaluate`, in parts of members when
            the members are taken in turn.
        part_names: the terms that the loss is the sum of, for the progress line and the history.
        looped: whether the members have to be taken one at a time.
        share: which rows of a batch this process evaluates, where processes share batches out; None for all of them. The
            noise of a step is drawn for all rows, so that it is the same however they are shared, and cut to these.
    """

    own: tuple[Tensor, ...] = ()
    part_names: tuple[str, ...] = ("loss",)
    looped: bool = False
    share: slice | None = None

    def figures(self, step: int) -> tuple[float, ...]:
        """Numbers that change from step to step, such as an annealed weight; always as many."""
        return ()

    def noise(self, step: int) -> tuple[Tensor, ...]:
        """The random tensors (M, ...) of a step, drawn here because compiled code has no generators."""
        return ()

    @abstractmethod
    def evaluate(
        self, theta: Tensor, own: tuple[Tensor, ...], x: Inputs, y: Tensor, rows: Tensor | None, noise: tuple[Tensor, ...], figures: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The parts of the loss (M, parts) and its gradient (M, P).

        x and y are all of the data; `rows` are the indices (B,) or (M, B) to use, None for all of them.
        """

    @abstractmethod
    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Mean log predictive density of each member on held-out rows, (M,)."""


@dataclass(frozen=True)
class Perturbation:
    """How members differ beyond their start: shifted targets (M, N, ...), shifted prior (M, D)."""

    targets: Tensor | None = None
    anchors: Tensor | None = None


class NegativeLogDensity(Objective):
    """-(1/N) log p_T(w | D), or -(1/N) log p(D | w) with prior_weight 0; for M members as they are or perturbed.

    Anchored members have the centre of their Normal prior moved to a draw from it, and may have shifted targets.
    """

    part_names = ("misfit", "prior")

    def __init__(
        self, problem: Problem, n: int, prior_weight: float = 1.0, perturbation: Perturbation | None = None
    ) -> None:
        self.problem, self.n = problem, n
        self.looped = problem.forward.looped
        given = perturbation or Perturbation()
        self.anchored, self.shifted = given.anchors is not None, given.targets is not None
        self.own = tuple(t for t in (given.anchors, given.targets) if t is not None)
        self.likelihood_weight = 1 / problem.tempering.likelihood  # of the mean over the batch: (N/B) / N / T
        self.prior_weight = prior_weight / problem.tempering.prior / n
        self.variance = torch.square(problem.prior.std) if self.anchored else torch.ones(())

    def evaluate(
        self, theta: Tensor, own: tuple[Tensor, ...], x: Inputs, y: Tensor, rows: Tensor | None, noise: tuple[Tensor, ...], figures: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Misfit and prior terms, and the gradient of their sum."""
        x, y = self._rows(own, x, y, rows)
        count = self.n if rows is None else rows.shape[-1]
        shared = (rows is None or rows.ndim == 1) and not self.shifted
        if self.shifted and (rows is None or rows.ndim == 1):
            x = map_inputs(lambda t: t.expand(len(theta), *t.shape), x)
        weight = self.likelihood_weight / count
        prior_weight = 0.0 if self.anchored else self.prior_weight
        log_lik, log_prior, gradient = self.problem.parts_and_grad(theta, x, y, weight, prior_weight, shared=shared)
        if self.anchored:
            offset = theta - own[0]
            log_prior = -0.5 * (torch.square(offset) / self.variance).sum(-1)
            gradient = gradient - self.prior_weight * offset / self.variance
        return torch.stack([-weight * log_lik, -self.prior_weight * log_prior], -1), -gradient

    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Mean log likelihood a row."""
        total = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        for x, y in held_out.blocks(len(theta)):
            total += held_out.log_likelihood_rows(theta, x, y).flatten(1).sum(1)
        return total / held_out.n

    def _rows(self, own: tuple[Tensor, ...], x: Inputs, y: Tensor, rows: Tensor | None) -> tuple[Inputs, Tensor]:
        if rows is None:
            return x, own[-1] if self.shifted else y
        x = map_inputs(lambda t: t[rows], x)
        if not self.shifted:
            return x, y[rows]
        targets = own[-1]
        members = torch.arange(len(targets), device=rows.device).unsqueeze(1)
        return x, targets[members, rows if rows.ndim == 2 else rows.expand(len(targets), -1)]
