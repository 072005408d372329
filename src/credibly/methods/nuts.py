"""The No-U-Turn sampler on the full batch (Hoffman & Gelman 2014; Betancourt 2017).

    m ~ N(0, M);   double the trajectory, forwards or backwards, until p_first' M^-1 rho <= 0 or p_last' M^-1 rho <= 0;
    draw the next state from its points with weights exp(-H), biased towards the newer half

The kernel is in `credibly.inference.kernels.nuts`, the sampler in `credibly.inference.sampling.nuts`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from torch import Tensor

from credibly.core.checks import check_integer
from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.sampling.nuts import NUTSSampler
from credibly.inference.sampling.run import SamplingMethod
from credibly.inference.target import Target
from credibly.methods.hmc import HMC
from credibly.posterior.base import Posterior
from credibly.problem import Problem

# Beyond this depth the random numbers of one trajectory alone would fill memory.
DEEPEST = 16


@dataclass(frozen=True, kw_only=True)
class NUTS(SamplingMethod):
    """The No-U-Turn sampler: HMC that finds the length of every trajectory automatically.

    Args:
        chains, draws: number of chains, and number of draws per chain.
        warmup: iterations before the first draw, in which step size and mass adapt, as in `HMC`.
        step_size: leapfrog step size; None finds it during warm-up.
        target_accept: mean acceptance over the points of a trajectory, to which the step size is adapted.
        pooled: one step size for all chains at the end of warm-up; False gives each its own.
        mass, mass_rank, mass_start: as in `HMC`.
        max_depth: maximum doublings of a trajectory, which then has 2^max_depth - 1 steps. The record counts the
            trajectories that reached it.
        thin: iterations per draw.
        init, start_steps, draw_dtype, compile, collapse, until, budget: as in `HMC`.
        trajectory_length: not supported, because every trajectory finds its own; passing it raises an error.
    """

    name: ClassVar[str] = "nuts"
    label: ClassVar[str] = "NUTS"
    shards_rows: ClassVar[bool] = True
    chains: int = 4
    draws: int = 500
    warmup: int = 300
    step_size: float | None = None
    target_accept: float = 0.8
    pooled: bool = True
    mass: str | Posterior = "auto"
    mass_rank: int = 64
    mass_start: Posterior | None = None
    max_depth: int = 10
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
            found = f"must not be passed to NUTS, which finds it for every trajectory, got {trajectory_length!r}"
            raise InputError("trajectory_length", found, "Pass max_depth to bound it, or use HMC")
        check_integer("max_depth", self.max_depth, 1, DEEPEST)
        self._as_hmc()

    def target(self, problem: Problem | Density, mesh: Mesh | None) -> Target:
        """Return the density that is sampled, without the output layer where that applies."""
        return self._as_hmc().target(problem, mesh)

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> NUTSSampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""
        return NUTSSampler(target, self._as_hmc().plan(target), seed, mesh or Mesh(World()), self.max_depth)

    def given_mass(self, target: Target) -> dict[str, Tensor]:
        """Return the tensors of M^-1 if `mass` or `mass_start` is a posterior."""
        return self._as_hmc().given_mass(target)

    def _as_hmc(self) -> HMC:
        """Return HMC with the settings that both share. It checks them, and its plan is that of the warm-up."""
        own = {field.name for field in dataclasses.fields(self)} & {field.name for field in dataclasses.fields(HMC)}
        return HMC(**{name: getattr(self, name) for name in own}, max_steps=2**self.max_depth - 1, jitter=0.0)

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return a few more chains and shorter trees: a table's fit is one of several."""
        return {"chains": 8, "warmup": 150, "draws": 150, "max_depth": 8, "init": "fresh"}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return short trees, and hardly any draws for a quick run."""
        if quick:
            return {"chains": 4, "warmup": 20, "draws": 20, "max_depth": 5, "init": "fresh"}
        return {"chains": 16, "warmup": 80, "draws": 80, "max_depth": 7, "init": "fresh"}
