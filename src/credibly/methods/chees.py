"""ChEES-HMC: Hamiltonian Monte Carlo that learns one trajectory length for all chains (Hoffman et al. 2021).

    trajectories of length h T,  h = 1/2, 1/4, 3/4, 1/8, ...;    T maximises 1/4 E[(|w' - m|^2 - |w - m|^2)^2] / T

The criterion is in `credibly.inference.kernels.chees`, the sampler in `credibly.inference.sampling.chees`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from torch import Tensor

from credibly.core.checks import check_choice, check_integer
from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.sampling.chees import ChEESSampler
from credibly.inference.sampling.mass import DIAGONAL
from credibly.inference.sampling.run import SamplingMethod
from credibly.inference.target import Target
from credibly.methods.hmc import HMC
from credibly.posterior.base import Posterior
from credibly.problem import Problem

# Iterations in which the trajectory length can grow about ten times.
LEAST_WARMUP = 20


@dataclass(frozen=True, kw_only=True)
class ChEES(SamplingMethod):
    """ChEES-HMC: HMC that learns one trajectory length for all chains in warm-up.

    Args:
        chains, draws: number of chains, at least 2, and number of draws per chain.
        warmup: iterations before the first draw, in which trajectory length, step size and mass adapt; they are frozen
            afterwards. Trajectories start with three steps, so early iterations are cheap.
        step_size: integrator step size; None finds it during warm-up.
        target_accept: acceptance rate that the step size is adapted to.
        pooled: one step size for all chains at the end of warm-up; False gives each its own.
        mass: "identity", "prior", "diagonal" or "auto", as in `HMC`.
        integrator: "leapfrog" or "minimum-error" (two gradients per step).
        max_steps: maximum steps per trajectory; T does not grow beyond it, and the record reports it.
        thin: iterations per draw.
        init, start_steps, draw_dtype, compile, collapse, until, budget: as in `HMC`.
        trajectory_length: not supported, because it is learned; passing it raises an error.
    """

    name: ClassVar[str] = "chees"
    label: ClassVar[str] = "ChEES-HMC"
    shards_rows: ClassVar[bool] = True
    chains: int = 8
    draws: int = 250
    warmup: int = 300
    step_size: float | None = None
    target_accept: float = 0.8
    pooled: bool = True
    mass: str = "auto"
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
    trajectory_length: InitVar[None] = None

    def __post_init__(self, trajectory_length: None) -> None:
        if trajectory_length is not None:
            found = f"must not be passed to ChEES, which learns it in warm-up, got {trajectory_length!r}"
            raise InputError("trajectory_length", found, "Pass max_steps to bound it, or use HMC")
        advice = "The trajectory length is learned from several chains; use NUTS or HMC for a single one"
        check_integer("chains", self.chains, 2, advice=advice)
        advice = "The trajectory length is learned during warm-up; use HMC to choose it yourself"
        check_integer("warmup", self.warmup, LEAST_WARMUP, advice=advice)
        check_choice("mass", self.mass, DIAGONAL)
        self._as_hmc()

    def target(self, problem: Problem | Density, mesh: Mesh | None) -> Target:
        """Return the density that is sampled, without the output layer where that applies."""
        return self._as_hmc().target(problem, mesh)

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> ChEESSampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""
        return ChEESSampler(target, self._as_hmc().plan(target), seed, mesh or Mesh(World()))

    def _as_hmc(self) -> HMC:
        """Return HMC with the settings that both share. It checks them, and its plan is that of the warm-up."""
        own = {field.name for field in dataclasses.fields(self)} & {field.name for field in dataclasses.fields(HMC)}
        return HMC(**{name: getattr(self, name) for name in own})

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return shorter runs, from fresh weights: a table's fit is one of several."""
        return {"chains": 8, "warmup": 150, "draws": 150, "max_steps": 500, "init": "fresh"}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return short trajectories, and hardly any draws for a quick run."""
        if quick:
            return {"chains": 4, "warmup": 40, "draws": 20, "max_steps": 30, "init": "fresh"}
        return {"chains": 16, "warmup": 80, "draws": 80, "max_steps": 100, "init": "fresh"}
