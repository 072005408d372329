"""The plan of an HMC run: its settings resolved for a target."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from credibly.core.compilation import Compile
from credibly.inference.kernels.hmc import Integrator


@dataclass(frozen=True, kw_only=True)
class HMCPlan:
    """The settings of `HMC` resolved for one target: nothing is "auto" any more.

    Attributes:
        length: trajectory length tau; if `tuned`, the longest that warm-up tries.
        step_size: None if warm-up finds it, starting at `first_step_size`.
        mass: "identity", "prior" or "diagonal", and `inverse_mass` the initial M^-1 (D,), None for the identity.
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
    inverse_mass: Tensor | None
    jitter: float
    refresh: float
    integrator: Integrator
    max_steps: int
    compile: Compile
