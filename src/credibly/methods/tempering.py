"""Parallel tempering with full-batch HMC (Geyer 1991; Syed et al. 2021).

    p_k(w) proportional to p(D|w)^(1 / T_k) p(w),    1 = T_1 < T_2 < ... < T_K

Each of K replicas follows HMC on its own p_k. After every trajectory neighbours propose to exchange positions, accepted
with probability min(1, exp((1/T_k - 1/T_(k+1)) (log p(D|w_(k+1)) - log p(D|w_k)))). A position that has been at a high
temperature, where the likelihood hardly separates the modes, may come back to the posterior in another mode. Only
the draws at T_1 are kept. Temperatures are multiples of the problem's own.

The exchanges are in `credibly.inference.kernels.tempering`, the sampler in `credibly.inference.sampling.tempering`.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer, check_positive, is_real
from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError
from credibly.inference.adaptation import LEAST_WARMUP
from credibly.inference.kernels.tempering import geometric_ladder
from credibly.inference.sampling.mass import DIAGONAL
from credibly.inference.sampling.run import SamplingMethod
from credibly.inference.sampling.tempering import TemperingSampler
from credibly.inference.sampling.tempering_warmup import Spacing
from credibly.inference.target import Target
from credibly.methods.hmc import HMC
from credibly.posterior.base import Posterior


@dataclass(frozen=True, kw_only=True)
class ParallelTempering(SamplingMethod):
    """Parallel tempering: HMC at a ladder of temperatures, with exchanges that carry it from mode to mode.

    Args:
        chains, draws: number of independent ladders, and number of draws per ladder at the problem's own temperature.
        warmup: iterations before the first draw, in which temperatures, step sizes and mass adapt; they are frozen
            afterwards.
        temperatures: the number of temperatures from 1 to `hottest`, spaced in warm-up for equal swap acceptance; or
            the temperatures themselves, increasing from 1. They multiply the problem's own likelihood temperature.
            All of a `Density` is tempered.
        hottest: the highest temperature, if `temperatures` is a number of them. None chooses the highest, up to 10, at
            which that many temperatures still exchange 40 % of the time.
        trajectory_length: length at the lowest temperature; None uses pi/2 times the prior's scale. The others take
            the same number of steps, each with its own step size.
        step_size: step size at the lowest temperature; at T it is sqrt(T) times as large. None finds one for every
            temperature during warm-up.
        target_accept: acceptance rate that the step size of each temperature is adapted to.
        mass: "identity", "prior", "diagonal" or "auto", as in `HMC`; the same at all temperatures.
        jitter, refresh, integrator, max_steps: of the trajectories, as in `HMC`.
        thin: iterations per draw.
        init, start_steps: starts of the ladders, as in `HMC`; all replicas of a ladder start at the same point.
        draw_dtype, compile, until, budget: as in `HMC`.
    """

    name: ClassVar[str] = "tempering"
    label: ClassVar[str] = "Tempering"
    shards_rows: ClassVar[bool] = True
    chains: int = 4
    draws: int = 500
    warmup: int = 300
    temperatures: int | tuple[float, ...] = 8
    hottest: float | None = None
    trajectory_length: float | None = None
    step_size: float | None = None
    target_accept: float = 0.8
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
    until: str | None = None
    budget: float | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.temperatures, (list, tuple)):
            _check_ladder(self.temperatures)
            object.__setattr__(self, "temperatures", tuple(float(t) for t in self.temperatures))
            if self.hottest is not None:
                found = f"must be None if all temperatures are given, got {self.hottest!r}"
                raise InputError("hottest", found, "Pass a number of temperatures with it")
        else:
            advice = "One temperature has no neighbour to exchange with; use HMC"
            check_integer("temperatures", self.temperatures, 2, advice=advice)
            advice = "Temperatures are spaced during warm-up; pass more iterations, or the temperatures themselves"
            check_integer("warmup", self.warmup, LEAST_WARMUP, advice=advice)
        if self.hottest is not None and not (is_real(self.hottest) and 1 < self.hottest < float("inf")):
            found = f"must be a finite number above 1, the problem's own temperature, got {self.hottest!r}"
            raise InputError("hottest", found)
        if self.trajectory_length is not None:
            check_positive("trajectory_length", self.trajectory_length)
        check_choice("mass", self.mass, DIAGONAL)
        self._as_hmc()

    @property
    def ladder(self) -> Tensor:
        """The inverse temperatures that a run begins with, (K,)."""
        if isinstance(self.temperatures, tuple):
            return 1 / torch.tensor(self.temperatures, dtype=torch.float64)
        return geometric_ladder(self.temperatures, self.hottest or HOTTEST)

    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> TemperingSampler:
        """Return the sampler of all ladders, or of those that a mesh assigns to this process."""
        spacing: Spacing = "free" if self.hottest is None else "between"
        if isinstance(self.temperatures, tuple):
            spacing = "given"
        plan = self._as_hmc().plan(target)
        return TemperingSampler(target, plan, self.ladder, spacing, seed, mesh or Mesh(World()))

    def _as_hmc(self) -> HMC:
        """Return HMC with the settings that both share. It checks them, and its plan is that of the trajectories."""
        own = {field.name for field in dataclasses.fields(self)} & {field.name for field in dataclasses.fields(HMC)}
        return HMC(**{name: getattr(self, name) for name in own})

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return few ladders of few temperatures: a table's fit is one of several."""
        return {"temperatures": 4, "warmup": 150, "draws": 150, "thin": 2, **_SHORT}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return the same with fewer iterations, or hardly any draws for a quick run."""
        if quick:
            return {"chains": 4, "temperatures": 2, "warmup": 20, "draws": 20, "max_steps": 20, **_SHORT}
        return {"chains": 8, "temperatures": 4, "warmup": 80, "draws": 80, "thin": 2, **_SHORT}


# The highest temperature that is chosen.
HOTTEST = 10.0
_SHORT: dict[str, Any] = {"trajectory_length": 0.5, "refresh": 0.3, "jitter": 0.2, "init": "fresh"}


def _check_ladder(temperatures: list[float] | tuple[float, ...]) -> None:
    """Raise unless temperatures increase from 1."""
    if len(temperatures) < 2:
        found = f"must be at least two, got {tuple(temperatures)!r}"
        raise InputError("temperatures", found, "One temperature has no neighbour to exchange with; use HMC")
    for temperature in temperatures:
        check_positive("temperatures", temperature)
    if min(temperatures) < 1:
        found = f"must not be below 1, the problem's own temperature, got {min(temperatures)!r}"
        raise InputError("temperatures", found, "For a cold posterior pass temperature= to the Problem")
    if temperatures[0] != 1:
        raise InputError("temperatures", f"must begin with 1, the problem's own temperature, got {temperatures[0]!r}")
    if any(b <= a for a, b in itertools.pairwise(temperatures)):
        raise InputError("temperatures", f"must increase, got {tuple(temperatures)!r}")
