"""Warm-up of SG-MCMC: the step size, the kept momentum, and how many steps to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.distributed.world import Mesh
from credibly.errors import SamplingError
from credibly.inference.sampling.sgmcmc_plan import SGMCMCPlan
from credibly.inference.sampling.sgmcmc_steps import Estimate, Probe, momentum_step, overdamped_step
from credibly.inference.target import ProblemTarget, Target
from credibly.inference.training.batches import Batches

# Fraction of warm-up in which chains descend from their starting points, with this friction and half the step size.
DESCENT, DAMPING = 0.25, 20.0
# Steps before the second estimate of the curvature; later intervals double.
FIRST_STAGE = 32
# A rise of a chain's energy, per dimension and in addition, that only too large a step explains (from the mode to
# equilibrium it rises by 1 per dimension), and how often such a step is halved.
UNSTABLE, MOST_HALVINGS = (2.0, 50.0), 10
# A step number that no run reaches.
NEVER = 2**50


class Warmup:
    """Step size, kept momentum and schedule of a run.

    A given step size is used throughout. Otherwise warm-up moves with momentum (SGLD too: warm-up only finds the
    points where the draws begin), in stages that double in length. Each begins with an estimate of curvature and
    noise, because both change on the way from the start to the posterior, and the last one gives the step size of the
    draws. In the first quarter, chains descend with strong friction and half the step. Steps that raise the energy of a
    chain by more than heating explains are repeated, half as long.

    Attributes:
        size: step size of the draws, in units of the method: h for SGHMC, eps for SGLD.
        pace: step size h of this stage of warm-up.
        schedule: with warm-up and thinning as far as they are known.
        stage_end: the step at which `next_stage` is called next.
    """

    def __init__(self, target: Target, plan: SGMCMCPlan, seed: int, mesh: Mesh, batches: Batches | None) -> None:
        self.plan, self.batches = plan, batches
        self.precision = target.problem.forward.precision if isinstance(target, ProblemTarget) else None
        self.probe = Probe(target, plan, seed, mesh, batches)
        self.adapts = plan.step_size is None
        self.size = plan.step_size or 0.0
        self.pace = self.kept = self.elapsed = self.gradients = self.largest = 0.0
        self.stage_end, self.shortened = 0 if self.adapts else NEVER, False
        self.found = Estimate(math.nan, math.nan)
        # The values that compilation assumes before the first estimate.
        self.schedule = plan.schedule(1000, 20)
        if not self.adapts:
            step = math.sqrt(self.size) if plan.overdamped else self.size
            self.schedule = plan.schedule(self._warmup_steps(0, step), self._thin(step))

    def first_gradient(self, theta: Tensor, trial: int) -> Tensor:
        """Return a minibatch gradient at the starting points."""
        batches = self.batches
        self.gradients += self.plan.chains * (1.0 if batches is None else batches.batch / batches.count)
        return self.probe.gradient(theta, f"probe {trial}")

    def begin(self, theta: Tensor, root: Tensor | None) -> None:
        """Begin the first stage at the starting points."""
        if self.adapts:
            self.next_stage(theta, root, 0)

    def next_stage(self, theta: Tensor, root: Tensor | None, done: int) -> None:
        """Estimate curvature and noise after `done` steps; begin the next stage of warm-up, or end it."""
        plan, before = self.plan, self.found.curvature
        self.found = self.probe.estimate(theta, root, done)
        self.gradients += self.probe.cost
        passed = self._passed(done)
        if passed > 1 - 1e-9:
            if before > self.found.curvature:
                # The larger of the last two, because no later estimate corrects this one.
                self.found = self.found._replace(curvature=before)
            self.size = (overdamped_step if plan.overdamped else momentum_step)(self.found, plan, self.batches)
            step = math.sqrt(self.size) if plan.overdamped else self.size
            self.schedule, self.stage_end = plan.schedule(done, self._thin(step)), NEVER
            return
        descends = passed < DESCENT - 1e-9
        # The step at most doubles from stage to stage: curvature may fall, as it does while a learned noise is still
        # large, and rise again within a stage.
        self.largest = max(self.largest / 4, self.found.curvature)
        worst = self.found._replace(curvature=self.largest)
        self.pace = momentum_step(worst, plan, self.batches) * (0.5 if descends else 1.0)
        self.kept = self._kept(descends)
        end = self._warmup_steps(done, self.pace)
        self.schedule = plan.schedule(end, self._thin(self.pace))
        turn = self._warmup_steps(done, self.pace, DESCENT) if descends else end
        self.stage_end = min(max(FIRST_STAGE, 2 * done), max(turn, done + 1), end)

    def moved(self, steps: int) -> None:
        """Count steps of warm-up at the current pace."""
        self.elapsed += steps * self.pace

    def unstable(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
        """Return whether the energy of any chain, of all processes, has risen by more than heating explains.

        The arguments are the sampler's state before and after some steps.
        """
        rise = torch.nan_to_num(self._energy(after) - self._energy(before), nan=math.inf)
        most = float(self.probe.mesh.all_chains(rise, self.plan.chains).max())
        return most > UNSTABLE[0] * after[0].shape[1] + UNSTABLE[1]

    def _energy(self, state: Sequence[Tensor]) -> Tensor:
        """Return potential and kinetic energy (C,); with minibatches, which are noisy, zero wherever that is finite."""
        theta, momentum, _, _, value, *_ = state
        kinetic = 0.5 * momentum.double().square().sum(-1)
        if self.probe.noisy:
            return 0 * kinetic
        target = self.probe.target
        return kinetic - target.weights[0] * value - target.weights[1] * target.log_prior(theta)

    def slow_down(self, steps: int) -> None:
        """Halve the step size of this stage; the last `steps` steps will be repeated."""
        batches, damped = self.batches, self.kept < self.plan.kept(self.pace)
        self.gradients += self.plan.chains * steps * (1.0 if batches is None else batches.batch / batches.count)
        self.pace, self.largest = self.pace / 2, 4 * self.largest
        self.kept = self._kept(damped)

    def _kept(self, damped: bool) -> float:
        return math.exp(-DAMPING * self.pace / self.plan.unit) if damped else self.plan.kept(self.pace)

    def controls(self, t: int) -> tuple[float, float, float]:
        """Return step size h, noise scale and kept momentum of step t."""
        if self.adapts and t < self.schedule.warmup:
            return self.pace, 1.0, self.kept
        size, heat = self.schedule.at(t, self.size)
        return (math.sqrt(size), heat, 0.0) if self.plan.overdamped else (size, heat, self.plan.kept(size))

    def reported(self, t: int) -> float:
        """Return the step size of step t in units of the method."""
        size = self.controls(t)[0]
        return size**2 if self.plan.overdamped else size

    def check_finite(self, theta: Tensor, value: Tensor, done: int, first: int) -> None:
        """Raise, with the chain and the step size, unless all weights and values are finite after `done` steps."""
        # The sum is not finite if any weight is not, and it allocates nothing.
        ends = torch.stack(theta.aminmax())
        if bool(torch.isfinite(value).all()) and bool(torch.isfinite(ends).all()):
            return
        chain = int((~(torch.isfinite(value) & torch.isfinite(theta).all(-1))).int().argmax())
        used, other = self.reported(done - 1), "" if self.plan.step_size else ", or another start"
        raise SamplingError(
            f"chain {first + chain} diverged to non-finite values by step {done} with step_size={used:.3g}. "
            f"Try a tenth of it{other}{self._precision()}"
        )

    def _precision(self) -> str:
        low = self.precision
        return "" if low is None else f", or precision=None in Problem: the network runs in {low}"

    # -- numbers of steps ----------------------------------------------------------------------------------------------
    @property
    def _most_warmup(self) -> int:
        warm, drawing = self.plan.times
        return max(1, round(self.plan.max_steps * warm / (warm + drawing)))

    def _passed(self, done: int) -> float:
        """Return the fraction of warm-up that has passed."""
        if self.plan.warmup is not None:
            return done / self.plan.warmup if self.plan.warmup else 1.0
        return max(self.elapsed / (self.plan.times[0] * self.plan.unit), done / self._most_warmup)

    def _warmup_steps(self, done: int, step: float, fraction: float = 1.0) -> int:
        """Return the number of steps after which a fraction of warm-up will have passed."""
        if self.plan.warmup is not None:
            return math.ceil(fraction * self.plan.warmup)
        wanted = done + math.ceil((fraction * self.plan.times[0] * self.plan.unit - self.elapsed) / step - 1e-9)
        most = math.ceil(fraction * self._most_warmup)
        return max(1, min(wanted, most))

    def _thin(self, step: float) -> int:
        """Return the number of steps per draw."""
        wanted = round(self.plan.times[1] * self.plan.unit / (self.plan.template.draws * step))
        most = max(1, (self.plan.max_steps - self._most_warmup) // self.plan.template.draws)
        cut = self.plan.warmup is None and self.adapts and self.elapsed < 0.99 * self.plan.times[0] * self.plan.unit
        self.shortened = cut or (self.plan.thin is None and wanted > most)
        return max(1, min(wanted, most))

    def prolong(self, done: int, draws: int, discard: bool) -> None:
        """Plan further draws after `done` steps; with `discard`, drop earlier ones and double the steps per draw."""
        now = self.schedule
        if discard:
            now = dataclasses.replace(now, warmup=done, thin=2 * now.thin, draws=0)
        self.schedule = dataclasses.replace(now, draws=now.draws + draws)

    # -- state ---------------------------------------------------------------------------------------------------------
    def state(self) -> list[float]:
        """Return everything that later steps depend on, and what the record reports."""
        numbers = [float(getattr(self, name)) for name in _NUMBERS]
        found = self.found.curvature, self.found.noise
        return [*numbers, *found, self.schedule.warmup, self.schedule.thin, self.schedule.draws]

    def restore(self, state: list[float]) -> None:
        """Restore what `state` returned."""
        # Checkpoints of earlier versions end before the number of draws.
        if len(state) == len(_NUMBERS) + 4:
            state = [*state, self.plan.template.draws]
        *numbers, curvature, noise, warmup, thin, draws = state
        for name, number in zip(_NUMBERS, numbers):
            setattr(self, name, type(getattr(self, name))(number))
        self.found = Estimate(curvature, noise)
        self.schedule = dataclasses.replace(self.plan.template, warmup=int(warmup), thin=int(thin), draws=int(draws))

    def history(self) -> dict[str, Any]:
        """Return what warm-up found."""
        known = self.adapts and not math.isnan(self.found.curvature)
        noisy = known and self.probe.noisy
        return {
            "step_size": self.size,
            "momentum": self.controls(self.schedule.warmup)[2],
            "warmup": self.schedule.warmup,
            "thin": self.schedule.thin,
            "shortened": self.shortened,
            "curvature": self.found.curvature if known else None,
            "gradient_noise": self.found.noise if noisy else None,
        }


_NUMBERS = ("size", "pace", "kept", "elapsed", "gradients", "largest", "stage_end", "shortened")
