"""The plan of an SG-MCMC run: its schedule of steps and draws, and the settings resolved for a target."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from credibly.core.compilation import Compile

SCHEDULES = ("constant", "polynomial", "cyclical")
# In units of the prior's scale. A harmonic oscillator of that width is damped critically by 2; narrower directions keep
# oscillating, and less friction suits networks better. 1 to 2 mix about equally well.
FRICTION = 1.4


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of a run: when draws are taken, and the step size and noise of every step.

    Attributes:
        kind: "constant", "polynomial" (the step size decays as t^-0.55) or "cyclical" (a cosine per cycle, with draws
            from its end; Zhang et al. 2020).
        warmup, draws, thin: steps before the first draw, draws, and steps per draw.
        cycles, exploration: number of cycles, and the fraction of a cycle without noise and without draws.
    """

    kind: str
    warmup: int
    draws: int
    thin: int
    cycles: int
    exploration: float

    @property
    def _cycle(self) -> tuple[int, int]:
        """Steps per cycle, and how many of them at its end give draws."""
        sampling = self.draws // self.cycles * self.thin
        return math.ceil(sampling / (1 - self.exploration)), sampling

    @property
    def steps(self) -> int:
        """Total number of steps of the run."""
        if self.kind == "cyclical":
            return self.warmup + self.cycles * self._cycle[0]
        return self.warmup + self.draws * self.thin

    def is_draw(self, done: int) -> bool:
        """Return whether the point after `done` steps is a draw."""
        after = done - self.warmup
        if after <= 0:
            return False
        if self.kind != "cyclical":
            return after % self.thin == 0
        length, sampling = self._cycle
        position = (after - 1) % length + 1 - (length - sampling)
        return position > 0 and position % self.thin == 0

    def next_draw(self, done: int) -> int:
        """Return the first step after `done` whose point is a draw, or the last step."""
        step = done + 1
        if self.kind != "cyclical":
            return step + (-(step - self.warmup)) % self.thin if step > self.warmup else self.warmup + self.thin
        while step < self.steps and not self.is_draw(step):
            step += 1
        return step

    def drawn(self, done: int) -> int:
        """Return the number of draws after `done` steps."""
        after = max(0, done - self.warmup)
        if self.kind != "cyclical":
            return after // self.thin
        length, sampling = self._cycle
        return after // length * (sampling // self.thin) + max(0, after % length - (length - sampling)) // self.thin

    def at(self, t: int, size: float) -> tuple[float, float]:
        """Return step size and noise scale (1, or 0 without noise) of step t."""
        if self.kind == "polynomial":
            return size * (1 + t / max(1, self.steps / 10)) ** -0.55, 1.0
        if self.kind == "cyclical" and t >= self.warmup:
            length, sampling = self._cycle
            position = (t - self.warmup) % length
            return size * 0.5 * (1 + math.cos(math.pi * position / length)), float(position >= length - sampling)
        return size, 1.0


@dataclass(frozen=True, kw_only=True)
class SGMCMCPlan:
    """The settings of `SGLD` or `SGHMC` resolved for one target.

    Attributes:
        template: the schedule, except for the numbers of steps that warm-up finds.
        warmup, thin: as given; None if the number of steps follows from the step size.
        times: how far the chains move in warm-up and while drawing, as multiples of `unit`, if warm-up finds the
            number of steps.
        max_steps: upper limit on the steps per chain that warm-up finds.
        batch_size: rows per minibatch; None for a plain density.
        overdamped: whether no momentum survives a step while drawing (SGLD).
        momentum: the fraction of the momentum that a step keeps; None for a friction of 1.4 / `unit`, which damps the
            slowest direction about critically.
        unit: root mean squared prior scale of the preconditioned coordinates: the slowest time scale of the chains.
        preconditioner: "identity", "prior" or "rmsprop".
        root: square root of the prior's preconditioner, (D,); None for the others.
        control_variate: whether minibatch gradients are corrected by those at an anchor.
        step_size: None if warm-up finds it.
    """

    chains: int
    template: Schedule
    warmup: int | None
    thin: int | None
    times: tuple[float, float]
    max_steps: int
    batch_size: int | None
    overdamped: bool
    momentum: float | None
    unit: float
    preconditioner: str
    root: Tensor | None
    control_variate: bool
    step_size: float | None
    compile: Compile

    def schedule(self, warmup: int, thin: int) -> Schedule:
        """Return the schedule with the given warm-up and thinning, unless the settings give their own."""
        found = warmup if self.warmup is None else self.warmup, thin if self.thin is None else self.thin
        return dataclasses.replace(self.template, warmup=found[0], thin=found[1])

    def kept(self, size: float) -> float:
        """Return the fraction of the momentum that a step of this size keeps."""
        return math.exp(-FRICTION * size / self.unit) if self.momentum is None else self.momentum

    def friction(self, size: float) -> float:
        """Return the friction per unit of time at this step size."""
        return FRICTION / self.unit if self.momentum is None else -math.log(self.momentum) / size

    @property
    def least_step(self) -> float:
        """The step size h with which chains move as far as they should in the largest number of steps."""
        warm, drawing = self.times
        steps = self.template.draws * self.thin if self.thin else self.max_steps * drawing / (warm + drawing)
        return drawing * self.unit / steps
