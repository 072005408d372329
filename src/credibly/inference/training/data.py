"""Which rows train and which are held out: a split, folds, or different rows for each member."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.core.stream import needs_memory
from credibly.errors import InputError
from credibly.inference.training.objectives import Objective
from credibly.inference.training.settings import Training
from credibly.problem import Problem


@dataclass(frozen=True)
class Data:
    """Training rows and the problem of the held-out rows.

    Attributes:
        rows: indices of the training rows, or their number for all rows.
        held_out: the problem of the held-out rows that decide early stopping; None for none.
        parts: if members hold out different rows, the problems of all parts, with `held` the part of each member.
        resampled: the rows (M, N) that each member trains on, if they differ; `rows` is then their number.
    """

    rows: Tensor | int
    held_out: Problem | None
    parts: tuple[Problem, ...] = ()
    held: tuple[int, ...] = ()
    resampled: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of training rows."""
        return self.rows if isinstance(self.rows, int) else len(self.rows)

    @property
    def stops(self) -> bool:
        """Whether there are held-out rows for early stopping."""
        return self.held_out is not None or bool(self.parts)

    def score(self, objective: Objective, theta: Tensor) -> Tensor:
        """Return the score of each member (M,) on the rows it has not seen."""
        if self.held_out is not None:
            return objective.score(theta, self.held_out)
        scores = torch.empty(len(theta), dtype=theta.dtype, device=theta.device)
        for part, members in self.unseen(len(theta)):
            scores[members] = objective.score(theta[members], part)
        return scores

    def unseen(self, count: int) -> list[tuple[Problem, list[int]]]:
        """Return the held-out rows, each part with those of `count` members that have not seen it."""
        if self.held_out is not None:
            return [(self.held_out, list(range(count)))]
        by_part = [[m for m, held in enumerate(self.held) if held == index] for index in range(len(self.parts))]
        return [(part, members) for part, members in zip(self.parts, by_part) if members]


def split(problem: Problem, options: Training, seed: int) -> Data:
    """Split the rows into training and held-out rows. Raise if the split or the batch size does not fit."""
    data = Data(problem.n, None)
    if problem.stream is not None and options.batch_size not in (None, problem.stream.batch):
        found = f"must be that of the loader, {problem.stream.batch}, or None, got {options.batch_size}"
        raise InputError("batch_size", found, "Set it in the loader")
    if options.validation and problem.stream is not None:
        raise needs_memory(problem.stream, f"validation={options.validation} holds out some of its rows in memory")
    if options.validation:
        held = round(problem.n * options.validation)
        if held < 1 or held >= problem.n:
            raise InputError(
                "validation",
                f"must leave rows to train on and to validate with, got {options.validation} of {problem.n} rows",
            )
        order = torch.randperm(problem.n, generator=stream(seed, "validation split")).to(problem.device)
        data = Data(order[held:].sort().values, problem.subset(order[:held].sort().values))
    if options.batch_size is not None and options.batch_size > data.count and problem.stream is None:
        found = f"must be at most the number of training rows, {data.count}, got {options.batch_size}"
        raise InputError("batch_size", found)
    return data


def folds(problem: Problem, size: int, seed: int) -> list[Data]:
    """Return folds of `size` rows in shuffled order, each held out from all the others."""
    order = torch.randperm(problem.n, generator=stream(seed, "validation split")).to(problem.device)
    parts = [slice(k * size, (k + 1) * size) for k in range(problem.n // size)]
    rows = [torch.cat([order[: part.start], order[part.stop :]]).sort().values for part in parts]
    return [Data(own, problem.subset(order[part].sort().values)) for own, part in zip(rows, parts)]


def rotated(problem: Problem, options: Training, seed: int, members: range) -> Data:
    """Hold out different rows for each member, as many as `split` does, so that every row trains most members."""
    size = problem.n - split(problem, options, seed).count
    parts = folds(problem, size, seed)
    held = tuple(m % len(parts) for m in members)
    rows = torch.stack([torch.as_tensor(parts[k].rows) for k in held])
    problems = tuple(part.held_out for part in parts if part.held_out is not None)
    return Data(problem.n - size, None, problems, held, rows)
