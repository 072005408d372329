"""The plan of an MCLMC run, and what its warm-up adapts: the step size and the length over which directions persist."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.core.compilation import Compile
from credibly.inference.adaptation import DualAveraging, PooledAcceptance, Welford, windows
from credibly.inference.kernels.hmc import Integrator


@dataclass(frozen=True, kw_only=True)
class MCLMCPlan:
    """The settings of `MCLMC` resolved for one target.

    Attributes:
        step_size, length: None if warm-up finds them.
        energy_variance: target variance of the energy error of a step, per dimension, in the unadjusted form.
        scale: scale of the coordinates, (D,), or None for ones.
    """

    chains: int
    draws: int
    warmup: int
    thin: int
    adjusted: bool
    step_size: float | None
    length: float | None
    energy_variance: float
    target_accept: float
    integrator: Integrator
    max_steps: int
    scale: Tensor | None
    compile: Compile


class MCLMCAdaptation:
    """Step size and length, the same for all chains, and the moments that they follow from.

    The error of a step of a second-order integrator grows with the cube of its size, and its variance with the sixth
    power. So the size for a target variance follows from the variance measured at another size.

    Args:
        plan: plan of the run.
        chains: number of chains of this process.
        dim, device: dimension and device of the target.
    """

    # Length of trajectories in units of sqrt(sum of the variances), for the two forms. A trajectory of HMC of length
    # pi/2 in units of the standard deviations has 1.6.
    LENGTH, LENGTH_ADJUSTED = 1.0, 1.6
    # Steps per iteration until the width of the density is known.
    FIRST_STEPS = 20

    def __init__(self, plan: MCLMCPlan, chains: int, dim: int, device: torch.device) -> None:
        self.plan, self.chains, self.dim, self.device = plan, chains, dim, device
        self.phases = windows(plan.warmup, plan.length is None)
        self.size = plan.step_size or 0.0
        self.length = plan.length or 0.0
        self.count, self.rate = 0, 0.0
        self.draws = Welford(chains, dim, device)
        self.dual = DualAveraging(torch.ones(1), plan.target_accept)
        self.pool = PooledAcceptance(plan.chains, plan.target_accept)

    @property
    def steps(self) -> int:
        """Steps per iteration, and the length that goes with them."""
        if not self.length:
            return min(self.FIRST_STEPS, self.plan.max_steps)
        return max(1, min(self.plan.max_steps, round(self.length / self.size)))

    @property
    def persistence(self) -> float:
        """The length over which directions persist in the unadjusted form."""
        return self.length or self.steps * self.size

    def phase(self, t: int) -> str:
        """Return the name of the phase of iteration t."""
        name = next((name for name, first, end in self.phases if first <= t < end), "sampling")
        return "length" if name == "mass" else name

    def wanted(self, size: float, variance: float) -> float:
        """Return the step size with the target variance, given the variance at `size`; at most twice `size`."""
        if not math.isfinite(variance):
            return size / 2
        ratio = self.plan.energy_variance / max(variance, 1e-300)
        return size * min(2.0, max(0.5, float(ratio ** (1 / 6))))

    def begin(self, size: float) -> None:
        """Start from a rough step size."""
        self.size, self.count, self.rate = size, 0, 0.0
        self.dual.restart(torch.tensor([size]), 1.0)

    def update(
        self, t: int, variance: float, acceptance: Tensor, theta: Tensor, squares: Callable[[Tensor], Tensor]
    ) -> None:
        """Adapt after iteration t of warm-up.

        Args:
            t: the iteration.
            variance: variance of the energy error of its steps, per dimension, over all chains.
            acceptance: acceptance of all chains, (C,).
            theta: scaled positions of this process's chains.
            squares: a function that gathers `Welford.squares` of all chains.
        """
        window = next((one for one in self.phases if one[1] <= t < one[2]), None)
        if window is not None and window[0] == "mass":
            self.draws.update(theta)
            if t + 1 == window[2]:
                first = not self.length
                factor = self.LENGTH_ADJUSTED if self.plan.adjusted else self.LENGTH
                total = self.draws.unshrunk(squares(self.draws.squares)).sum()
                self.length = max(float(total.sqrt()) * factor, self.size)
                self.draws = Welford(self.chains, self.dim, self.device)
                if first and self.plan.adjusted and self.plan.step_size is None:
                    self.dual.restart(self.dual.final, 2.0)
        if self.plan.step_size is not None:
            return
        if self.plan.adjusted:
            self.dual.update(self.pool.update(acceptance))
            last = t + 1 == self.plan.warmup
            self.size = float(self.dual.final * self.pool.margin if last else self.dual.size)
            return
        # The variance of a step of size 1, averaged over a few dozen iterations; one bad path counts as a doubled step.
        self.count += 1
        rate = min(variance, 2.0**6 * self.plan.energy_variance) / self.size**6
        self.rate += max(1 / self.count, 0.03) * (rate - self.rate)
        self.size = min(2 * self.size, max(0.5 * self.size, (self.plan.energy_variance / self.rate) ** (1 / 6)))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as a tensor."""
        found = {f"dual.{k}": v for k, v in self.dual.tensors().items()}
        found |= {f"draws.{k}": v for k, v in self.draws.tensors().items()}
        found |= {"pool.recent": self.pool.recent, "pool.limited": self.pool.limited}
        found["adapted"] = torch.tensor([self.size, self.length, self.rate, float(self.count)], dtype=torch.float64)
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""

        def below(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.dual.restore(below("dual."))
        self.draws.restore(below("draws."))
        self.pool.recent, self.pool.limited = tensors["pool.recent"], tensors["pool.limited"]
        self.size, self.length, self.rate, count = tensors["adapted"].tolist()
        self.count = int(count)
