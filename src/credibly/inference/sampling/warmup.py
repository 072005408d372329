"""The warm-up of HMC: it adapts step size, mass and trajectory length, then freezes them, and restarts stuck chains.

A chain that no proposal has moved for a third of the warm-up is restarted from the position of another chain: it would
otherwise stay where it is, and its draws would be copies of its starting point. The record lists such chains. With a
given step size no chain is restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.gaussians.mass import InverseMass
from credibly.inference.adaptation import (
    DualAveraging,
    LengthTrial,
    PooledAcceptance,
    harmonic_mean,
    search_step_size,
    usable_step_sizes,
    windows,
)
from credibly.inference.kernels.hmc import Info, State
from credibly.inference.sampling.hmc_plan import HMCPlan
from credibly.inference.sampling.mass import MassAdaptation
from credibly.inference.target import Target

# Maximum steps per trajectory until the mass has been estimated: long trajectories, with the steps that the narrowest
# direction allows, are expensive and gain little.
UNSCALED_STEPS = 100
# Minimum number of iterations without a move after which a chain counts as stuck, if a third of the warm-up is shorter.
LEAST_STUCK = 20
# A chain also counts as stuck if its own step size is below this fraction of the others'.
NEGLIGIBLE = 1e-6


class Restart(NamedTuple):
    """A chain that had not moved when `iteration` began, and the chain from whose position it restarted."""

    chain: int
    iteration: int
    source: int


class Warmup:
    """The adaptation of all chains that a process holds.

    Args:
        target, plan, seed, mesh: of the run.
        one_step: `one_step(sizes, trial)` returns the acceptance (C,) of one integrator step with sizes (C,) from the
            current positions; `trial` numbers repeated calls, which have different momenta.

    Attributes:
        size: step size of every chain (C,), in float64 on the CPU; a new tensor whenever it changes.
        length: trajectory length, and `part` the fraction of it to use next.
        mass: M^-1 and its adaptation.
        restarts: the chains that were stuck.
    """

    def __init__(
        self, target: Target, plan: HMCPlan, seed: int, mesh: Mesh, one_step: Callable[[Tensor, int], Tensor]
    ) -> None:
        self.target, self.plan, self.seed, self.mesh, self.one_step = target, plan, seed, mesh, one_step
        self.own = mesh.chains(plan.chains)
        self.chains, self.end = len(self.own), plan.warmup
        self.mass = MassAdaptation(target, plan, mesh)
        self.phases = windows(plan.warmup, self.mass.adapts)
        # The iteration from which all chains have one step size, if ever.
        self.common_from = plan.warmup + 1
        if plan.pooled:
            self.common_from = self.phases[-1][1] if len(self.phases) > 1 else plan.warmup // 3
        # Whether they do. A process may have a single chain of several, so the length of a tensor does not show it.
        self.common = False
        self.length = plan.length
        self.size = torch.full((self.chains,), plan.step_size or 0.0, dtype=torch.float64)
        self.dual = DualAveraging(torch.ones(self.chains), plan.target_accept)
        self.pool = PooledAcceptance(plan.chains, plan.target_accept)
        self.trial: LengthTrial | None = None
        # Consecutive iterations that rejected the proposal, (C,).
        self.rejected = torch.zeros(self.chains, dtype=torch.float64, device=target.device)
        self.restarts: list[Restart] = []

    @property
    def inverse_mass(self) -> InverseMass:
        """M^-1."""
        return self.mass.inverse

    @property
    def part(self) -> float:
        """Fraction of the trajectory length that warm-up uses next."""
        if not self.plan.tuned:
            return 1.0
        return 0.25 if self.trial is None else self.trial.part

    def most_steps(self, t: int) -> int:
        """Return the maximum steps of the trajectories of iteration t; fewer until a mass has been estimated."""
        first = next((end for name, _, end in self.phases if name == "mass"), 0)
        return min(self.plan.max_steps, UNSCALED_STEPS) if t < first else self.plan.max_steps

    def phase(self, t: int) -> tuple[str, int, int]:
        """Return the phase of iteration t: its name, first iteration and end."""
        return next(phase for phase in self.phases if phase[1] <= t < phase[2])

    def begin(self) -> None:
        """Search for a rough step size from the starting points, unless it is given."""
        if self.plan.step_size is None:
            self._restart_step_size(torch.full_like(self.dual.log_size, self.plan.first_step_size))

    def search(self, size: Tensor) -> Tensor:
        """Return a rough step size near `size` for each chain (C,), or for all of them (1,)."""

        def acceptance(sizes: Tensor, trial: int) -> Tensor:
            own = self.one_step(sizes.expand(self.chains), trial)
            return harmonic_mean(self._of_all(own)) if self.common else own

        found = search_step_size(acceptance, size, self.plan.target_accept)
        return usable_step_sizes(found, found if self.common else self._of_all(found))

    def observe(self, t: int, current: State, proposal: State, info: Info, steps: list[int]) -> None:
        """Use the proposals of iteration t, after the given steps, before `update`; HMC does not need them."""

    def update(self, t: int, before: Tensor, state: State, info: Info) -> State:
        """Adapt after iteration t, which led from `before` to `state`, and return the state to continue from."""
        name, first, end = self.phase(t)
        if self.plan.tuned:
            self._try_lengths(t, before, state.theta)
        if self.plan.step_size is None:
            common = t >= self.common_from
            self.dual.update(self.pool.update(self._of_all(info.acceptance)) if common else info.acceptance)
            self.size = self.dual.size.expand(self.chains).clone()
            self.rejected = torch.where(info.accepted, 0.0, self.rejected + 1)
            state = self._free_stuck_chains(t, state)
        if name == "mass":
            self.mass.update(state, first, t, end)
        if self.plan.step_size is None:
            if t + 1 == self.common_from:
                self.common = self.plan.chains > 1
                # The step size that each chain accepts is known by now: a larger one would lose the worst chain.
                self._restart_step_size(harmonic_mean(self._of_all(self.dual.final)), optimism=1.0)
            elif name == "mass" and t + 1 == end:
                self._restart_step_size(self.dual.final)
            if t + 1 == self.end:
                self.size = (self.dual.final * self.pool.margin).expand(self.chains).clone()
        return state

    def _restart_step_size(self, near: Tensor, optimism: float = 10.0) -> None:
        self.dual.restart(self.search(near), optimism)
        self.size = self.dual.size.expand(self.chains).clone()

    def _try_lengths(self, t: int, before: Tensor, after: Tensor) -> None:
        """Try trajectory lengths in turn once the mass is final; the last iteration of warm-up chooses."""
        masses = [end for name, _, end in self.phases if name == "mass"]
        if self.trial is not None:
            self.trial.update(self.target.features(before), self.target.features(after))
        elif t + 1 == (masses[-1] if masses else self.end // 3):
            self.trial = LengthTrial(self.chains, self.target.features(before).shape[1], self.target.device)
        if self.trial is not None and t + 1 == self.end:
            jumps, values = self._of_all(self.trial.jumps, 1), self.trial.values
            left = self.trial.remaining(jumps, self._of_all(values.mean), self._of_all(values.squares))
            self.length *= self.trial.choice(left)
            self.trial = None

    def _free_stuck_chains(self, t: int, state: State) -> State:
        """Restart chains that have not moved for a third of the warm-up from the positions of chains that have."""
        third = max(LEAST_STUCK, self.end // 3)
        if (t + 1) % third:
            return state
        sizes = self._of_all(self.size)
        still = (self._of_all(self.rejected).cpu() >= third) | (sizes < NEGLIGIBLE * sizes.median())
        moving = [c for c in range(self.plan.chains) if not still[c]]
        if not moving or len(moving) == self.plan.chains:
            return state
        sources = list(range(self.plan.chains))
        for chain in (c for c in sources if still[c]):
            pick = torch.randint(len(moving), (), generator=stream(self.seed, "restart", chain, t))
            sources[chain] = moving[int(pick)]
            self.restarts.append(Restart(chain, t + 1, sources[chain]))
        own = torch.tensor(sources[self.own.start : self.own.stop])
        if len(self.dual.log_size) == self.chains:
            found = self.dual.tensors()
            self.dual.restore({k: self._of_all(v)[own] if v.ndim else v for k, v in found.items()})
            self.size = self.dual.size
        moved = State(*(self._of_all(part)[own.to(part.device)] for part in state))
        return moved._replace(momentum=state.momentum)

    # -- state ---------------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the rest of the run depends on."""
        found = {"size": self.size, "rejected": self.rejected}
        found |= {"pool.recent": self.pool.recent, "pool.limited": self.pool.limited}
        found["restarts"] = torch.tensor(self.restarts, dtype=torch.float64).reshape(-1, len(Restart._fields))
        # Always one value per chain, so that a run can resume with other chains per process.
        found |= {f"dual.{k}": v.expand(self.chains) if v.ndim else v for k, v in self.dual.tensors().items()}
        found |= self.mass.tensors()
        if self.plan.tuned:
            found["length"] = torch.tensor(self.length, dtype=torch.float64)
        if self.trial is not None:
            found |= {f"trial.{k}": v for k, v in self.trial.tensors().items()}
        return found

    def restore(self, tensors: dict[str, Tensor], done: int) -> None:
        """Restore the state that `tensors` returned after `done` iterations."""

        def below(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        device = self.target.device
        self.size, self.rejected = tensors["size"], tensors["rejected"].to(device)
        self.pool.recent, self.pool.limited = tensors["pool.recent"], tensors["pool.limited"]
        self.restarts = [Restart(*map(int, row)) for row in tensors["restarts"].tolist()]
        self.common = self.common_from <= done and self.plan.chains > 1
        kept = 1 if self.common_from <= done else self.chains
        self.dual.restore({k: v[:kept] if v.ndim else v for k, v in below("dual.").items()})
        self.mass.restore(tensors)
        if "length" in tensors:
            self.length = float(tensors["length"])
        if trial := below("trial."):
            self.trial = LengthTrial(self.chains, trial["jumps"].shape[-1], device)
            self.trial.restore(trial)

    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the chains."""
        if name in ("size", "rejected") or name.endswith((".mean", ".squares", ".begun")):
            return 0
        if name.startswith("dual.") and name != "dual.count":
            return 0
        return 1 if name == "trial.jumps" else self.mass.chain_axis(name)

    def _of_all(self, own: Tensor, axis: int = 0) -> Tensor:
        return self.mesh.all_chains(own, self.plan.chains, axis)
