"""Full-batch Hamiltonian Monte Carlo with many chains (Neal 2011; Izmailov et al. 2021).

    m ~ N(0, M);   L = ceil(tau / Delta) leapfrog steps of size Delta;   accept with probability min(1, exp(H - H'))

The default trajectory length is tau = pi sigma / 2, with sigma the prior's standard deviation: on a Gaussian of that
width such a trajectory forgets where it started. Where the prior scales differ, or the mass is adapted, lengths are in
units of the scaled coordinates and tau = pi / 2.

The sampler itself is in `credibly.inference.sampling.hmc`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer, check_positive, check_probability, is_real
from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.gaussians.mass import InverseMass, mass_tensors
from credibly.inference.adaptation import LEAST_WARMUP
from credibly.inference.collapsed import to_sampled_target
from credibly.inference.density import Density
from credibly.inference.kernels.hmc import integrator
from credibly.inference.sampling.hmc import HMCSampler
from credibly.inference.sampling.hmc_plan import HMCPlan
from credibly.inference.sampling.mass import ADAPTED, check_mass, given_mass, mass_blocks
from credibly.inference.sampling.run import SamplingMethod, check_draw_dtype
from credibly.inference.sampling.starts import check_init
from credibly.inference.sampling.until import check_until
from credibly.inference.target import DensityTarget, Target
from credibly.posterior.base import Posterior
from credibly.problem import Problem

# Warm-up iterations needed to compare trajectory lengths.
LEAST_TRIAL = 60


@dataclass(frozen=True, kw_only=True)
class HMC(SamplingMethod):
    """Hamiltonian Monte Carlo on the full batch: draws from the posterior itself, many chains at once.

    Args:
        chains, draws: number of chains, and number of draws per chain.
        warmup: iterations before the first draw, in which step size and mass adapt; they are frozen afterwards. A chain
            that does not move in a third of them restarts from another chain's position, and the record lists it.
        step_size: Delta; None finds it during warm-up.
        trajectory_length: tau; None uses pi/2 times the prior's scale. "tuned" uses that length or a half, a quarter
            or an eighth of it, whichever gave the most effective predictions per gradient during warm-up.
        target_accept: acceptance rate that the step size is adapted to.
        pooled: one step size for all chains at the end of warm-up, such that the worst of them moves; False gives each
            its own throughout (chains then wait for the one with the most steps).
        mass: "identity", "prior" (M = 1/prior variance), adapted during warm-up ("diagonal", "low-rank", or "block":
            correlations within layers), a posterior of the same problem, whose covariance is M^-1, or
            "auto": diagonal for a `Density` and if the output layer is integrated out; else identity if all prior
            scales are equal, and prior if they differ.
        mass_rank: maximum number of eigenvectors of a low-rank mass, and of blocks of more than 512 parameters.
        mass_start: a posterior whose covariance is M^-1 until the first window of an adapted mass has ended.
        jitter: trajectory lengths vary by up to this fraction, which breaks up periodic orbits; None uses 0.2, or 0 if
            the trajectory length is given.
        refresh: fraction of the momentum that is resampled; below 1, momentum persists from one trajectory to the next.
        integrator: "leapfrog" or "minimum-error" (two gradients per step).
        max_steps: maximum steps per trajectory if the step size is adapted; longer ones are truncated, as the record
            reports.
        thin: iterations per draw.
        init: "ensemble" (a MAP fit for each chain), "map", "prior", "network", "fresh", a (C, D) tensor or a posterior.
        start_steps: training steps of the MAP fits of "ensemble" and "map".
        draw_dtype: dtype of the stored draws, such as "float16" (or torch.float16) to save disk space; None uses the
            network's.
        compile: True, False or "auto".
        collapse: whether the output layer of a regression network is integrated out (see `inference.collapsed`): the
            hidden layers are sampled without it, and its weights are drawn exactly given them. The posterior is the
            same, with far fewer gradients per draw. "auto" does so on a CPU if possible: Gaussian noise (also
            heteroscedastic), a Normal prior, stacks of Linear layers; not with a given `step_size`.
        until: "mixed" continues, with longer trajectories or more draws, until R-hat and the effective sample size of
            predictions reach 1.03 and 500, and the record reports whether they did. None stops after `draws` draws.
        budget: the limit of `until`: seconds, "10min", or "5000 iterations" with warm-up, whose result does not depend
            on the machine; None sets no limit.
    """

    name: ClassVar[str] = "hmc"
    label: ClassVar[str] = "HMC"
    shards_rows: ClassVar[bool] = True
    chains: int = 4
    draws: int = 500
    warmup: int = 300
    step_size: float | None = None
    trajectory_length: float | str | None = None
    target_accept: float = 0.8
    pooled: bool = True
    mass: str | Posterior = "auto"
    mass_rank: int = 64
    mass_start: Posterior | None = None
    jitter: float | None = None
    refresh: float = 1.0
    integrator: str = "leapfrog"
    max_steps: int = 1000
    thin: int = 1
    init: str | Tensor | Posterior = "ensemble"
    start_steps: int = 1000
    draw_dtype: str | None = None
    compile: Compile = "auto"
    collapse: bool | str = "auto"
    until: str | None = None
    budget: float | str | None = None

    def __post_init__(self) -> None:
        for name in ("chains", "draws", "max_steps", "thin", "start_steps"):
            check_integer(name, getattr(self, name))
        check_integer("warmup", self.warmup, least=0)
        if self.step_size is not None:
            check_positive("step_size", self.step_size)
        if self.tuned:
            check_choice("trajectory_length", self.trajectory_length, ("tuned",), "Or pass a positive number or None")
            advice = "The trajectory length is tuned during warm-up"
            check_integer("warmup", self.warmup, LEAST_TRIAL, advice=advice)
        elif self.trajectory_length is not None:
            check_positive("trajectory_length", self.trajectory_length)
        check_probability("target_accept", self.target_accept)
        if self.jitter is not None and not (is_real(self.jitter) and 0 <= self.jitter < 1):
            raise InputError("jitter", f"must be a fraction from 0 to below 1 or None, got {self.jitter!r}")
        if not (is_real(self.refresh) and 0 < self.refresh <= 1):
            raise InputError("refresh", f"must be a fraction above 0 and at most 1, got {self.refresh!r}")
        check_mass(self.mass, self.mass_start, self.mass_rank)
        if self.step_size is None:
            advice = "The step size is found during warm-up; pass more iterations or a step_size"
            check_integer("warmup", self.warmup, LEAST_WARMUP, advice=advice)
        if isinstance(self.mass, str) and self.mass in ADAPTED:
            advice = f'mass={self.mass!r} adapts during warm-up; pass more iterations, or mass="prior" or a posterior'
            check_integer("warmup", self.warmup, LEAST_WARMUP, advice=advice)
        integrator(self.integrator)
        check_init(self.init)
        check_draw_dtype(self.draw_dtype)
        if not isinstance(self.collapse, bool):
            check_choice("collapse", self.collapse, ("auto",), "Or pass True or False")
        elif self.collapse and self._about_weights:
            found = "must be False or 'auto' with a given step_size, or a posterior as mass or mass_start, got True"
            raise InputError("collapse", found)
        check_until(self.until, self.budget, self.warmup + self.thin)

    def target(self, problem: Problem | Density, mesh: Mesh | None) -> Target:
        """Return the density that is sampled, without the output layer where that applies."""
        return to_sampled_target(problem, mesh, self.collapse, plain=self._about_weights)

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> HMCSampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""
        return HMCSampler(target, self.plan(target), seed, mesh or Mesh(World()))

    def plan(self, target: Target) -> HMCPlan:
        """Resolve the settings for a target."""
        return HMCPlan(
            chains=self.chains,
            draws=self.draws,
            warmup=self.warmup,
            thin=self.thin,
            length=self.length(target),
            tuned=self.tuned,
            step_size=self.step_size,
            first_step_size=self.length(target) / (10 * math.sqrt(math.sqrt(target.dim))),
            target_accept=self.target_accept,
            pooled=self.pooled,
            mass=self.mass_kind(target),
            inverse_mass=self.inverse_mass(target),
            mass_blocks=mass_blocks(self.mass_kind(target), target, self.mass_rank),
            jitter=self.jitter_fraction,
            refresh=self.refresh,
            integrator=integrator(self.integrator),
            max_steps=self.max_steps,
            compile=self.compile,
        )

    @property
    def _about_weights(self) -> bool:
        """Whether a setting is in units of the weights; a collapsed density has none of the output layer."""
        return self.step_size is not None or not isinstance(self.mass, str) or self.mass_start is not None

    def mass_kind(self, target: Target) -> str:
        """Return the kind of mass matrix: what "auto" resolves to, "posterior" for a given one."""
        if not isinstance(self.mass, str):
            return "posterior"
        if self.mass != "auto":
            return self.mass
        if isinstance(target, DensityTarget) or target.collapsed:
            return "diagonal"
        low, high = float(target.scale.min()), float(target.scale.max())
        return "identity" if high <= low * (1 + 1e-6) else "prior"

    def inverse_mass(self, target: Target) -> InverseMass:
        """Return the initial M^-1: the given one, or the prior's variance."""
        if not isinstance(self.mass, str):
            return given_mass("mass", self.mass, target)
        if self.mass_start is not None:
            return given_mass("mass_start", self.mass_start, target)
        return None if self.mass_kind(target) == "identity" else torch.square(target.scale).to(target.dtype)

    def given_mass(self, target: Target) -> dict[str, Tensor]:
        """Return the tensors of M^-1 if `mass` or `mass_start` is a posterior."""
        given = not isinstance(self.mass, str) or self.mass_start is not None
        return mass_tensors(self.inverse_mass(target)) if given else {}

    @property
    def jitter_fraction(self) -> float:
        """The jitter in use.

        Orbits are periodic in every direction of a Gaussian, so trajectories of a fixed length may return to where they
        started. With 0.2 the effective sample size of a linear model rises from a twentieth of the draws to most of
        them.
        """
        if self.jitter is not None:
            return self.jitter
        return 0.2 if self.trajectory_length is None or self.tuned else 0.0

    @property
    def tuned(self) -> bool:
        """Whether warm-up chooses the trajectory length."""
        return isinstance(self.trajectory_length, str)

    def length(self, target: Target) -> float:
        """Return the trajectory length tau; if it is tuned, the longest candidate."""
        if self.trajectory_length is not None and not isinstance(self.trajectory_length, str):
            return self.trajectory_length
        if self.mass_kind(target) != "identity":
            return math.pi / 2
        sigma = float(target.scale.square().mean().sqrt())
        return math.pi / 2 * sigma

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return short trajectories that keep most of their momentum: about twice the effective draws per gradient."""
        return {"chains": 8, "warmup": 150, "draws": 150, "thin": 2, **_SHORT}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return the same short trajectories with more chains, or hardly any draws for a quick run."""
        if quick:
            return {"chains": 4, "warmup": 20, "draws": 20, "max_steps": 40, **_SHORT}
        return {"chains": 16, "warmup": 80, "draws": 80, "thin": 2, **_SHORT}


# Their length suits the scales of the weights. Tables also sample all weights with full-length trajectories: trials
# without the output layer overrated the chains of concrete and underrated those of wine.
_SHORT: dict[str, Any] = {
    "trajectory_length": 0.5,
    "refresh": 0.3,
    "jitter": 0.2,
    "init": "fresh",
    "collapse": False,
}
