"""One training step over flat (M, D) tensors, and the rows that go into it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from credibly.compiling import compiled
from credibly.inputs import map_inputs
from credibly.kernels.optimisers import clip_rows, learning_rates, optimiser
from credibly.problem import Problem
from credibly.rng import stream

if TYPE_CHECKING:
    from credibly.methods.training import Training


@dataclass(frozen=True)
class Perturbation:
    """How members differ beyond their start: rows drawn again (M, N), shifted targets (M, N, ...), shifted prior (M, D)."""

    rows: Tensor | None = None
    targets: Tensor | None = None
    anchors: Tensor | None = None


class Batches:
    """Row indices (M, B) of every step: each member goes through its own shuffle of the rows, epoch by epoch."""

    def __init__(
        self, rows: Tensor, batch: int, per_epoch: int, seed: int, members: int, first: int, resampled: Tensor | None
    ) -> None:
        self.rows, self.batch, self.per_epoch, self.seed, self.members, self.first = (
            rows,
            batch,
            per_epoch,
            seed,
            members,
            first,
        )
        self.resampled = resampled
        self.whole = batch == len(rows)
        self._epoch = -1
        self._order = rows

    def at(self, step: int) -> Tensor:
        """The indices of one step; with batches of all rows, the same ones at every step."""
        if self.whole:
            return self.rows if self.resampled is None else self.resampled
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            n, used = len(self.rows), self.per_epoch * self.batch
            shuffles = [
                torch.randperm(n, generator=stream(self.seed, "shuffle", self.first + m, epoch))[:used]
                for m in range(self.members)
            ]
            order = self.rows[torch.stack(shuffles).to(self.rows.device)]
            if self.resampled is not None:
                order = self.resampled.gather(1, order)
            self._order, self._epoch = (
                order.reshape(self.members, self.per_epoch, self.batch).transpose(0, 1).contiguous(),
                epoch,
            )
        return self._order[place]


class Step:
    """One training step over flat tensors; the same function compiled or eager, batched or one member at a time."""

    def __init__(
        self,
        problem: Problem,
        n: int,
        options: Training,
        steps: int,
        prior_weight: float,
        perturbation: Perturbation,
        *,
        whole: bool,
    ) -> None:
        self.problem, self.clip, self.perturbation = problem, options.clip_norm, perturbation
        self.rule = optimiser(options.optimiser, options.momentum)
        # Rows that every member sees in the same order need no gather; resampled or shuffled rows do.
        self.shared = whole and perturbation.rows is None and perturbation.targets is None
        self.likelihood_weight = 1 / problem.tempering.likelihood  # (N/B) / N / T: the mean over the batch
        self.prior_weight = prior_weight / problem.tempering.prior / n
        self.whole_data = whole and self.shared and n == problem.n
        rates = learning_rates(options.schedule, options.lr, steps, min(options.warmup, steps - 1))
        table = [(rate, *self.rule.corrections(t + 1), float(t)) for t, rate in enumerate(rates)]
        # Float64 scalars do not change the dtype of what they multiply.
        self.table = torch.tensor(table, dtype=torch.float64, device=problem.device)
        self.run = compiled(self._step, options.compile, steps, problem.device)
        self.state: tuple[Tensor, ...] = ()
        self.loss = torch.zeros(0)
        self.first_bad = torch.zeros(0)

    def begin(self, theta: Tensor) -> None:
        """Fresh optimiser state for theta (M, D)."""
        self.state = self.rule.init(theta)
        self.loss = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        self.first_bad = torch.full((len(theta),), math.inf, dtype=torch.float64, device=theta.device)

    def advance(self, theta: Tensor, rows: Tensor, t: int, active: Tensor) -> None:
        """Step t on theta (M, D), in place."""
        with torch.no_grad():
            figures = self.table[t]
            targets, anchors = self.perturbation.targets, self.perturbation.anchors
            if not self.problem.forward.looped or len(theta) == 1:
                self.run(
                    theta,
                    self.state,
                    self.loss,
                    self.first_bad,
                    self.problem.x,
                    self.problem.y,
                    rows,
                    figures,
                    active,
                    targets,
                    anchors,
                )
                return
            for m in range(len(theta)):
                one = slice(m, m + 1)
                mine = rows if rows.ndim == 1 else rows[one]
                self.run(
                    theta[one],
                    tuple(s[one] for s in self.state),
                    self.loss[one],
                    self.first_bad[one],
                    self.problem.x,
                    self.problem.y,
                    mine,
                    figures,
                    active[one],
                    None if targets is None else targets[one],
                    None if anchors is None else anchors[one],
                )

    def _step(
        self, theta: Tensor, state: tuple[Tensor, ...], loss: Tensor, first_bad: Tensor, x: Any, y: Tensor, rows: Tensor, figures: Tensor,
        active: Tensor, targets: Tensor | None, anchors: Tensor | None,
    ) -> None:  # fmt: skip
        if not self.whole_data:
            x = map_inputs(lambda values: values[rows], x)
            if targets is None:
                y = y[rows]
            else:
                members = torch.arange(len(targets), device=rows.device).unsqueeze(1)
                y = targets[members, rows.expand(len(targets), -1) if rows.ndim == 1 else rows]
        shared_x = rows.ndim == 1
        scale = self.likelihood_weight / rows.shape[-1]
        log_lik, log_prior, gradient = self._density(theta, x, y, scale, shared_x, anchors)
        value = -(scale * log_lik + self.prior_weight * log_prior)
        gradient = -gradient
        if self.clip is not None:
            gradient = clip_rows(gradient, self.clip)
        rate = figures[0] * active.unsqueeze(1)
        self.rule.update(theta, state, gradient, rate, figures[1], figures[2])
        loss.copy_(value)
        first_bad.copy_(torch.where(torch.isfinite(value), first_bad, torch.minimum(first_bad, figures[3])))

    def _density(
        self, theta: Tensor, x: Any, y: Tensor, scale: float, shared: bool, anchors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if anchors is None:
            return self.problem.parts_and_grad(theta, x, y, scale, self.prior_weight, shared=shared)
        # Anchored members: the prior's centre is moved to the member's own draw from it, p(w - anchor + centre).
        log_lik, _, gradient = self.problem.parts_and_grad(theta, x, y, scale, 0.0, shared=shared)
        variance = self.problem.prior.std**2
        offset = theta - anchors
        log_prior = -0.5 * (offset**2 / variance).sum(-1)
        return log_lik, log_prior, gradient - self.prior_weight * offset / variance
