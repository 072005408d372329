"""The benchmarks of `continual-mnist`: sequences of tasks, and the network that is trained on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credibly.continual.learning import MultiHead
from credibly.core.rng import global_stream, stream
from credibly.errors import InputError
from studies.ood import HOME

HIDDEN = 100  # units of each of the two hidden layers


@dataclass(frozen=True)
class Size:
    """The size of a benchmark: tasks; training images, test images, steps and coreset images per task; hidden units."""

    tasks: int
    rows: int
    test: int
    steps: int
    coreset: int
    hidden: int = HIDDEN


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A sequence of tasks with training and test images, the network, and the parameters of each task's head."""

    tasks: list[tuple[Any, Tensor]]
    tests: list[tuple[Any, Tensor]]
    net: nn.Module
    heads: list[str] | None


def permuted(data: list[Tensor], size: Size, seed: int, device: str) -> Benchmark:
    """Return tasks that each permute the pixels differently; all have ten classes and share one head."""
    x, y, x_test, y_test = data
    tasks, tests = [], []
    for t in range(size.tasks):
        generator = stream(seed, "permutation", t)
        order = torch.randperm(x.shape[1], generator=generator)
        rows = torch.randperm(len(x), generator=generator)[: size.rows]
        seen = torch.randperm(len(x_test), generator=generator)[: size.test]
        tasks.append((x[rows][:, order].to(device), y[rows].to(device)))
        tests.append((x_test[seen][:, order].to(device), y_test[seen].to(device)))
    with global_stream(seed, "study network"):
        net = _body(x.shape[1], size.hidden).append(nn.Linear(size.hidden, 10))
    return Benchmark(tasks, tests, net.to(device), None)


def split(data: list[Tensor], size: Size, seed: int, device: str) -> Benchmark:
    """Return tasks of which task t separates digits 2t and 2t + 1, with its own head on a shared body."""
    x, y, x_test, y_test = data
    tasks: list[tuple[Any, Tensor]] = []
    tests: list[tuple[Any, Tensor]] = []
    for t in range(size.tasks):
        generator = stream(seed, "split rows", t)
        for images, labels, most, kept in ((x, y, size.rows, tasks), (x_test, y_test, size.test, tests)):
            mine = ((labels == 2 * t) | (labels == 2 * t + 1)).nonzero().squeeze(1)
            if not len(mine):
                raise InputError(
                    "--root", f"{HOME} has no digits {2 * t} and {2 * t + 1}", "Pass the complete data set"
                )
            rows = mine[torch.randperm(len(mine), generator=generator)[:most]]
            task = torch.full((len(rows),), t)
            kept.append(((images[rows].to(device), task.to(device)), (labels[rows] - 2 * t).to(device)))
    with global_stream(seed, "study network"):
        net = MultiHead(_body(x.shape[1], size.hidden), [nn.Linear(size.hidden, 2) for _ in range(size.tasks)])
    return Benchmark(tasks, tests, net.to(device), [f"heads.{t}.*" for t in range(size.tasks)])


def _body(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())


MAKERS: dict[str, Callable[[list[Tensor], Size, int, str], Benchmark]] = {"permuted": permuted, "split": split}
