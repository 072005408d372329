"""Training M parameter vectors as one computation: gather, density, gradient and update in one compiled step.

What is minimised is -(1/N) log p_T(w | D), so that a learning rate means the same for any N. The M rows share the step and
nothing else: their own minibatches, their own clipping, their own early stopping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from credibly.core.compilation import Compile
from credibly.core.progress import Progress
from credibly.core.rng import stream
from credibly.distributed.heartbeat import Heartbeat
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError, TrainingError
from credibly.inference.kernels.optimisers import learning_rates, optimiser
from credibly.inference.training.objectives import Objective
from credibly.inference.training.shared_steps import make_step
from credibly.inference.training.steps import Batches, Step
from credibly.problem import Problem

DEFAULT_STEPS = 3_000


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of an optimisation, shared by every method that has one.

    Args:
        epochs: passes over the data; None leaves it to `steps`.
        steps: optimiser steps; by default 3,000 or 20 epochs, whichever is more.
        batch_size: rows in a minibatch; None takes 128, or all rows where there are fewer.
        lr: learning rate.
        optimiser: "adam" or "sgd".
        momentum: of SGD, or Adam's first decay.
        schedule: "cosine", "linear" or "constant".
        warmup: steps over which the learning rate rises from zero.
        clip_norm: largest norm of a member's gradient of the mean loss; None for no limit.
        validation: fraction of the rows held out; the best parameters on them are kept.
        patience: with validation, how many evaluations without a gain a member waits before it stops.
        compile: True, False or "auto" (when the run is long enough to pay for it).
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float = 1e-2
    optimiser: str = "adam"
    momentum: float = 0.9
    schedule: str = "cosine"
    warmup: int = 0
    clip_norm: float | None = None
    validation: float = 0.0
    patience: int = 20
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size", "patience"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(name, f"found {value!r}", "Pass a whole number from 1 up")
        if self.epochs is not None and self.steps is not None:
            raise InputError("steps", f"found {self.steps} beside epochs={self.epochs}", "Pass one of the two")
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise InputError(name, f"found {value!r}", "Pass a positive number")
        if not 0 <= self.validation < 1:
            raise InputError(
                "validation", f"found {self.validation!r}", "Pass a fraction of the rows from 0 to below 1"
            )
        if not 0 <= self.momentum < 1:
            raise InputError("momentum", f"found {self.momentum!r}", "Pass a number from 0 to below 1")
        if self.warmup < 0:
            raise InputError("warmup", f"found {self.warmup!r}", "Pass a number of steps from 0 up")
        optimiser(self.optimiser, self.momentum)
        learning_rates(self.schedule, self.lr, 1, 0)

    def plan(self, rows: int) -> tuple[int, int, int]:
        """(steps, batch size, batches an epoch) for so many training rows."""
        batch = min(rows, self.batch_size or 128)
        per_epoch = max(1, rows // batch)
        steps = self.steps or (self.epochs * per_epoch if self.epochs else max(DEFAULT_STEPS, 20 * per_epoch))
        return steps, batch, per_epoch


@dataclass
class Trained:
    """The parameters (M, D) that training ended with, and what was seen on the way."""

    theta: Tensor
    history: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """The rows that train and the problem of those held out; None for all rows and for none.

    Attributes:
        parts: where members hold out rows of their own, the problems of all such parts, and `held` the part of each member.
        resampled: the rows (M, N) that each member trains on, where they are its own; `rows` is then their number.
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
        """Whether there are rows to stop by."""
        return self.held_out is not None or bool(self.parts)

    def score(self, objective: Objective, theta: Tensor) -> Tensor:
        """Of each member (M,) on the rows that it has not seen."""
        if self.held_out is not None:
            return objective.score(theta, self.held_out)
        scores = torch.empty(len(theta), dtype=theta.dtype, device=theta.device)
        for place, part in enumerate(self.parts):
            members = [m for m, held in enumerate(self.held) if held == place]
            if members:
                scores[members] = objective.score(theta[members], part)
        return scores


def split(problem: Problem, options: Training, seed: int) -> Data:
    """Training rows and held-out rows, as the options ask; refuses a split or a batch size that does not fit."""
    data = Data(problem.n, None)
    if options.validation:
        held = round(problem.n * options.validation)
        if held < 1 or held >= problem.n:
            raise InputError(
                "validation",
                f"{options.validation} of {problem.n} rows leaves nothing to train on or to validate with",
                "Pass a fraction that leaves rows on both sides",
            )
        order = torch.randperm(problem.n, generator=stream(seed, "validation split")).to(problem.device)
        data = Data(order[held:].sort().values, problem.subset(order[:held].sort().values))
    if options.batch_size is not None and options.batch_size > data.count:
        found = f"found {options.batch_size} for {data.count} training rows"
        raise InputError("batch_size", found, "Pass at most the number of rows, or None")
    return data


