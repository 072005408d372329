"""SG-MCMC: SGLD and SGHMC with minibatches; preconditioned and cyclical forms of both.

Neither has a Metropolis step, so both sample a distribution near the posterior, not the posterior: the step size and the
noise of minibatch gradients heat it. The default step size keeps that to about 5 % of the variance in the stiffest direction,
by the largest curvature a at the start and the rule that minibatch noise has about N/B times the covariance a:

    SGLD    eps   = 0.2 / (a (1 + N/B))
    SGHMC   eps^2 = 0.1 ln(1/c) / (a (1 + N/B)),      c the share of momentum kept a step

Such steps are small and mixing is slow in flat directions: these methods are not the HMC posterior, and `diagnostics` says
how far the chains agree.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.method import Method
from credibly.inference.sampling.run import check_counts, check_dtype, fit_sampler
from credibly.inference.sampling.sgmcmc import SGMCMCRun
from credibly.inference.sampling.starts import check_init
from credibly.inference.target import Target
from credibly.posterior.base import Posterior
from credibly.posterior.draws import SampledPosterior
from credibly.priors.elementwise import positive
from credibly.problem import Problem


@dataclass(frozen=True, kw_only=True)
class _SGMCMC(Method):
    """Settings that SGLD and SGHMC share.

    Args:
        chains, draws: how many chains, and draws of each.
        warmup: steps before the first draw; the preconditioner is estimated in them and then frozen.
        thin: steps a draw.
        batch_size: rows in a minibatch; None takes 64, or all rows where there are fewer.
        step_size: eps; None takes the rule above, and the record says what it came to.
        schedule: "constant", "polynomial" (falls as t^-0.55) or "cyclical" (a cosine in each cycle; draws come from its end).
        cycles: of the cyclical schedule.
        exploration: share of a cycle that is spent looking for a mode, without noise and without draws.
        preconditioner: None or "rmsprop": every weight's step is scaled by the root of its mean squared gradient.
        init: "ensemble" (a MAP fit for each chain), "map", "prior", "network", "fresh", a (C, D) tensor or a posterior.
        start_steps: training steps of the MAP fits of "ensemble" and "map". These chains go slowly from where they begin: a
            network that is hard to fit needs more.
        draw_dtype: of the draws that are kept; None takes the network's.
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
        check_counts(self, chains=1, draws=1, warmup=0, thin=1, cycles=1, start_steps=1)
        if self.batch_size is not None:
            check_counts(self, batch_size=1)
        if self.step_size is not None:
            positive("step_size", self.step_size)
        if self.schedule not in ("constant", "polynomial", "cyclical"):
            raise InputError("schedule", f"found {self.schedule!r}", 'Pass "constant", "polynomial" or "cyclical"')
        if not 0 <= self.exploration < 1:
            raise InputError("exploration", f"found {self.exploration!r}", "Pass a share from 0 to below 1")
        if self.schedule == "cyclical" and self.draws % self.cycles:
            raise InputError(
                "cycles", f"found {self.cycles} for {self.draws} draws", "Pass a number that divides the draws"
            )
        if self.preconditioner not in (None, "rmsprop"):
            raise InputError("preconditioner", f"found {self.preconditioner!r}", 'Pass None or "rmsprop"')
        if self.preconditioner and not self.warmup:
            raise InputError("warmup", "found 0 with a preconditioner", "It is estimated in warm-up: pass some steps")
        check_init(self.init)
        check_dtype(self.draw_dtype)

    def fit(
        self,
        problem: Problem | Density,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> SampledPosterior:
        """Draws; with `out` they are streamed to that folder, and `credibly resume` goes on after a stop."""
        if isinstance(problem, Problem):
            self.batch(problem.n)
        return fit_sampler(self, problem, seed=seed, out=out, progress=progress)

    def process(self, target: Target, seed: int, mesh: Mesh | None = None) -> SGMCMCRun:
        """The sampler itself: of all chains, or of those that a mesh gives to this process."""
        return SGMCMCRun(target, self, seed, mesh or Mesh(World()))

    @property
    def preconditioned(self) -> bool:
        """Whether there is a preconditioner."""
        return self.preconditioner is not None

    @property
    def kept(self) -> float:
        """Share of the momentum that a step keeps; SGLD has none."""
        return 0.0

    def size_for(self, curvature: float, ratio: float) -> float:
        """The step size by the rule, for the largest curvature and N/B."""
        raise NotImplementedError

    def batch(self, n: int) -> int:
        """Rows in a minibatch of a problem with n rows."""
        if self.batch_size is not None and self.batch_size > n:
            raise InputError(
                "batch_size", f"found {self.batch_size} for {n} rows", "Pass at most the number of rows, or None"
            )
        return min(n, self.batch_size or 64)

    # -- when draws are taken, and what the step size is then ----------------------------------------------------------------
    @property
    def _cycle(self) -> tuple[int, int]:
        """Steps of a cycle, and those at its end that give draws."""
        sampling = self.draws // self.cycles * self.thin
        return math.ceil(sampling / (1 - self.exploration)), sampling

    def steps(self) -> int:
        """Steps of the whole run."""
        if self.schedule == "cyclical":
            return self.warmup + self.cycles * self._cycle[0]
        return self.warmup + self.draws * self.thin

    def is_draw(self, done: int) -> bool:
        """Whether the point after so many steps is a draw."""
        after = done - self.warmup
        if after <= 0:
            return False
        if self.schedule != "cyclical":
            return after % self.thin == 0
        length, sampling = self._cycle
        place = (after - 1) % length + 1 - (length - sampling)
        return place > 0 and place % self.thin == 0

    def next_draw(self, done: int) -> int:
        """The first number of steps above `done` whose point is a draw, or the last step."""
        step = done + 1
        if self.schedule != "cyclical":
            return step + (-(step - self.warmup)) % self.thin if step > self.warmup else self.warmup + self.thin
        while step < self.steps() and not self.is_draw(step):
            step += 1
        return step

    def drawn(self, done: int) -> int:
        """Draws after so many steps."""
        after = max(0, done - self.warmup)
        if self.schedule != "cyclical":
            return after // self.thin
        length, sampling = self._cycle
        return after // length * (sampling // self.thin) + max(0, after % length - (length - sampling)) // self.thin

    def schedule_at(self, t: int, size: float) -> tuple[float, float]:
        """Step size and heat (1, or 0 without noise) of step t."""
        if self.schedule == "polynomial":
            return size * (1 + t / max(1, self.steps() / 10)) ** -0.55, 1.0
        if self.schedule == "cyclical" and t >= self.warmup:
            length, sampling = self._cycle
            place = (t - self.warmup) % length
            return size * 0.5 * (1 + math.cos(math.pi * place / length)), float(place >= length - sampling)
        return size, 1.0


@dataclass(frozen=True, kw_only=True)
class SGLD(_SGMCMC):
    """Stochastic-gradient Langevin dynamics: noisy minibatch gradient steps whose noise is that of the posterior.

    w <- w + (eps/2) g + N(0, eps)
    """

    name: ClassVar[str] = "sgld"
    has_momentum: ClassVar[bool] = False

    def size_for(self, curvature: float, ratio: float) -> float:
        """0.2 / (a (1 + N/B)); full-batch gradients have no noise to allow for."""
        return 0.2 / (curvature * (1 + (ratio if ratio > 1 else 0)))


@dataclass(frozen=True, kw_only=True)
class SGHMC(_SGMCMC):
    """Stochastic-gradient Hamiltonian Monte Carlo: minibatch steps with momentum, friction and matching noise.

    Args:
        momentum: share of the momentum that a step keeps, c = exp(-friction eps).
    """

    name: ClassVar[str] = "sghmc"
    has_momentum: ClassVar[bool] = True
    momentum: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.momentum < 1:
            raise InputError("momentum", f"found {self.momentum!r}", "Pass a share between 0 and 1")

    @property
    def kept(self) -> float:
        """As given."""
        return self.momentum

    def size_for(self, curvature: float, ratio: float) -> float:
        """The root of 0.1 ln(1/c) / (a (1 + N/B)); full-batch gradients have no noise to allow for."""
        return math.sqrt(0.1 * -math.log(self.momentum) / (curvature * (1 + (ratio if ratio > 1 else 0))))
