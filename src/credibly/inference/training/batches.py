"""The rows of every minibatch, from streams keyed by (seed, member, block of epochs)."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.core.threads import one_thread

# A number of steps that no run reaches.
MANY_STEPS = 2**31


class Batches:
    """The minibatch rows of every step: each member has its own shuffle of the rows per epoch.

    Args:
        rows: indices of the training rows, or their number for all rows of the problem.
        batch: rows per batch; all of them makes every step a full-batch step.
        seed: seed of the shuffles.
        members: number of shuffles; 0 for one that all members share.
        resampled: (M, N) rows of each member: resampled with replacement (bootstrap), or those of its fold.
        first: index of the first member.
    """

    def __init__(
        self,
        rows: Tensor | int,
        batch: int,
        *,
        seed: int,
        members: int = 0,
        resampled: Tensor | None = None,
        first: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows = torch.arange(rows, device=device) if isinstance(rows, int) else rows
        self.count = len(self.rows)
        self.every = isinstance(rows, int)
        self.batch, self.seed, self.members, self.first, self.resampled = batch, seed, members, first, resampled
        self.per_epoch = max(1, len(self.rows) // batch)
        self.whole = batch == len(self.rows)
        self._all = resampled if resampled is not None else None if isinstance(rows, int) else rows
        # Seeding a stream costs as much as a small shuffle, so a stream serves several epochs if they are short.
        self.epochs = 8 if len(self.rows) <= 10_000 else 1
        self._block = -1
        self._order: tuple[Tensor, ...] = ()
        # The same as one tensor.
        self._slab = torch.empty(0)

    def at(self, step: int) -> Tensor | None:
        """Return the indices of one step: (M, B), or (B,) for all members, or None for all the rows of the problem."""
        if self.whole:
            return self._all
        block, position = divmod(step, self.epochs * self.per_epoch)
        if block != self._block:
            # Other threads would keep spinning for a while on the cores that the steps need.
            with one_thread():
                self._slab, self._block = self._shuffled(block), block
            self._order = self._slab.unbind(0)
        return self._order[position]

    def holds(self, step: int, count: int) -> bool:
        """Return whether the rows of `count` steps from this one on are contiguous."""
        return count <= self.left(step)

    def left(self, step: int) -> int:
        """Return how many steps from this one on have contiguous rows."""
        block = self.epochs * self.per_epoch
        return MANY_STEPS if self.whole else block - step % block

    def span(self, step: int, count: int) -> Tensor | None:
        """Return the rows of contiguous steps, (count, M, B); None if each takes all rows of the problem."""
        rows = self.at(step)
        if self.whole:
            return rows if rows is None else rows.expand(count, *rows.shape)
        position = step % (self.epochs * self.per_epoch)
        return self._slab[position : position + count]

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
