"""Minibatches of a stream, and the training step on them.

A *window* is the problem with the rows of one batch in place of its data: everything that takes the data of a problem
and row indices works on it, with the indices 0 to |B| - 1. Members of an ensemble share the batches: reading the data
once per member would cost more than the independence of their minibatches is worth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from credibly.core.rows import Rows
from credibly.errors import InputError
from credibly.inference.backend import Backend
from credibly.inference.training.batches import Batches
from credibly.inference.training.objectives import Objective
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step
from credibly.problem import Problem


class StreamBatches(Batches):
    """The batches of a stream, one after another, for all members alike.

    Attributes:
        window: the problem with the rows of the last batch.
        position: batches read so far, including those before a resume.
    """

    def __init__(self, problem: Problem, *, seed: int, purpose: str = "training", position: int = 0) -> None:
        if problem.stream is None:
            raise InputError("data", "must be a stream")
        self.stream, self.purpose = problem.stream, purpose
        super().__init__(1, 1, seed=seed)
        self.batch, self.count = problem.stream.batch, problem.n
        self.per_epoch, self.whole = problem.stream.batches, False
        self.window = copy.copy(problem.sample)
        self.position = position
        self._source: Iterator[Rows] | None = None
        self._indices = torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> Tensor:
        """Read the next batch into the window and return the indices of its rows, (B,). The step is ignored."""
        if self._source is None:
            self._source = self.stream.passes(self.seed, self.purpose, self.position)
        batch = next(self._source)
        self.position += 1
        self.window.x, self.window.y = batch.x, batch.y
        if len(self._indices) != len(batch.y):
            self._indices = torch.arange(len(batch.y), device=batch.y.device)
        return self._indices

    def seek(self, position: int) -> None:
        """Continue after this many batches, as an earlier run did."""
        self.position, self._source = position, None

    def holds(self, step: int, count: int) -> bool:
        """Return whether there is just one step: only one batch is in memory at a time."""
        return count == 1

    def left(self, step: int) -> int:
        """Return one step."""
        return 1


class StreamStep(Step):
    """A training step on the batches of a stream, the last of which may be smaller than the others."""

    def __init__(
        self, batches: StreamBatches, objective: Objective, options: Training, steps: int, theta: Tensor
    ) -> None:
        # Batches have their own addresses and, at the end of a pass, their own size: nothing to compile or replay.
        super().__init__(batches.window, objective, options, steps, theta, Backend("torch", False))
        self.replayed, self.size = None, batches.batch

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Take step t on theta (M, P), in place, with noise for the actual number of rows of the batch."""
        count = self.size if rows is None else len(rows)
        if count > self.size:
            raise InputError("data", f"a batch has {count} rows, the first had {self.size}", "Put the largest first")
        self.objective.shard = slice(0, count) if count < self.size else None
        super().advance(theta, rows, t, active)


def make_batches(problem: Problem, seed: int, purpose: str = "training") -> StreamBatches | None:
    """Return the batches of a problem's stream; None if its rows are in memory."""
    return None if problem.stream is None else StreamBatches(problem, seed=seed, purpose=purpose)
