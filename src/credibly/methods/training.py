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

from credibly.compiling import Compile
from credibly.errors import InputError, TrainingError
from credibly.kernels.optimisers import learning_rates, optimiser
from credibly.methods.steps import Batches, Perturbation, Step
from credibly.problem import Problem
from credibly.progress import Progress
from credibly.rng import stream

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


def train(
    problem: Problem, theta: Tensor, options: Training, *, seed: int, title: str, prior_weight: float = 1.0,
    perturbation: Perturbation | None = None, progress: bool | None = None, first_member: int = 0,
) -> Trained:  # fmt: skip
    """Maximises the density (its likelihood alone with prior_weight 0) from theta (M, D), which is changed in place."""
    perturbation = perturbation or Perturbation()
    part, held_out = _split(problem, options.validation, seed)
    rows = part if part is not None else torch.arange(problem.n, device=problem.device)
    n = len(rows)
    if options.batch_size is not None and options.batch_size > n:
        raise InputError(
            "batch_size",
            f"found {options.batch_size} for {n} training rows",
            "Pass at most the number of rows, or None",
        )
    steps, batch, per_epoch = options.plan(n)
    validation = problem.subset(held_out) if held_out is not None else None
    batches = Batches(rows, batch, per_epoch, seed, len(theta), first_member, perturbation.rows)
    step = Step(problem, n, options, steps, prior_weight, perturbation, whole=batches.whole)
    run = _Run(problem, theta, steps, options, step, validation)
    check_every = max(1, min(steps // 20 or 1, 500))
    evaluate_every = per_epoch * max(1, math.ceil(steps / per_epoch / 200))
    with Progress(title, steps, progress) as line:
        for t in range(steps):
            step.advance(theta, batches.at(t), t, run.active)
            done = t + 1
            if done % check_every == 0 or done == steps:
                loss = run.check(done, title)
                line.update(done, final=done == steps, loss=loss, **run.figures)
            if validation is not None and (done % evaluate_every == 0 or done == steps) and run.evaluate(done):
                break
    return run.finish(done)


class _Run:
    """The state around the steps: the last parameters known to be good, the best on held-out rows, the history."""

    def __init__(
        self, problem: Problem, theta: Tensor, steps: int, options: Training, step: Step, validation: Problem | None
    ) -> None:
        self.theta, self.step, self.options, self.validation = theta, step, options, validation
        step.begin(theta)
        self.active = torch.ones(len(theta), dtype=theta.dtype, device=theta.device)
        self.good: Tensor | None = None
        self.best, self.best_score = (
            theta.clone(),
            torch.full((len(theta),), -math.inf, dtype=theta.dtype, device=theta.device),
        )
        self.waited = torch.zeros(len(theta), device=theta.device)
        self.figures: dict[str, float] = {}
        self.history: dict[str, Any] = {
            "step": [],
            "loss": [],
            "validation_step": [],
            "validation": [],
            "steps_planned": steps,
        }

    def check(self, done: int, title: str) -> float:
        """Records the loss; a loss that is not finite ends the run with its step, its member and a hint."""
        bad = self.step.first_bad.min()
        if not math.isinf(float(bad)) or not bool(torch.isfinite(self.theta).all()):
            rows = ~torch.isfinite(self.theta).all(-1)
            member = int(self.step.first_bad.argmin()) if not math.isinf(float(bad)) else int(rows.int().argmax())
            at = int(bad) + 1 if not math.isinf(float(bad)) else done
            raise TrainingError(
                f"{title}: the loss of member {member} was not finite at step {at}. "
                f"Try a smaller learning rate (lr={self.options.lr:g} now), clip_norm=1.0, or standardised inputs and targets",
                step=at, member=member, posterior=self.good,
            )  # fmt: skip
        self.good = self.theta.clone()
        mean = float(self.step.loss.mean())
        self.history["step"].append(done)
        self.history["loss"].append([float(v) for v in self.step.loss])
        return mean

    def evaluate(self, done: int) -> bool:
        """Scores the members on the held-out rows and keeps their best; True when all of them have stopped."""
        assert self.validation is not None
        with torch.no_grad():
            score = torch.zeros_like(self.best_score)
            for x, y in self.validation.blocks(len(self.theta)):
                score += self.validation.log_likelihood_rows(self.theta, x, y).flatten(1).sum(1)
            score /= self.validation.n
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
        return Trained(self.theta if self.validation is None else self.best, self.history)


def _split(problem: Problem, fraction: float, seed: int) -> tuple[Tensor | None, Tensor | None]:
    if fraction == 0:
        return None, None
    held = round(problem.n * fraction)
    if held < 1 or held >= problem.n:
        raise InputError(
            "validation",
            f"{fraction} of {problem.n} rows leaves nothing to train on or to validate with",
            "Pass a fraction that leaves rows on both sides",
        )
    order = torch.randperm(problem.n, generator=stream(seed, "validation split")).to(problem.device)
    return order[held:].sort().values, order[:held].sort().values
