"""Microcanonical Langevin Monte Carlo (Robnik et al. 2023), unadjusted or with a Metropolis correction.

    dw = u dt,    du = (I - u u') (grad log p / (d - 1) dt + eta dW),    |u| = 1

The kernel is in `credibly.inference.kernels.mclmc`, the sampler in `credibly.inference.sampling.mclmc`.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from torch import Tensor

from credibly.core.checks import check_integer, check_positive, check_probability
from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.kernels.hmc import integrator
from credibly.inference.sampling.mclmc import MCLMCSampler
from credibly.inference.sampling.mclmc_plan import MCLMCPlan
from credibly.inference.sampling.run import SamplingMethod, check_draw_dtype
from credibly.inference.sampling.starts import check_init
from credibly.inference.sampling.until import check_until
from credibly.inference.target import Target
from credibly.posterior.base import Posterior

LEAST_WARMUP = 40


@dataclass(frozen=True, kw_only=True)
class MCLMC(SamplingMethod):
    """Microcanonical Langevin Monte Carlo: a direction of unit length instead of a momentum.

    Args:
        chains, draws: number of chains, and number of draws per chain.
        warmup: iterations before the first draw, in which step size and length adapt; they are frozen afterwards.
        adjusted: whether paths are accepted or rejected, which makes the draws exact. False has a bias that depends on
            the step size, and the record has the variance of the energy error that it comes from.
        step_size: None finds it during warm-up.
        trajectory_length: length of the path of an iteration, over which directions persist; None uses the width of
            the density, sqrt(sum of the variances), as found during warm-up.
        energy_variance: variance of the energy error of a step, per dimension, that the step size of the unadjusted
            form is adapted to. The bias shrinks with it.
        target_accept: acceptance rate that the step size of the adjusted form is adapted to.
        integrator: "minimum-error" (two gradients per step) or "leapfrog".
        max_steps: maximum steps per iteration; longer paths are truncated, and the record reports it.
        thin: iterations per draw.
        init, start_steps, draw_dtype, compile, until, budget: as in `HMC`.
        mass: not supported, because there is no momentum; passing it raises an error.
    """

    name: ClassVar[str] = "mclmc"
    label: ClassVar[str] = "MCLMC"
    shards_rows: ClassVar[bool] = True
    chains: int = 4
    draws: int = 500
    warmup: int = 300
    adjusted: bool = False
    step_size: float | None = None
    trajectory_length: float | None = None
    energy_variance: float = 5e-4
    target_accept: float = 0.8
    integrator: str = "minimum-error"
    max_steps: int = 500
    thin: int = 1
    init: str | Tensor | Posterior = "ensemble"
    start_steps: int = 1000
    draw_dtype: str | None = None
    compile: Compile = "auto"
    until: str | None = None
    budget: float | str | None = None
    mass: InitVar[None] = None

    def __post_init__(self, mass: None) -> None:
        if mass is not None:
            own = type(self).__name__
            raise InputError(
                "mass",
                f"must not be passed to {own}, which has a direction instead of a momentum, got {mass!r}",
                "Coordinates are measured in the prior's scale; use HMC or NUTS for another mass",
            )
        for name in ("chains", "draws", "max_steps", "thin", "start_steps"):
            check_integer(name, getattr(self, name))
        check_integer("warmup", self.warmup, least=0)
        if not isinstance(self.adjusted, bool):
            raise InputError("adjusted", f"must be True or False, got {self.adjusted!r}")
        for name in ("step_size", "trajectory_length"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_positive("energy_variance", self.energy_variance)
        check_probability("target_accept", self.target_accept)
        if self.step_size is None or self.trajectory_length is None:
            advice = "Step size and length are found during warm-up; pass more iterations or both of them"
            check_integer("warmup", self.warmup, LEAST_WARMUP, advice=advice)
        integrator(self.integrator)
        check_init(self.init)
        check_draw_dtype(self.draw_dtype)
        check_until(self.until, self.budget, self.warmup + self.thin)

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> MCLMCSampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""
        return MCLMCSampler(target, self.plan(target), seed, mesh or Mesh(World()))

    def plan(self, target: Target) -> MCLMCPlan:
        """Resolve the settings for a target."""
        # In one dimension there is no direction to turn.
        if target.dim < 2:
            found = f"must have at least two parameters for {type(self).__name__}, got 1"
            raise InputError("problem", found, "Use HMC or NUTS")
        return MCLMCPlan(
            chains=self.chains,
            draws=self.draws,
            warmup=self.warmup,
            thin=self.thin,
            adjusted=self.adjusted,
            step_size=self.step_size,
            length=self.trajectory_length,
            energy_variance=self.energy_variance,
            target_accept=self.target_accept,
            integrator=integrator(self.integrator),
            max_steps=self.max_steps,
            scale=target.scale.to(target.device, target.dtype),
            compile=self.compile,
        )

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return settings with more chains of fewer draws."""
        return {"chains": 8, "warmup": 150, "draws": 150, "max_steps": 100, "init": "fresh"}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return short paths, and hardly any draws for a quick run."""
        if quick:
            return {"chains": 4, "warmup": 40, "draws": 20, "max_steps": 20, "init": "fresh"}
        return {"chains": 16, "warmup": 80, "draws": 80, "max_steps": 60, "init": "fresh"}
