"""Full-batch Hamiltonian Monte Carlo with many chains (Neal 2011; Izmailov et al. 2021).

    m ~ N(0, M);   L = ceil(tau / Delta) leapfrog steps of size Delta;   accept with probability min(1, exp(H - H'))

The default trajectory length is tau = pi sigma / 2, sigma the prior's standard deviation: on a Gaussian of that width a
trajectory of this length forgets where it began. Where the prior's scales differ, or the mass is adapted, lengths are in
units of the scaled coordinates and tau = pi / 2.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.kernels.integrators import integrator
from credibly.inference.method import Method
from credibly.inference.sampling.hmc import HMCRun
from credibly.inference.sampling.run import check_counts, check_dtype, fit_sampler
from credibly.inference.sampling.starts import check_init
from credibly.inference.target import DensityTarget, Target
from credibly.posterior.base import Posterior
from credibly.posterior.draws import SampledPosterior
from credibly.priors.elementwise import positive
from credibly.problem import Problem

LEAST_TRIAL = 60  # iterations of a warm-up in which trajectory lengths can be told apart


@dataclass(frozen=True, kw_only=True)
class HMC(Method):
    """Hamiltonian Monte Carlo on the full batch: draws of the posterior itself, many chains at once.

    Args:
        chains, draws: how many chains, and draws of each.
        warmup: iterations before the first draw, in which step size and mass adapt; they are frozen after.
        step_size: Delta; None finds it in warm-up.
        trajectory_length: tau; None takes pi/2 times the prior's scale, and "tuned" that length or a half, a quarter or an eighth
            of it, whichever gave most effective predictions a gradient in warm-up.
        target_accept: acceptance that the step size is adapted to.
        pooled: one step size for all chains; False gives each its own (they then wait for the one with most steps).
        mass: "identity", "prior" (M = 1/prior variance), "diagonal" (adapted by the variance in warm-up), or "auto": identity
            where all prior scales are the same, prior where they differ, diagonal for a `Density`.
        jitter: trajectory lengths vary by up to this fraction, which breaks up periodic orbits; None takes 0.2, or 0 where the
            trajectory length is given.
        refresh: share of the momentum that is drawn anew; less than 1 lets it persist from one trajectory to the next.
        integrator: "leapfrog" or "minimum-error" (two gradients a step).
        max_steps: of a trajectory where the step size is found in warm-up; longer ones are cut, and the record says so.
        thin: iterations a draw.
        init: "ensemble" (a MAP fit for each chain), "map", "prior", "network", "fresh", a (C, D) tensor or a posterior.
        start_steps: training steps of the MAP fits of "ensemble" and "map".
        draw_dtype: of the draws that are kept, such as "float16" for less disk; None takes the network's.
        compile: True, False or "auto".
    """

    name: ClassVar[str] = "hmc"
    spreads_rows: ClassVar[bool] = True
    chains: int = 4
    draws: int = 500
    warmup: int = 300
    step_size: float | None = None
    trajectory_length: float | str | None = None
    target_accept: float = 0.8
    pooled: bool = True
    mass: str = "auto"
    jitter: float | None = None
    refresh: float = 1.0
    integrator: str = "leapfrog"
    max_steps: int = 1000
    thin: int = 1
    init: str | Tensor | Posterior = "ensemble"
    start_steps: int = 1000
    draw_dtype: str | None = None
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        check_counts(self, chains=1, draws=1, warmup=0, max_steps=1, thin=1, start_steps=1)
        if self.step_size is not None:
            positive("step_size", self.step_size)
        if isinstance(self.trajectory_length, str):
            if self.trajectory_length != "tuned":
                raise InputError(
                    "trajectory_length", f"found {self.trajectory_length!r}", 'Pass a positive number, None or "tuned"'
                )
            if self.warmup < LEAST_TRIAL:
                raise InputError(
                    "warmup", f"found {self.warmup} to tune the trajectory length in", f"Pass at least {LEAST_TRIAL}"
                )
        elif self.trajectory_length is not None:
            positive("trajectory_length", self.trajectory_length)
        if not 0 < self.target_accept < 1:
            raise InputError("target_accept", f"found {self.target_accept!r}", "Pass a number between 0 and 1")
        if self.jitter is not None and not 0 <= self.jitter < 1:
            raise InputError("jitter", f"found {self.jitter!r}", "Pass a fraction from 0 to below 1, or None")
        if not 0 < self.refresh <= 1:
            raise InputError("refresh", f"found {self.refresh!r}", "Pass a share above 0 and up to 1")
        if self.mass not in ("auto", "identity", "prior", "diagonal"):
            raise InputError("mass", f"found {self.mass!r}", 'Pass "auto", "identity", "prior" or "diagonal"')
        if self.step_size is None and self.warmup < 20:
            raise InputError("warmup", f"found {self.warmup} without a step_size", "Pass at least 20, or a step_size")
        integrator(self.integrator)
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
        """Draws of the posterior; with `out` they are streamed to that folder, and `credibly resume` goes on after a stop."""
        return fit_sampler(self, problem, seed=seed, out=out, progress=progress)

    def process(self, target: Target, seed: int, mesh: Mesh | None = None) -> HMCRun:
        """The sampler itself: of all chains, or of those that a mesh gives to this process."""
        return HMCRun(target, self, seed, mesh or Mesh(World()))

    def mass_kind(self, target: Target) -> str:
        """What "auto" comes to."""
        if self.mass != "auto":
            return self.mass
        if isinstance(target, DensityTarget):
            return "diagonal"
        return "identity" if _common_scale(target) is not None else "prior"

    def inverse_mass(self, target: Target) -> Tensor | None:
        """M^-1 at the start, (D,), or None for the identity."""
        return None if self.mass_kind(target) == "identity" else torch.square(target.scale).to(target.dtype)

    @property
    def spread(self) -> float:
        """The jitter that is used. Orbits are periodic in every direction of a Gaussian: fixed lengths may come back to where
        they began. With 0.2 the effective sample size of a linear model rises from a twentieth of the draws to most of them."""
        if self.jitter is not None:
            return self.jitter
        return 0.2 if self.trajectory_length is None or self.tuned else 0.0

    @property
    def tuned(self) -> bool:
        """Whether warm-up looks for the trajectory length."""
        return isinstance(self.trajectory_length, str)

    def length(self, target: Target) -> float:
        """The trajectory length tau; where it is tuned, the longest."""
        if self.trajectory_length is not None and not isinstance(self.trajectory_length, str):
            return self.trajectory_length
        if self.mass_kind(target) != "identity":
            return math.pi / 2
        sigma = float(target.scale.square().mean().sqrt())
        return math.pi / 2 * sigma

    def first_size(self, target: Target) -> float:
        """Where the search for a step size begins."""
        return self.length(target) / (10 * math.sqrt(math.sqrt(target.dim)))


def _common_scale(target: Target) -> float | None:
    low, high = float(target.scale.min()), float(target.scale.max())
    return high if high <= low * (1 + 1e-6) else None
