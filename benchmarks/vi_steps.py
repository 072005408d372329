"""Shared by the variational and dropout benchmarks: tasks, our training step, and plain training loops.

All training steps, ours and the peers', take the same shuffled rows from the same `Batches`, gather them, sample their
noise, and end with Adam. Ours use the objects of `credibly.inference.training.loop.train`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credibly as cr
from benchmarks import ensemble
from benchmarks.ensemble import LR, PRIOR, Task
from credibly.inference.training.batches import Batches
from credibly.inference.training.objectives import Objective
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step

BATCH = 128
TABLE_STEPS = 100_000  # nominal length of the run; only the table of learning rates has this length


def small() -> Task:
    """Return 13-50-1 on 455 rows with Gaussian noise."""
    return replace(ensemble.small(), batch=BATCH)


def wide() -> Task:
    """Return 784-400-400-10 on 2,000 rows whose labels follow a linear rule, so that there is something to fit."""
    task = ensemble.wide()
    rule = torch.randn(784, 10, generator=torch.Generator().manual_seed(1))
    return replace(task, y=(task.x @ rule).argmax(1), batch=BATCH)


def convolutional() -> Task:
    """Return two pooled convolutions of 8 and 16 channels and a linear layer, on 1,000 images of 28 x 28."""
    torch.manual_seed(0)
    x = torch.randn(1000, 1, 28, 28)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    return Task("CNN 8-16", net, x, torch.randint(10, (1000,)), 64, cr.likelihoods.Categorical(), F.cross_entropy)


class Ours:
    """An objective in the objects of the real training loop; a call is one step."""

    def __init__(self, task: Task, objective: Objective, theta: Tensor, *, compiled: bool) -> None:
        problem = task.problem()
        settings = Training(batch_size=task.batch, lr=LR, schedule="constant", compile=compiled, steps=TABLE_STEPS)
        self.objective, self.theta = objective, theta
        self.batches = Batches(problem.n, task.batch, seed=0)
        self.step = Step(problem, objective, settings, TABLE_STEPS, theta)
        self.active = torch.ones(1)
        self.done = 0

    def __call__(self) -> None:
        self.step.advance(self.theta, self.batches.at(self.done), self.done % TABLE_STEPS, self.active)
        self.done += 1

    def compile(self) -> float:
        """Return the seconds of the first call. Exits if the step fell back to eager, which would be mislabelled."""
        start = time.perf_counter()
        self()
        seconds = time.perf_counter() - start
        run = self.step.run
        if getattr(run, "active", run) is getattr(run, "plain", run):
            raise SystemExit("the step was not compiled (is there a C++ compiler?): nothing to compare")
        return seconds


class Loop:
    """A plain PyTorch training loop: gather a minibatch, loss and penalty, backward, Adam; a call is one step."""

    def __init__(
        self,
        task: Task,
        net: nn.Module,
        penalty: Callable[[], Tensor] | None = None,
        groups: Any = None,
        *,
        fused: bool = True,
    ) -> None:
        self.task, self.net, self.penalty = task, net, penalty
        self.adam = torch.optim.Adam(groups or net.parameters(), lr=LR, fused=fused or None)
        self.batches = Batches(len(task.x), task.batch, seed=0)
        self.done = 0

    def __call__(self) -> None:
        rows = self.batches.at(self.done)
        assert rows is not None
        self.adam.zero_grad()
        self.loss(rows).backward()
        self.adam.step()
        self.done += 1

    def loss(self, rows: Tensor) -> Tensor:
        loss = self.task.loss(self.net(self.task.x[rows]), self.task.y[rows])
        return loss if self.penalty is None else loss + self.penalty()


def own_copy(task: Task) -> nn.Module:
    return task.problem().layout.module.requires_grad_(True)


def plain_map(task: Task, prior_in: str) -> Loop:
    """Return MAP of the same network, with the Normal prior in the loss or as Adam's weight decay (less work)."""
    net, decay = own_copy(task), 1 / (PRIOR**2 * len(task.x))
    parameters = list(net.parameters())
    if prior_in == "optimiser":
        return Loop(task, net, groups=[{"params": parameters, "weight_decay": decay}])
    return Loop(task, net, lambda: 0.5 * decay * sum((p.square().sum() for p in parameters), torch.zeros(())))


def check_gradient(theirs: Tensor, ours: Tensor, what: str) -> None:
    """Exit unless both gradients agree."""
    error = float((theirs - ours).norm() / ours.norm())
    if not error < 1e-3:
        raise SystemExit(f"{what} has another gradient (relative error {error:.2g}): nothing to compare")
