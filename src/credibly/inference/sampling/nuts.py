"""The NUTS sampler: trajectories of all chains that end where they turn. It shares warm-up and records with HMC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.chain_noise import ChainNoise
from credibly.core.inputs import Tensors
from credibly.distributed.world import Mesh
from credibly.inference.kernels.hmc import DIVERGENT, Info, State, kinetic, refresh
from credibly.inference.kernels.nuts import Tree, transition, uniforms
from credibly.inference.sampling.hmc import HMCSampler
from credibly.inference.sampling.hmc_plan import HMCPlan
from credibly.inference.sampling.sampler import Stopped
from credibly.inference.target import Target

# A call may take this many times as long as other C++ calls, which take about 0.1 s: a trajectory is one call.
LONGER_CALLS = 20


class NUTSSampler(HMCSampler):
    """C chains of NUTS on one target.

    In C++ a transition of all chains is one call. Otherwise chains take their steps together in chunks, and a chain
    whose trajectory has ended waits for the others of its chunk.

    Args:
        target, plan, seed, mesh: as for HMC; the plan's trajectory length is not used.
        depth: maximum doublings of a trajectory.
    """

    names = ("acceptance", "divergent", "energy", "log_likelihood", "log_prior", "steps", "tree_depth")

    def __init__(self, target: Target, plan: HMCPlan, seed: int, mesh: Mesh, depth: int) -> None:
        super().__init__(target, plan, seed, mesh)
        self.depth = depth
        self.uniform = ChainNoise(
            seed, "tree", self.own, uniforms(depth), device=target.device, dtype=torch.float64, uniform=True
        )
        # Per chain: acceptance, divergences, divergences in warm-up, iterations, steps, doublings, trajectories at the
        # maximum depth.
        self.sums = torch.zeros(7, self.chains, dtype=torch.float64, device=target.device)

    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Draw a momentum, grow a trajectory, draw the next state from it; adapt during warm-up."""
        t, mass = self.done, self.adaptation.inverse_mass
        momentum = refresh(self.state.momentum, self.noise.at(t), mass, 1.0)
        current = self.state._replace(momentum=momentum)
        self.state, info, tree = self._grow(current, t, stop)
        self.steps = int(tree.steps.max())
        self.done += 1
        self._check_divergence(info.divergent, info.energy_error)
        if t < self.warmup:
            self.sums[2] += info.divergent
            self.state = self.adaptation.update(t, current.theta, self.state, info)
        else:
            ones = torch.ones_like(info.acceptance)
            rows = (info.acceptance, info.divergent, torch.zeros_like(ones), ones, tree.steps, tree.depth, tree.capped)
            self.sums += torch.stack([row.to(ones) for row in rows])
        return {
            "acceptance": info.acceptance,
            "divergent": info.divergent,
            "energy": info.energy,
            "log_likelihood": self.state.log_likelihood,
            "log_prior": self.state.log_prior,
            "steps": tree.steps,
            "tree_depth": tree.depth,
        }

    def prolong(self, draws: int, *, discard: bool) -> None:
        """Add draws; with `discard`, take twice as many iterations per draw."""
        if discard:
            self.begun = self.total = self.done
            self.thin *= 2
        self.total += draws * self.thin

    def _most_doublings(self, t: int) -> int:
        """Return the maximum depth of iteration t, which is lower until the mass has been estimated."""
        most = self.adaptation.most_steps(t) if t < self.warmup else self.max_steps
        return min(self.depth, (most + 1).bit_length() - 1)

    def _grow(self, current: State, t: int, stop: Callable[[], bool]) -> tuple[State, Info, Tree]:
        """Grow the trajectories of iteration t, chunk by chunk."""
        size = self.adaptation.size
        if self._placed[0] is not size:
            self._placed = size, size.to(self.target.device, self.target.dtype)
        mass, uniform, depth = self.adaptation.inverse_mass, self.uniform.at(t), self._most_doublings(t)
        if depth < self.depth:
            uniform = uniform[:, : uniforms(depth)]
        if self.target.backend.name == "cpp" and self._quick(depth):
            if stop():
                raise Stopped
            return self._grow_native(current, uniform, depth)
        found, taken = [], torch.zeros_like(self.gradients)
        for part in self.trajectories.slices:

            def take_step(at: Tensors, signed: Tensor, moving: Tensor, part: slice = part) -> State:
                steps = moving.long().tolist()
                # In lockstep, a chain that waits is evaluated with the others.
                taken[part] += torch.tensor(steps, dtype=torch.float64) if self.target.backend.fused else 1.0
                return self.trajectories.step(part, at, signed, mass, steps, stop)

            one = State(*(value[part] for value in current))
            with torch.no_grad():
                found.append(
                    transition(one, take_step, self._placed[1][part], mass, uniform[part], self.target.weights, depth)
                )
        self.gradients = self.gradients + self.plan.integrator.gradients * taken
        if len(found) == 1:
            return found[0]
        states, infos, trees = zip(*found)
        return (
            State(*(torch.cat(column) for column in zip(*states))),
            Info(*(torch.cat(column) for column in zip(*infos))),
            Tree(*(torch.cat(column) for column in zip(*trees))),
        )

    def _quick(self, depth: int) -> bool:
        """Return whether the longest trajectories of all chains in one call leave Ctrl-C responsive.

        It depends on the chains of the run, not on those of this process.
        """
        return bool(LONGER_CALLS * self.target.backend.trajectories.steps_per_call(self.plan.chains) >= 2**depth)

    def _grow_native(self, current: State, uniform: Tensor, depth: int) -> tuple[State, Info, Tree]:
        """Grow the trajectories in C++: one call, a chain per thread, and no chain waits for another."""
        start = (current.theta, current.momentum, current.gradient, current.log_likelihood)
        state = tuple(part.clone(memory_format=torch.contiguous_format) for part in start)
        size, mass = self._placed[1].contiguous(), self.adaptation.inverse_mass
        mass = mass.to(size).contiguous() if isinstance(mass, Tensor) else mass
        columns = self.target.backend.density.trees(state, size, mass, uniform, depth, DIVERGENT).T
        acceptance, moved, divergent, error, worst, doublings, steps, capped = columns.contiguous()
        theta, momentum, gradient, log_likelihood = state
        self.gradients = self.gradients + steps
        lik, prior = self.target.weights
        before = kinetic(current.momentum, mass) - lik * current.log_likelihood - prior * current.log_prior
        return (
            State(theta, gradient, log_likelihood, self.target.log_prior(theta), momentum),
            Info(acceptance, moved.bool(), divergent.bool(), before + error, worst),
            Tree(doublings, steps, capped.bool()),
        )

    def history(self) -> dict[str, Any]:
        """Return the values of HMC, with the depth of the trajectories instead of their length."""
        found = super().history()
        sums = self.of_all(self.sums, 1)
        count = sums[3].clamp(min=1)
        for name in ("trajectory_length", "trajectory_shortened"):
            del found[name]
        return {
            **found,
            "steps": (sums[4] / count).tolist(),
            "tree_depth": (sums[5] / count).tolist(),
            "max_depth": self.depth,
            "max_depth_reached": [int(n) for n in sums[6].tolist()],
        }
