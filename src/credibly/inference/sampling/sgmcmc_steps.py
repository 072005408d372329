"""The step sizes of SG-MCMC, from estimates of the curvature and of the noise of minibatch gradients.

Both are those of the preconditioned coordinates w / R. a is the largest curvature at the current points of the chains,
by power iteration, and V the variance of the minibatch gradient in that direction. For B of N rows drawn without
replacement, with S the variance of the rows' gradients,

    V = (N^2 / B) (1 - B/N) S                            zero for full batches

h is the step of SGHMC, eps = h^2 that of SGLD:

    stability   h <= 1 / sqrt(a), half of what a harmonic oscillator allows;      eps <= 1.5 / a
    heat        h V / (2 friction) <= 5 % of the temperature;                     eps V / 4 <= 5 %
    epochs      h <= 0.25 B / (N sqrt(a));                                        eps <= B / (N a)

A step satisfies the first condition and either of the other two. Minibatches of an epoch are disjoint, so their errors
cancel over the epoch if it is short compared with the fastest motion; what remains is the heat of the N mod B rows that
an epoch leaves out, which is also limited to 5 %. With a control variate V grows with the distance from the anchor
during an epoch, as V' (h k)^2 after k steps of SGHMC and V' eps k for SGLD. Motion is slow compared with an epoch, so
the heat is that of the mean of V: a third and a half of its value at the end.

With such steps, chains on many rows would stay where they start: a posterior of the right width in the narrowest
direction, and of almost none in all others. If the largest number of steps is too small to move far enough, steps are
therefore as long as that takes,

    motion      h = distance / steps;                                             eps = (distance / steps)^2
    while       h <= 0.5 / sqrt(a) and h v / (2 friction) <= 5 %;                 eps <= 0.25 / a and eps v / 4 <= 5 %

with v the mean of V over all coordinates: the temperature that the chains report then rises by about 5 % at most. A
control variate makes such steps unnecessary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import SamplingError
from credibly.inference.adaptation import largest_curvature
from credibly.inference.sampling.module_langevin import ModuleLangevin
from credibly.inference.sampling.sgmcmc_plan import SGMCMCPlan
from credibly.inference.target import ProblemTarget, Target
from credibly.inference.training.batches import Batches

# h sqrt(a) of SGHMC, and eps a of SGLD. Curvature changes along a chain: 4 is unstable for the square of either.
STABLE, STABLE_OVERDAMPED = 1.0, 1.5
# Largest heat: the excess temperature due to gradient noise, as a fraction of the temperature.
HEAT = 0.05
# Length of an epoch in radians of the fastest oscillation, and in times 1/a of the fastest relaxation. On a linear
# model with 40 minibatches they widen the posterior's variance by less than 5 %; twice the first gives 15 %.
EPOCH, EPOCH_OVERDAMPED = 0.25, 1.0
# h sqrt(a) of steps that move chains which would otherwise hardly move.
MOVING = 0.5
# Chains, iterations and rows of an estimate of the curvature, and minibatches of one of the noise.
PROBED, ITERATIONS, PROBE_ROWS, PROBE_BATCHES = 16, 6, 1024, 16


class Estimate(NamedTuple):
    """Largest curvature a, and the variance of a minibatch gradient (V' with a control variate).

    Attributes:
        curvature: a.
        noise: V, along the direction of a.
        spread: v, the mean of the variance over all coordinates.
    """

    curvature: float
    noise: float
    spread: float = math.inf


class Probe:
    """Estimates of curvature and noise at the points of at most 16 chains."""

    def __init__(self, target: Target, plan: SGMCMCPlan, seed: int, mesh: Mesh, batches: Batches | None) -> None:
        self.target, self.plan, self.seed, self.mesh, self.batches = target, plan, seed, mesh, batches
        self.own = mesh.chains(plan.chains)
        # What evaluates a large network.
        self.module: ModuleLangevin | None = None
        every = math.ceil(plan.chains / PROBED)
        # The same chains for any number of processes.
        self.chosen = [c - self.own.start for c in self.own if c % every == 0]
        self.count = len(range(0, plan.chains, every))

    @property
    def noisy(self) -> bool:
        """Whether gradients come from minibatches."""
        return self.batches is not None and not self.batches.whole

    def gradient(self, theta: Tensor, trial: str) -> Tensor:
        """Return the gradient of an extra minibatch, separate from the run's batches; all chains share its rows."""
        return self._evaluate(theta, *self._rows(trial, self.batches.batch if self.batches is not None else 0))

    def estimate(self, theta: Tensor, root: Tensor | None, done: int) -> Estimate:
        """Return curvature and noise at theta (C, D) of this process, over all processes.

        One chain at a time: rounding then does not depend on how chains are distributed over processes.
        """
        result = theta.new_zeros(len(theta), 3, dtype=torch.float64)
        scale = self.target.scale.to(theta)
        for c in self.chosen:
            point = theta[c : c + 1]
            metric = torch.ones_like(point) if root is None else root.expand_as(theta)[c : c + 1]
            curvature, direction = self._curvature(point, metric, c, done)
            # Where the log density is nearly flat, the prior's precision is a lower bound.
            result[c, 0] = torch.maximum(curvature[0], torch.square(metric / scale).amax())
            if not math.isfinite(float(curvature)):
                result[c, 0] = math.nan
            elif self.noisy:
                result[c, 1:] = self._noise(point, metric, direction, float(result[c, 0]), c, done)
        found = self.mesh.all_chains(result, self.plan.chains)
        largest, (noise, spread) = float(found[:, 0].max()), (found[:, 1:].sum(0) / self.count).tolist()
        if not (math.isfinite(largest) and math.isfinite(noise)):
            raise SamplingError(
                f"step_size: the curvature is not finite after {done} steps. Pass a step_size, or another init"
            )
        return Estimate(largest, noise, spread)

    @property
    def cost(self) -> float:
        """Cost of an estimate over all chains, in units of full gradients."""
        if self.batches is None:
            return 2.0 * ITERATIONS * self.count
        n, each = self.batches.count, PROBE_BATCHES * (2 if self.plan.control_variate else 1)
        rows = 2 * ITERATIONS * min(n, PROBE_ROWS) + (each * self.batches.batch if self.noisy else 0)
        return self.count * rows / n

    def _curvature(self, point: Tensor, metric: Tensor, chain: int, done: int) -> tuple[Tensor, Tensor]:
        rows, scale = self._rows(f"curvature rows {done}", PROBE_ROWS)
        first = self._normal("curvature", chain, done).to(point)
        return largest_curvature(lambda w: self._evaluate(w, rows, scale), point, metric, first, ITERATIONS)

    def _noise(
        self, point: Tensor, metric: Tensor, direction: Tensor, curvature: float, chain: int, done: int
    ) -> Tensor:
        """Return the variance of minibatch gradients along a direction, and its mean over coordinates."""
        along = metric * direction / direction.norm()
        time, away = 1.0, point
        if self.plan.control_variate:
            # A free flight from the anchor, short compared with the fastest oscillation.
            time = 0.3 / math.sqrt(curvature)
            away = point + time * metric * self._normal("flight", chain, done).to(point)
        slopes, squares, before = [], [], None
        for trial in range(PROBE_BATCHES):
            gradient = self.gradient(away, f"noise {done} {trial}")
            if self.plan.control_variate:
                gradient = gradient - self.gradient(point, f"noise {done} {trial}")
            slopes.append((along * gradient).sum().double())
            if before is not None:
                # Half the mean square of a difference of two is the variance; only two gradients are in memory.
                squares.append(0.5 * torch.square(metric * (gradient - before)).mean().double())
            before = gradient
        variances = torch.stack([torch.stack(slopes).var(), torch.stack(squares).mean()])
        return variances / time**2 * self._all_rows()

    def _all_rows(self) -> float:
        """Return the ratio of the variance of batches of all rows to that of batches of the rows in memory."""
        if not isinstance(self.target, ProblemTarget) or self.batches is None:
            return 1.0
        held, batch = len(self.target.problem.y), self.batches.batch
        if held == self.batches.count or held <= batch:
            return 1.0
        return (1 - batch / self.batches.count) / (1 - batch / held)

    def _normal(self, purpose: str, chain: int, done: int) -> Tensor:
        generator = stream(self.seed, purpose, self.own.start + chain, done)
        return torch.randn(1, self.target.dim, generator=generator, dtype=torch.float64)

    def _rows(self, purpose: str, count: int) -> tuple[Tensor | None, float]:
        """Return rows drawn without replacement, and N divided by their number."""
        if not isinstance(self.target, ProblemTarget):
            return None, 1.0
        # Of a stream, only some rows are in memory.
        n, held = self.target.problem.n, len(self.target.problem.y)
        if not 0 < count < held:
            return None, n / held
        return torch.randperm(held, generator=stream(self.seed, purpose))[:count].to(self.target.device), n / count

    def _evaluate(self, theta: Tensor, rows: Tensor | None, scale: float) -> Tensor:
        if self.module is not None and isinstance(self.target, ProblemTarget):
            return self.module.gradients(self.target.problem, theta, rows, scale)
        return torch.cat([self.target.minibatch_and_grad(w, rows, scale)[1] for w in theta.split(1)])


def momentum_step(found: Estimate, plan: SGMCMCPlan, batches: Batches | None) -> float:
    """Return the step size h of SGHMC."""
    root = math.sqrt(found.curvature)
    stable = STABLE / root
    if batches is None or batches.whole or found.noise == 0:
        return stable
    if plan.control_variate:
        return min(stable, _heat_limit(found.noise, plan, batches.per_epoch))
    epoch = min(EPOCH / (batches.per_epoch * root), _heat_limit(_left_out(found.noise, batches), plan))
    moving = min(plan.least_step, MOVING / root, _heat_limit(found.spread, plan))
    return min(stable, max(_heat_limit(found.noise, plan), epoch, moving))


def overdamped_step(found: Estimate, plan: SGMCMCPlan, batches: Batches | None) -> float:
    """Return the step size eps of SGLD."""
    stable = STABLE_OVERDAMPED / found.curvature
    if batches is None or batches.whole or found.noise == 0:
        return stable
    if plan.control_variate:
        return min(stable, math.sqrt(4 * HEAT / (found.noise * batches.per_epoch / 2)))
    left_out = _left_out(found.noise, batches)
    limit = 4 * HEAT / left_out if left_out else math.inf
    epoch = min(EPOCH_OVERDAMPED / (batches.per_epoch * found.curvature), limit)
    spread = 4 * HEAT / found.spread if found.spread else math.inf
    moving = min(plan.least_step**2, MOVING**2 / found.curvature, spread)
    return min(stable, max(4 * HEAT / found.noise, epoch, moving))


def _left_out(noise: float, batches: Batches) -> float:
    """Return the variance by the rows that an epoch leaves out, times the steps during which it stays the same."""
    n, batch = batches.count, batches.batch
    return noise / (1 - batch / n) * max(0, n - batches.per_epoch * batch) / n


def _heat_limit(noise: float, plan: SGMCMCPlan, steps: int = 0) -> float:
    """Return the largest h with h V / (2 friction) = HEAT, for V = V' (h steps)^2 / 3 if an anchor moves every `steps`.

    A given momentum c has the friction ln(1/c) / h.
    """
    if noise == 0:
        return math.inf
    power = (1 if plan.momentum is None else 2) + (2 if steps else 0)
    growth = steps**2 / 3 if steps else 1.0
    return float((2 * HEAT * plan.friction(1.0) / (noise * growth)) ** (1 / power))
