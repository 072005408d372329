"""Microcanonical Langevin ensembles: a short MCLMC chain from every member of a deep ensemble (Sommer et al. 2025).

    w_m = argmax log p(w | D), each from its own start;    chain m: MCLMC from w_m;    p(y | x) = mean over all draws

The chains are short and need not mix with each other: each is a local posterior around its member, and the draws are
the mixture of them with equal weights. See `credibly.methods.mclmc` for the dynamics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from credibly.core.checks import check_integer
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.sampling.mile import MILESampler
from credibly.inference.target import Target
from credibly.methods.mclmc import MCLMC
from credibly.posterior.base import Posterior


@dataclass(frozen=True, kw_only=True)
class MILE(MCLMC):
    """Microcanonical Langevin ensemble: a deep ensemble with a short MCLMC chain from each of its members.

    Args:
        chains, draws: number of members, at least 2, and number of draws from each member's chain.
        start_steps: training steps of the members.
        warmup, max_steps: of the chains, as in `MCLMC`.
        init: "ensemble" trains the members; or a (C, D) tensor or a posterior with a start for every chain.
        adjusted, step_size, trajectory_length, energy_variance, target_accept, integrator, thin, draw_dtype, compile:
            as in `MCLMC`.
        until, budget: not supported, because the chains need not mix with each other; passing them raises an error.
    """

    name: ClassVar[str] = "mile"
    label: ClassVar[str] = "MILE"
    chains: int = 8
    draws: int = 200
    warmup: int = 200
    max_steps: int = 50
    init: str | Tensor | Posterior = "ensemble"
    start_steps: int = 1000

    def __post_init__(self, mass: None) -> None:
        advice = "A single member is no ensemble; use MCLMC or NUTS for a single chain"
        check_integer("chains", self.chains, 2, advice=advice)
        if isinstance(self.init, str) and self.init != "ensemble":
            found = f'must be "ensemble", a (chains, D) tensor or a posterior for MILE, got {self.init!r}'
            raise InputError("init", found, "Use MCLMC for other starting points")
        if self.until is not None:
            found = f"must be None for MILE, whose chains need not mix with each other, got {self.until!r}"
            raise InputError("until", found, "Use MCLMC, HMC, NUTS or ChEES to sample until chains agree")
        if self.budget is not None:
            found = f"must be None for MILE, whose chains have a fixed length, got {self.budget!r}"
            raise InputError("budget", found, "Set chains, start_steps, warmup, draws and max_steps instead")
        super().__post_init__(mass)

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> MILESampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""
        return MILESampler(target, self.plan(target), seed, mesh or Mesh(World()))

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return cheaper settings: a table's fit is one of several."""
        return {"chains": 8, "start_steps": 1000}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return short fits and paths, and hardly any draws for a quick run."""
        if quick:
            return {"chains": 4, "warmup": 40, "draws": 20, "max_steps": 20, "start_steps": 100}
        return {"chains": 10, "warmup": 60, "draws": 40, "max_steps": 40, "start_steps": 500}
