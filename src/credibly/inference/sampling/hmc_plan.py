"""The plan of an HMC run: its settings resolved for a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from credibly.core.compilation import Compile
from credibly.gaussians.mass import InverseMass
from credibly.inference.kernels.hmc import Integrator


class MassBlock(NamedTuple):
    """Consecutive coordinates whose correlations are estimated together, and the maximum number of eigenvectors."""

    start: int
    size: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class HMCPlan:
    """The settings of `HMC` resolved for one target, with no "auto" left.

    Attributes:
        length: trajectory length tau; if `tuned`, the longest that warm-up tries.
        step_size: None if warm-up finds it, starting at `first_step_size`.
        mass: the kind, "posterior" for a given one, and `inverse_mass` the initial M^-1.
        mass_blocks: the blocks of a mass with correlations that warm-up adapts, none for other kinds.
        jitter: relative variation of the trajectory length.
    """

    chains: int
    draws: int
    warmup: int
    thin: int
    length: float
    tuned: bool
    step_size: float | None
    first_step_size: float
    target_accept: float
    pooled: bool
    mass: str
    inverse_mass: InverseMass
    mass_blocks: tuple[MassBlock, ...]
    jitter: float
    refresh: float
    integrator: Integrator
    max_steps: int
    compile: Compile
