"""SG-MCMC: SGLD and SGHMC, on full batches or minibatches, in preconditioned and cyclical forms.

Both integrate Langevin dynamics of the posterior (`credibly.inference.kernels.langevin`):

    SGHMC   dw = P m dt,   dm = g dt - friction m dt + noise;      steps of size h
    SGLD    w <- w + (eps/2) P g + N(0, eps P), the limit of strong friction;      eps = h^2

Neither has a Metropolis step, so both sample a distribution near the posterior: the discretisation biases it where the
log density is not quadratic, and the noise of minibatch gradients heats it. The covariance of that noise is

    (N^2 / B) (1 - B/N) S,      S the covariance of the gradients of single rows,

because the B rows of a batch are drawn without replacement; it vanishes for full batches. With `step_size=None` warm-up
measures the largest curvature a and the noise where the chains are, and takes the largest step that is stable and that
keeps the heat below 5 % of the temperature: in the direction of a, or on average over all weights if the chains would
otherwise hardly move (`credibly.inference.sampling.sgmcmc_steps` has the formulas). On full batches that is
h = 1 / sqrt(a) for SGHMC and eps = 1.5 / a for SGLD, neither of which biases a Gaussian.

Times are in units of the prior's standard deviation, which sets the slowest time scale and HMC's trajectory length. The
friction is 1.4 in these units, near the critical damping of that slowest motion, and the number of steps follows from
the step size, so that the chains move far enough. SGLD diffuses: in the same number of steps it moves less, so it has
more chains, and R-hat shows where they have not mixed.

Gradient noise makes minibatches no cheaper per row than full batches: a smaller batch needs smaller steps. They pay off
if a step on all rows takes too long or too much memory. `control_variate=True` (SVRG; Johnson & Zhang 2013, Dubey et
al. 2016) removes most of the noise.

The sampler itself is in `credibly.inference.sampling.sgmcmc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer, check_positive, check_probability, is_real
from credibly.core.compilation import Compile
from credibly.core.stream import BoundStream
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.sampling.run import SamplingMethod, check_draw_dtype
from credibly.inference.sampling.sgmcmc import SGMCMCSampler
from credibly.inference.sampling.sgmcmc_plan import SCHEDULES, Schedule, SGMCMCPlan
from credibly.inference.sampling.sgmcmc_stream import StreamSampler
from credibly.inference.sampling.starts import check_init
from credibly.inference.sampling.until import check_until
from credibly.inference.target import ProblemTarget, StreamTarget, Target
from credibly.inference.training.settings import Training
from credibly.posterior.base import Posterior
from credibly.problem import Problem

PRECONDITIONERS = ("auto", "prior", "rmsprop")
# Number of rows up to which every step is full-batch, and the smallest and largest batch beyond that.
FULL_ROWS, BATCHES = 10_000, (192, 320)
# The most full-batch gradients that a MAP fit may cost if a chain is to start at it.
CHEAP = 100


@dataclass(frozen=True, kw_only=True)
class _SGMCMC(SamplingMethod):
    """Settings that SGLD and SGHMC share.

    Args:
        chains, draws: number of chains, and number of draws per chain.
        warmup: steps before the first draw, in which step size and preconditioner are found; None uses as many as the
            chains need to forget where they started, judged by the prior's scale, and the record keeps their number.
        thin: steps per draw; None uses enough of them for the chains to cross the prior's scale several times over all
            draws.
        max_steps: maximum steps per chain if `warmup` or `thin` is None; the record reports whether it shortened them.
        batch_size: rows per minibatch; None uses all rows up to 10,000 of them, else about 256, chosen so that an
            epoch leaves out few rows.
        step_size: h of SGHMC, eps of SGLD; None finds it in warm-up, and the record keeps its value.
        schedule: "constant", "polynomial" (decays as t^-0.55) or "cyclical" (a cosine per cycle; draws come from its
            end).
        cycles: number of cycles of the cyclical schedule.
        exploration: fraction of a cycle that searches for a mode, without noise and without draws.
        preconditioner: "prior" (P = prior variance), "rmsprop" (every weight's step is scaled by the root of its mean
            squared gradient, estimated in warm-up and then frozen), None, or "auto": "prior" if the prior's scales
            differ and no step size is given, else None.
        control_variate: correct each minibatch gradient by the difference, at an anchor, between the gradient of all
            rows and that of the same minibatch (SVRG); the anchor moves to the chain once per epoch. A step then takes
            two minibatch gradients, and runs on the torch backend.
        init: "ensemble" (a MAP fit for each chain), "map", "prior", "network", "fresh", a (C, D) tensor or a posterior;
            "auto" means "ensemble" if these fits cost at most 100 gradients of all rows each, else "fresh".
        start_steps: training steps of the MAP fits of "ensemble" and "map".
        draw_dtype: dtype of the stored draws; None uses the network's.
        compile: True, False or "auto".
        until: "mixed" continues until R-hat and the effective sample size of predictions reach 1.03 and 500, and the
            record reports whether they did; only with the constant schedule. None stops after `draws` draws.
        budget: the limit of `until`: seconds, "10min", or "5000 iterations" with warm-up, whose result does not depend
            on the machine; None sets no limit.
    """

    overdamped: ClassVar[bool]
    streams: ClassVar[bool] = True
    # How far chains move in warm-up and while drawing, in units of the prior's scale.
    times: ClassVar[tuple[float, float]]
    chains: int = 16
    draws: int = 100
    warmup: int | None = None
    thin: int | None = None
    max_steps: int = 100_000
    batch_size: int | None = None
    step_size: float | None = None
    schedule: str = "constant"
    cycles: int = 5
    exploration: float = 0.5
    preconditioner: str | None = "auto"
    control_variate: bool = False
    init: str | Tensor | Posterior = "auto"
    start_steps: int = 1000
    draw_dtype: str | None = None
    compile: Compile = "auto"
    until: str | None = None
    budget: float | str | None = None

    def __post_init__(self) -> None:
        for name in ("chains", "draws", "max_steps", "cycles", "start_steps"):
            check_integer(name, getattr(self, name))
        if self.warmup is not None:
            check_integer("warmup", self.warmup, least=0)
        for name in ("thin", "batch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        if self.step_size is not None:
            check_positive("step_size", self.step_size)
        check_choice("schedule", self.schedule, SCHEDULES)
        if not (is_real(self.exploration) and 0 <= self.exploration < 1):
            raise InputError("exploration", f"must be a fraction from 0 to below 1, got {self.exploration!r}")
        if self.schedule == "cyclical" and self.draws % self.cycles:
            raise InputError("cycles", f"must divide the number of draws, {self.draws}, got {self.cycles}")
        if self.preconditioner is not None:
            check_choice("preconditioner", self.preconditioner, PRECONDITIONERS, "Or pass None")
        if self.preconditioner == "rmsprop" and self.warmup is not None:
            check_integer("warmup", self.warmup, advice="The preconditioner is estimated during warm-up")
        if not isinstance(self.control_variate, bool):
            raise InputError("control_variate", f"must be True or False, got {self.control_variate!r}")
        if not (isinstance(self.init, str) and self.init == "auto"):
            check_init(self.init)
        check_draw_dtype(self.draw_dtype)
        check_until(self.until, self.budget, (self.warmup or 0) + (self.thin or 1))
        if self.until is not None and self.schedule != "constant":
            advice = "The other schedules plan all steps before the first one"
            raise InputError("until", f"must be None with schedule={self.schedule!r}, got {self.until!r}", advice)

    def check_problem(self, problem: Problem | Density) -> None:
        """Raise if the batch size exceeds the number of rows, or if a control variate is set without minibatches."""
        if isinstance(problem, Problem):
            self.batch(problem.n, problem.stream)
        if self.control_variate and (isinstance(problem, Density) or self.batch(problem.n) == problem.n):
            raise InputError(
                "control_variate",
                "must be False without minibatches, got True",
                "It removes the noise of minibatch gradients; pass a batch_size below the number of rows",
            )

    def start_points(self, problem: Problem | Density) -> str | Tensor | Posterior:
        """Return the starting points that "auto" stands for.

        With many rows, MAP fits on minibatches cost almost nothing; with few, chains reach the posterior sooner from
        fresh weights.
        """
        if not (isinstance(self.init, str) and self.init == "auto"):
            return self.init
        if isinstance(problem, Density):
            return "prior"
        steps, batch, _ = Training(steps=self.start_steps).plan(problem.n, problem.stream)
        return "ensemble" if steps * batch <= CHEAP * problem.n else "fresh"

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> SGMCMCSampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""
        if isinstance(target, StreamTarget):
            return StreamSampler(target, self.plan(target), seed, mesh or Mesh(World()))
        return SGMCMCSampler(target, self.plan(target), seed, mesh or Mesh(World()))

    def plan(self, target: Target) -> SGMCMCPlan:
        """Resolve the settings for a target."""
        kind = self.preconditioner_kind(target)
        return SGMCMCPlan(
            chains=self.chains,
            template=self.resolved_schedule(),
            warmup=self.warmup,
            thin=self.thin,
            times=self.times,
            max_steps=self.max_steps,
            batch_size=self._batch_of(target),
            overdamped=self.overdamped,
            momentum=getattr(self, "momentum", None),
            unit=1.0 if kind == "prior" else _mean_scale(target.scale),
            preconditioner=kind,
            root=target.scale.to(target.dtype).contiguous() if kind == "prior" else None,
            control_variate=self.control_variate,
            step_size=self.step_size,
            compile=self.compile,
        )

    def resolved_schedule(self) -> Schedule:
        """Return the schedule of draws and step sizes, with 1 in place of every number that is not given."""
        return Schedule(
            kind=self.schedule,
            warmup=1 if self.warmup is None else self.warmup,
            draws=self.draws,
            thin=1 if self.thin is None else self.thin,
            cycles=self.cycles,
            exploration=self.exploration,
        )

    def preconditioner_kind(self, target: Target) -> str:
        """Return "identity", "prior" or "rmsprop"."""
        if self.preconditioner != "auto":
            return self.preconditioner or "identity"
        low, high = float(target.scale.min()), float(target.scale.max())
        return "identity" if self.step_size is not None or high <= low * (1 + 1e-6) else "prior"

    def _batch_of(self, target: Target) -> int | None:
        if isinstance(target, StreamTarget):
            return self.batch(target.problem.n, target.streamed.stream)
        return self.batch(target.problem.n) if isinstance(target, ProblemTarget) else None

    def batch(self, n: int, stream: BoundStream | None = None) -> int:
        """Return the rows per minibatch of a problem with n rows, or of a stream."""
        if stream is not None:
            if self.batch_size not in (None, stream.batch):
                found = f"must be that of the loader, {stream.batch}, or None, got {self.batch_size}"
                raise InputError("batch_size", found, "Set it in the loader")
            return stream.batch
        if self.batch_size is not None and self.batch_size > n:
            raise InputError("batch_size", f"must be at most the number of rows, {n}, got {self.batch_size}")
        if self.batch_size is not None or n <= FULL_ROWS:
            return self.batch_size or n
        # Rows that an epoch leaves out heat the chains.
        return min(range(*BATCHES), key=lambda batch: (n % batch, abs(batch - 256)))

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return longer MAP fits, 5,000 steps, for tables with enough rows that chains start at such fits."""
        return {"start_steps": 5000}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return the defaults, or hardly any steps for a quick run."""
        return {"chains": 4, "warmup": 100, "draws": 20, "thin": 5} if quick else {}


@dataclass(frozen=True, kw_only=True)
class SGLD(_SGMCMC):
    """Stochastic-gradient Langevin dynamics: gradient steps with the noise that samples the posterior.

    w <- w + (eps/2) P g + sqrt(eps P) (xi + xi') / 2

    xi and xi' are the standard normal draws of the previous step and of this one: averaged over two steps, the noise
    leaves no bias on Gaussian posteriors. Unless `step_size` is given, chains move with momentum during warm-up, as
    those of SGHMC do.
    """

    name: ClassVar[str] = "sgld"
    overdamped: ClassVar[bool] = True
    times: ClassVar[tuple[float, float]] = (5.0, 4.0)
    chains: int = 144
    draws: int = 10


@dataclass(frozen=True, kw_only=True)
class SGHMC(_SGMCMC):
    """Stochastic-gradient Hamiltonian Monte Carlo: gradient steps with momentum, friction and matching noise.

    Args:
        momentum: fraction of the momentum that a step keeps, c = exp(-friction h); None uses a friction of 1.4 in
            units of the prior's scale, and the record keeps c.
    """

    name: ClassVar[str] = "sghmc"
    overdamped: ClassVar[bool] = False
    times: ClassVar[tuple[float, float]] = (10.0, 48.0)
    momentum: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum is not None:
            check_probability("momentum", self.momentum)


def _mean_scale(scale: Tensor) -> float:
    """Return the root mean square of the scales (D,). An expanded scalar is handled without allocating D values."""
    return float(scale[0]) if scale.stride() == (0,) else float(torch.square(scale).mean().sqrt())