def folds(problem: Problem, size: int, seed: int) -> list[Data]:
    """Parts of so many rows, one after another in a shuffle, each held out from all the others."""
    order = torch.randperm(problem.n, generator=stream(seed, "validation split")).to(problem.device)
    parts = [slice(k * size, (k + 1) * size) for k in range(problem.n // size)]
    rows = [torch.cat([order[: part.start], order[part.stop :]]).sort().values for part in parts]
    return [Data(own, problem.subset(order[part].sort().values)) for own, part in zip(rows, parts)]


def rotated(problem: Problem, options: Training, seed: int, members: range) -> Data:
    """Rows held out by members in turn, as many each as `split` holds out: every row trains most of the members."""
    size = problem.n - split(problem, options, seed).count
    parts = folds(problem, size, seed)
    held = tuple(m % len(parts) for m in members)
    rows = torch.stack([torch.as_tensor(parts[k].rows) for k in held])
    problems = tuple(part.held_out for part in parts if part.held_out is not None)
    return Data(problem.n - size, None, problems, held, rows)


def train(
    problem: Problem, objective: Objective, theta: Tensor, options: Training, data: Data, *, seed: int, title: str,
    shared_batches: bool = False, progress: bool | None = None, first: int = 0,
    mesh: Mesh | None = None, peers: World | None = None,
) -> Trained:  # fmt: skip
    """Minimises an objective from theta (M, P), which is changed in place.

    Args:
        first: the number of the first member, where other processes train other members.
        mesh: processes that share the rows of each minibatch; the result is theirs all, bit for bit, and that of one process to
            rounding (float64: 1e-9 of the weights after 50 steps of Adam on small networks).
        peers: processes that train the other members. Where members stop early, all go on, at rest, as long as the last does,
            so that their histories are those of one process.
    """
    steps, batch, per_epoch = options.plan(data.count)
    members = 0 if shared_batches else len(theta)
    batches = Batches(
        data.rows, batch, seed=seed, members=members, resampled=data.resampled, first=first, device=problem.device
    )
    step = make_step(problem, objective, options, steps, theta, batch, mesh)
    run = _Run(theta, steps, options, step, objective, data, first)
    check_every = max(1, min(steps // 20 or 1, 500))
    evaluate_every = per_epoch * max(1, math.ceil(steps / per_epoch / 200))
    until: int | None = None
    heartbeat = Heartbeat(peers or World())
    with Progress(title, steps, progress) as line:
        done = 0
        while done < steps:
            limit = min(steps, (done // check_every + 1) * check_every)
            if data.stops:
                limit = min(limit, (done // evaluate_every + 1) * evaluate_every)
            done = step.advance_to(theta, batches, done, limit, run.active)
            heartbeat.tick()
            if done % check_every == 0 or done == steps:
                figures = run.check(done, title)
                line.update(done, final=done == steps, **figures)
            if data.stops and (done % evaluate_every == 0 or done == steps):
                stopped = run.evaluate(done) or done == steps
                if stopped and until is None:
                    heartbeat.wait()
                    until = max(heartbeat.world.gather(done))
                if done == until:
                    break
    heartbeat.wait()
    return run.finish(done)


class _Run:
    """The state around the steps: the last parameters known to be good, the best on held-out rows, the history."""

    def __init__(
        self, theta: Tensor, steps: int, options: Training, step: Step, objective: Objective, data: Data, first: int = 0,
    ) -> None:  # fmt: skip
        self.theta, self.step, self.options, self.objective, self.data = theta, step, options, objective, data
        self.first = first
        self.active = torch.ones(len(theta), dtype=theta.dtype, device=theta.device)
        self.good: Tensor | None = None
        self.best = theta.clone() if data.stops else theta
        self.best_score = torch.full((len(theta),), -math.inf, dtype=theta.dtype, device=theta.device)
        self.waited = torch.zeros(len(theta), device=theta.device)
        self.figures: dict[str, float] = {}
        self.history: dict[str, Any] = {"step": [], "loss": [], "parts": {name: [] for name in objective.part_names}}
        self.history |= {"validation_step": [], "validation": [], "steps_planned": steps}

    def check(self, done: int, title: str) -> dict[str, float]:
        """Records the loss; a loss that is not finite ends the run with its step, its member and a hint."""
        first_bad = float(self.step.first_bad.min())
        lost = ~torch.isfinite(self.theta).all(-1)
        if math.isfinite(first_bad) or bool(lost.any()):
            by_loss = math.isfinite(first_bad)
            member = self.first + (int(self.step.first_bad.argmin()) if by_loss else int(lost.int().argmax()))
            at = int(first_bad) + 1 if by_loss else done
            raise TrainingError(
                f"{title}: the loss of member {member} was not finite at step {at}. Try a smaller learning rate "
                f"(lr={self.options.lr:g} now), clip_norm=1.0, or standardised inputs and targets",
                step=at, member=member, posterior=self.good,
            )  # fmt: skip
        self.good = self.theta.clone()
        parts = self.step.parts.double()
        self.history["step"].append(done)
        self.history["loss"].append(parts.sum(-1).tolist())
        for name, values in zip(self.objective.part_names, parts.unbind(-1)):
            self.history["parts"][name].append(values.tolist())
        means = {name: float(v) for name, v in zip(self.objective.part_names, parts.mean(0))}
        return {"loss": float(parts.sum(-1).mean()), **(means if len(means) > 1 else {}), **self.figures}

    def evaluate(self, done: int) -> bool:
        """Scores the members on the held-out rows and keeps their best; True when all of them have stopped."""
        with torch.no_grad():
            score = self.data.score(self.objective, self.theta)
            better = (score > self.best_score) & (self.active > 0)
            self.best = torch.where(better.unsqueeze(1), self.theta, self.best)
            self.best_score = torch.where(better, score, self.best_score)
            self.waited = torch.where(better, 0.0, self.waited + 1)
            self.active.mul_((self.waited < self.options.patience).to(self.active.dtype))
        self.history["validation_step"].append(done)
        self.history["validation"].append([float(v) for v in score])
        self.figures = {"validation": float(self.best_score.mean())}
        return not bool((self.active > 0).any())

    def finish(self, done: int) -> Trained:
        """The result: the best on held-out rows where there are any, otherwise the last."""
        self.history["steps"] = done
        return Trained(self.best, self.history)
