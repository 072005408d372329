"""SG-MCMC: SGLD and SGHMC with minibatches, in preconditioned and cyclical forms.

Neither has a Metropolis step, so both sample a distribution near the posterior: the step size and the noise of
minibatch gradients heat it. The default step size keeps that to about 5 % of the variance in the stiffest direction,
from the largest curvature a at the start and the rule that minibatch noise has about N/B times the covariance a:

    SGLD    eps   = 0.2 / (a (1 + N/B))
    SGHMC   eps^2 = 0.1 ln(1/c) / (a (1 + N/B)),      c the fraction of momentum kept per step

Such steps are small and mixing is slow in flat directions: these methods are not the HMC posterior, and `diagnostics`
reports how far the chains agree.

The sampler itself is in `credibly.inference.sampling.sgmcmc`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from credibly.core.checks import check_choice, check_integer, check_positive, check_probability, is_real
from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.sampling.run import SamplingMethod, check_draw_dtype
from credibly.inference.sampling.sgmcmc import SGMCMCSampler
from credibly.inference.sampling.sgmcmc_plan import SCHEDULES, Schedule, SGMCMCPlan
from credibly.inference.sampling.starts import check_init
from credibly.inference.target import ProblemTarget, Target
from credibly.posterior.base import Posterior
from credibly.problem import Problem


@dataclass(frozen=True, kw_only=True)
class _SGMCMC(SamplingMethod):
    """Settings that SGLD and SGHMC share.

    Args:
        chains, draws: number of chains, and of draws per chain.
        warmup: steps before the first draw; the preconditioner is estimated in them and then frozen.
        thin: steps per draw.
        batch_size: rows per minibatch; None takes 64, or all rows if there are fewer.
        step_size: eps; None applies the rule above, and the record keeps its value.
        schedule: "constant", "polynomial" (decays as t^-0.55) or "cyclical" (a cosine per cycle; draws come from its
            end).
        cycles: number of cycles of the cyclical schedule.
        exploration: fraction of a cycle spent looking for a mode, without noise and without draws.
        preconditioner: None or "rmsprop": every weight's step is scaled by the root of its mean squared gradient.
        init: "ensemble" (a MAP fit for each chain), "map", "prior", "network", "fresh", a (C, D) tensor or a posterior.
        start_steps: training steps of the MAP fits of "ensemble" and "map". These chains move slowly from where they
            start: a network that is hard to fit needs more.
        draw_dtype: dtype of the stored draws; None takes the network's.
        compile: True, False or "auto".
    """

    has_momentum: ClassVar[bool]
    chains: int = 4
    draws: int = 500
    warmup: int = 2000
    thin: int = 20
    batch_size: int | None = None
    step_size: float | None = None
    schedule: str = "constant"
    cycles: int = 5
    exploration: float = 0.5
    preconditioner: str | None = None
    init: str | Tensor | Posterior = "ensemble"
    start_steps: int = 1000
    draw_dtype: str | None = None
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        for name in ("chains", "draws", "thin", "cycles", "start_steps"):
            check_integer(name, getattr(self, name))
        check_integer("warmup", self.warmup, least=0)
        if self.batch_size is not None:
            check_integer("batch_size", self.batch_size)
        if self.step_size is not None:
            check_positive("step_size", self.step_size)
        check_choice("schedule", self.schedule, SCHEDULES)
        if not (is_real(self.exploration) and 0 <= self.exploration < 1):
            raise InputError("exploration", f"must be a fraction from 0 to below 1, got {self.exploration!r}")
        if self.schedule == "cyclical" and self.draws % self.cycles:
            raise InputError("cycles", f"must divide the number of draws, {self.draws}, got {self.cycles}")
        if self.preconditioner not in (None, "rmsprop"):
            raise InputError("preconditioner", f'must be None or "rmsprop", got {self.preconditioner!r}')
        if self.preconditioner:
            check_integer("warmup", self.warmup, advice="The preconditioner is estimated during warm-up")
        check_init(self.init)
        check_draw_dtype(self.draw_dtype)

    def check_problem(self, problem: Problem | Density) -> None:
        """Raise if the batch size is larger than the number of rows."""
        if isinstance(problem, Problem):
            self.batch(problem.n)

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> SGMCMCSampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""
        return SGMCMCSampler(target, self.plan(target), seed, mesh or Mesh(World()))

    def plan(self, target: Target) -> SGMCMCPlan:
        """Resolve the settings for a target."""
        return SGMCMCPlan(
            chains=self.chains,
            schedule=self.resolved_schedule(),
            batch_size=self.batch(target.problem.n) if isinstance(target, ProblemTarget) else None,
            has_momentum=self.has_momentum,
            kept=self.kept,
            preconditioned=self.preconditioner is not None,
            step_size=self.step_size,
            step_size_rule=self.default_step_size,
            compile=self.compile,
        )

    def resolved_schedule(self) -> Schedule:
        """Return when draws are taken, and the step size of every step."""
        return Schedule(
            kind=self.schedule,
            warmup=self.warmup,
            draws=self.draws,
            thin=self.thin,
            cycles=self.cycles,
            exploration=self.exploration,
        )

    @property
    def kept(self) -> float:
        """Fraction of the momentum that a step keeps; SGLD has none."""
        return 0.0

    @abstractmethod
    def default_step_size(self, curvature: float, ratio: float) -> float:
        """Return the step size for the largest curvature a and the ratio N/B."""

    def batch(self, n: int) -> int:
        """Return the rows per minibatch of a problem with n rows."""
        if self.batch_size is not None and self.batch_size > n:
            raise InputError("batch_size", f"must be at most the number of rows, {n}, got {self.batch_size}")
        return min(n, self.batch_size or 64)

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return chains that start at MAP fits of 5,000 steps, because they move slowly from there."""
        return {"chains": 4, "warmup": 2000, "draws": 150, "thin": 20, "start_steps": 5000}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return chains with the default step size, which is small.

        On the wave they hardly leave their starting points.
        """
        if quick:
            return {"chains": 4, "warmup": 100, "draws": 20, "thin": 5}
        return {"chains": 4, "warmup": 2000, "draws": 150, "thin": 20}


@dataclass(frozen=True, kw_only=True)
class SGLD(_SGMCMC):
    """Stochastic-gradient Langevin dynamics: minibatch gradient steps with the noise that samples the posterior.

    w <- w + (eps/2) g + N(0, eps)
    """

    name: ClassVar[str] = "sgld"
    has_momentum: ClassVar[bool] = False

    def default_step_size(self, curvature: float, ratio: float) -> float:
        """Return 0.2 / (a (1 + N/B)); full-batch gradients have no noise to allow for."""
        return 0.2 / (curvature * (1 + (ratio if ratio > 1 else 0)))


@dataclass(frozen=True, kw_only=True)
class SGHMC(_SGMCMC):
    """Stochastic-gradient Hamiltonian Monte Carlo: minibatch steps with momentum, friction and matching noise.

    Args:
        momentum: fraction of the momentum that a step keeps, c = exp(-friction eps).
    """

    name: ClassVar[str] = "sghmc"
    has_momentum: ClassVar[bool] = True
    momentum: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("momentum", self.momentum)

    @property
    def kept(self) -> float:
        """The given fraction of the momentum."""
        return self.momentum

    def default_step_size(self, curvature: float, ratio: float) -> float:
        """Return the root of 0.1 ln(1/c) / (a (1 + N/B)); full-batch gradients have no noise to allow for."""
        return math.sqrt(0.1 * -math.log(self.momentum) / (curvature * (1 + (ratio if ratio > 1 else 0))))
