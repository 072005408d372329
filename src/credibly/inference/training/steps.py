"""One training step over flat (M, P) tensors, and the rows that go into it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credibly.core.compilation import compiled
from credibly.core.cuda_graphs import Replayed
from credibly.core.inputs import Inputs
from credibly.core.rng import stream
from credibly.core.threads import one_thread
from credibly.inference.kernels.optimisers import clip_rows, learning_rates, optimiser
from credibly.inference.training.objectives import Objective
from credibly.problem import Problem

if TYPE_CHECKING:
    from credibly.inference.training.loop import Training

CHUNK = (
    1024  # steps whose figures are made into views at a time: one view a step would cost more than a small step does
)


MANY_STEPS = 2**31  # more than any run has


class Batches:
    """The rows of every step: each member goes through its own shuffle of them, epoch by epoch.

    Args:
        rows: indices of the training rows, or their number for all rows of the problem.
        batch: rows in a batch; all of them makes every step a full-batch step.
        seed: of the shuffles.
        members: how many shuffles; 0 for one that all members share.
        resampled: (M, N) rows of each member's own: drawn again (bootstrap), or those of its fold.
        first: the number of the first member.
    """

    def __init__(
        self, rows: Tensor | int, batch: int, *, seed: int, members: int = 0, resampled: Tensor | None = None, first: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.rows = torch.arange(rows, device=device) if isinstance(rows, int) else rows
        self.every = isinstance(rows, int)
        self.batch, self.seed, self.members, self.first, self.resampled = batch, seed, members, first, resampled
        self.per_epoch = max(1, len(self.rows) // batch)
        self.whole = batch == len(self.rows)
        self._all = resampled if resampled is not None else None if isinstance(rows, int) else rows
        # Seeding a stream costs as much as a small shuffle, so a stream serves several epochs where they are short.
        self.epochs = 8 if len(self.rows) <= 10_000 else 1
        self._block = -1
        self._order: tuple[Tensor, ...] = ()
        self._slab = torch.empty(0)  # the same in one piece

    def at(self, step: int) -> Tensor | None:
        """The indices of one step: (M, B), or (B,) for all members, or None for all the rows of the problem."""
        if self.whole:
            return self._all
        block, place = divmod(step, self.epochs * self.per_epoch)
        if block != self._block:
            with one_thread():  # others would go on spinning for a while on the cores that the steps want
                self._slab, self._block = self._shuffled(block), block
            self._order = self._slab.unbind(0)
        return self._order[place]

    def holds(self, step: int, count: int) -> bool:
        """Whether the rows of so many steps from this one on lie side by side."""
        return count <= self.left(step)

    def left(self, step: int) -> int:
        """Steps from this one on whose rows lie side by side."""
        block = self.epochs * self.per_epoch
        return MANY_STEPS if self.whole else block - step % block

    def span(self, step: int, count: int) -> Tensor | None:
        """The rows of steps that lie side by side, (count, M, B); None for all rows of the problem in each."""
        rows = self.at(step)
        if self.whole:
            return rows if rows is None else rows.expand(count, *rows.shape)
        place = step % (self.epochs * self.per_epoch)
        return self._slab[place : place + count]

    def _shuffled(self, block: int) -> Tensor:
        n, used = len(self.rows), self.per_epoch * self.batch
        streams = [stream(self.seed, "shuffle", self.first + m, block) for m in range(self.members or 1)]
        shuffles = [torch.randperm(n, generator=own)[:used] for own in streams for _ in range(self.epochs)]
        order = torch.stack(shuffles).to(self.rows.device)
        order = (order if self.every else self.rows[order]).reshape(len(streams), -1)
        if self.resampled is not None:
            order = self.resampled.gather(1, order.expand(len(self.resampled), -1))
        order = order.reshape(len(order), -1, self.batch).transpose(0, 1).contiguous()
        return order.squeeze(1) if self.resampled is None and not self.members else order


class Step:
    """Gather, loss, gradient and update as one function; the same one compiled or eager, batched or a member at a time."""

    def __init__(self, problem: Problem, objective: Objective, options: Training, steps: int, theta: Tensor) -> None:
        self.problem, self.objective, self.clip = problem, objective, options.clip_norm
        self.rule = optimiser(options.optimiser, options.momentum)
        rates = learning_rates(options.schedule, options.lr, steps, min(options.warmup, steps - 1))
        table = [(rate, *self.rule.corrections(t + 1), float(t), *objective.figures(t)) for t, rate in enumerate(rates)]
        # Float64 scalars do not change the dtype of what they multiply.
        self.table = torch.tensor(table, dtype=torch.float64, device=theta.device)
        self._figures: tuple[int, tuple[Tensor, ...]] = (-1, ())
        self.run = compiled(self._step, options.compile, steps, theta.device, theta.numel())
        self.state = self.rule.init(theta)
        self.parts = torch.zeros(len(theta), len(objective.part_names), dtype=theta.dtype, device=theta.device)
        self.first_bad = torch.full((len(theta),), math.inf, dtype=torch.float64, device=theta.device)
        on_gpu = theta.device.type == "cuda" and (not objective.looped or len(theta) == 1)
        self.replayed = Replayed(self._in_place, theta.device) if on_gpu else None

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """One step or more from step t on, before `limit`; the number of the next."""
        self.advance(theta, batches.at(t), t, active)
        return t + 1

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Step t on theta (M, P), in place; members whose `active` is 0 rest."""
        with torch.no_grad():
            figures, noise, own = self._figures_at(t), self.objective.noise(t), self.objective.own
            x, y = self.problem.x, self.problem.y
            if self.replayed is not None:
                changed = (theta, *self.state, self.parts, self.first_bad)
                self.replayed(changed, (rows, figures, active, *noise))
                return
            if not self.objective.looped or len(theta) == 1:
                self.run(theta, self.state, own, self.parts, self.first_bad, x, y, rows, noise, figures, active)
                return
            for m in range(len(theta)):
                one = slice(m, m + 1)
                state, mine, drawn = (tuple(tensor[one] for tensor in some) for some in (self.state, own, noise))
                batch = rows[one] if rows is not None and rows.ndim == 2 else rows
                self.run(
                    theta[one],
                    state,
                    mine,
                    self.parts[one],
                    self.first_bad[one],
                    x,
                    y,
                    batch,
                    drawn,
                    figures,
                    active[one],
                )

    def _figures_at(self, t: int) -> Tensor:
        chunk, place = divmod(t, CHUNK)
        if chunk != self._figures[0]:
            self._figures = (chunk, self.table[chunk * CHUNK : (chunk + 1) * CHUNK].unbind(0))
        return self._figures[1][place]

    def _in_place(self, theta: Tensor, *rest: Tensor) -> None:
        """The step on tensors that stay where they are, as a graph asks for."""
        count = len(self.state)
        state, (parts, first_bad, rows, figures, active), noise = (
            rest[:count],
            rest[count : count + 5],
            rest[count + 5 :],
        )
        x, y = self.problem.x, self.problem.y
        self.run(theta, state, self.objective.own, parts, first_bad, x, y, rows, noise, figures, active)

    def _step(
        self, theta: Tensor, state: tuple[Tensor, ...], own: tuple[Tensor, ...], parts: Tensor, first_bad: Tensor, x: Inputs,
        y: Tensor, rows: Tensor | None, noise: tuple[Tensor, ...], figures: Tensor, active: Tensor,
    ) -> None:  # fmt: skip
        value, gradient = self.objective.evaluate(theta, own, x, y, rows, noise, figures[4:])
        self._update(theta, state, parts, first_bad, value, gradient, figures, active)

    def _update(
        self, theta: Tensor, state: tuple[Tensor, ...], parts: Tensor, first_bad: Tensor, value: Tensor, gradient: Tensor,
        figures: Tensor, active: Tensor,
    ) -> None:  # fmt: skip
        if self.clip is not None:
            gradient = clip_rows(gradient, self.clip)
        self.rule.update(theta, state, gradient, figures[0] * active.unsqueeze(1), figures[1], figures[2])
        parts.copy_(value)
        finite = torch.isfinite(value).all(-1)
        first_bad.copy_(torch.where(finite, first_bad, torch.minimum(first_bad, figures[3])))
