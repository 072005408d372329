"""The warm-up of parallel tempering: it adapts temperatures, a step size for each and the mass, and then freezes them.

Step sizes follow dual averaging of the mean acceptance of all ladders at a temperature, unless they are given. At the
end of each window (of doubling length) the temperatures are respaced for equal swap acceptance, with step sizes
interpolated between the old ones, and a diagonal mass is set to the variances that the coldest replicas have had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from credibly.distributed.world import Mesh
from credibly.inference.adaptation import (
    DualAveraging,
    Welford,
    harmonic_mean,
    search_step_size,
    usable_step_sizes,
    variance_with_gradients,
    windows,
)
from credibly.inference.kernels.tempering import interpolate, respace
from credibly.inference.sampling.hmc_plan import HMCPlan
from credibly.inference.target import Target

# After a change of ladder or mass, dual averaging shrinks step sizes towards this multiple of the last ones.
OPTIMISM = 2.0
# The temperatures are as given; between given ends; or up to the highest at which neighbours still exchange, at most to
# the given end.
Spacing = Literal["given", "between", "free"]


class TemperingWarmup:
    """The adaptation of ladders of K temperatures.

    Args:
        target, plan, mesh: of the run; `plan.chains` counts the ladders.
        beta: the first inverse temperatures (K,).
        spacing: whether and how their spacing is adapted.
        one_step: `one_step(sizes, trial)` returns the acceptance (C, K) of one integrator step with sizes (K,) from the
            current positions; `trial` numbers repeated calls, which have different momenta.

    Attributes:
        beta: inverse temperatures (K,).
        size: step size of every temperature, (K,), in float64 on the CPU.
        inverse_mass: M^-1 (D,), or None for the identity.
        phases: (name, first iteration, end) of the phases of warm-up.
    """

    def __init__(
        self,
        target: Target,
        plan: HMCPlan,
        mesh: Mesh,
        beta: Tensor,
        spacing: Spacing,
        one_step: Callable[[Tensor, int], Tensor],
    ) -> None:
        self.target, self.plan, self.mesh, self.one_step = target, plan, mesh, one_step
        # The method offers no other mass.
        assert plan.inverse_mass is None or isinstance(plan.inverse_mass, Tensor)
        self.beta, self.spacing, self.inverse_mass = beta, spacing, plan.inverse_mass
        # The inverse of the highest temperature that a ladder may reach.
        self.least, self.learns_mass = float(beta[-1]), plan.mass == "diagonal"
        self.ladders = len(mesh.chains(plan.chains))
        self.phases = [
            ("ladder" if name == "mass" else name, first, end)
            for name, first, end in windows(plan.warmup, spacing != "given" or self.learns_mass)
        ]
        self.dual = DualAveraging(torch.ones(len(beta)), plan.target_accept)
        self.size = self.dual.size if plan.step_size is None else plan.step_size * beta.rsqrt()
        # Rejections of the pairs in this window, summed, and their number.
        self.rejected = torch.zeros(len(beta) - 1, dtype=torch.float64)
        self.counted = 0
        self.draws, self.gradients = self._empty(), self._empty()

    def phase(self, t: int) -> tuple[str, int, int]:
        """Return the phase of iteration t: its name, first iteration and end."""
        return next(phase for phase in self.phases if phase[1] <= t < phase[2])

    def begin(self) -> None:
        """Search for rough step sizes from the starting points, unless they are given."""
        if self.plan.step_size is not None:
            return
        self.dual.restart(self._search(torch.full_like(self.dual.log_size, self.plan.first_step_size)))
        self.size = self.dual.size

    def _search(self, near: Tensor) -> Tensor:
        """Return rough step sizes (K,) near the given ones, from the current positions."""

        def acceptance(sizes: Tensor, trial: int) -> Tensor:
            found = self._of_all(self.one_step(sizes, trial))
            return torch.cat([harmonic_mean(column) for column in found.T])

        found = search_step_size(acceptance, near, self.plan.target_accept)
        return usable_step_sizes(found, found)

    def update(self, t: int, theta: Tensor, gradient: Tensor, acceptance: Tensor, rejection: Tensor) -> bool:
        """Adapt after iteration t. Return whether the temperatures have changed.

        Args:
            theta, gradient: positions and gradients of the coldest replicas, (C, D).
            acceptance: acceptance of the trajectories, (C, K).
            rejection: rejections of exchanges between neighbours, (C, K-1).
        """
        given, moved = self.plan.step_size is not None, False
        if not given:
            self.dual.update(self._of_all(acceptance).double().mean(0))
            self.size = self.dual.size
        name, _, end = self.phase(t)
        if name == "ladder":
            self.rejected = self.rejected + self._of_all(rejection).mean(0).cpu()
            self.counted += 1
            if self.learns_mass:
                self.draws.update(theta)
                self.gradients.update(gradient)
            if t + 1 == end:
                moved = self._renew()
        if t + 1 == self.plan.warmup and not given:
            self.size = self.dual.final
        return moved

    def _renew(self) -> bool:
        """Set ladder and mass from the window that ends, and restart the step sizes."""
        sizes = self.dual.final
        if self.learns_mass:
            draws, gradients = self._of_all(self.draws.squares), self._of_all(self.gradients.squares)
            variance = variance_with_gradients(
                self.draws.unshrunk(draws),
                self.gradients.unshrunk(gradients),
                self.draws.variance(self.target.scale**2, draws),
            )
            self.inverse_mass = variance.to(self.target.dtype)
            self.draws, self.gradients = self._empty(), self._empty()
            sizes = sizes if self.plan.step_size is not None else self._search(sizes)
        if self.spacing != "given":
            before, least = self.beta, self.least if self.spacing == "free" else None
            self.beta = respace(before, self.rejected / self.counted, least)
            sizes = interpolate(-self.beta.log(), -before.log(), sizes.log()).exp()
        self.rejected, self.counted = torch.zeros_like(self.rejected), 0
        self.dual.restart(sizes, OPTIMISM)
        self.size = self.dual.size if self.plan.step_size is None else self.plan.step_size * self.beta.rsqrt()
        return self.spacing != "given"

    # -- state ---------------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the rest of the run depends on."""
        found = {"beta": self.beta, "size": self.size, "rejected": self.rejected}
        found["counted"] = torch.tensor(float(self.counted), dtype=torch.float64)
        found |= {f"dual.{k}": v for k, v in self.dual.tensors().items()}
        if self.inverse_mass is not None:
            found["inverse_mass"] = self.inverse_mass
        if self.draws.count:
            found |= {f"draws.{k}": v for k, v in self.draws.tensors().items()}
            found |= {f"gradients.{k}": v for k, v in self.gradients.tensors().items()}
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""

        def below(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.beta, self.size, self.rejected = tensors["beta"], tensors["size"], tensors["rejected"]
        self.counted = int(tensors["counted"])
        self.dual.restore(below("dual."))
        if "inverse_mass" in tensors:
            self.inverse_mass = tensors["inverse_mass"].to(self.target.device)
        if draws := below("draws."):
            self.draws.restore(draws)
            self.gradients.restore(below("gradients."))

    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the ladders."""
        return 0 if name.startswith(("draws.", "gradients.")) and not name.endswith(".count") else None

    def _empty(self) -> Welford:
        return Welford(self.ladders, self.target.dim, self.target.device)

    def _of_all(self, own: Tensor) -> Tensor:
        return self.mesh.all_chains(own, self.plan.chains)
