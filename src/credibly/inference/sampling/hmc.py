"""The HMC sampler: trajectories of all chains and their Metropolis correction. `Warmup` adapts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.chain_noise import ChainNoise
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import SamplingError, StoreError
from credibly.gaussians.mass import CorrelatedMass
from credibly.inference.backend import Backend
from credibly.inference.kernels.hmc import State, metropolis, refresh
from credibly.inference.sampling.hmc_plan import HMCPlan
from credibly.inference.sampling.sampler import Sampler
from credibly.inference.sampling.starts import evaluate_start
from credibly.inference.sampling.trajectory import ChunkedTrajectories
from credibly.inference.sampling.warmup import Warmup
from credibly.inference.target import Target

# Steps per trajectory that compilation is planned for before the step size is known.
GUESSED_STEPS = 50
# Consecutive iterations in which every trajectory of every chain may diverge before the run raises.
PATIENCE = 10


class HMCSampler(Sampler):
    """C chains of HMC on one target, evaluated in chunks if they do not fit into memory together."""

    names: tuple[str, ...] = ("acceptance", "divergent", "energy", "log_likelihood", "log_prior")
    # The warm-up that adapts this sampler.
    warmup_kind: type[Warmup] = Warmup

    def __init__(self, target: Target, plan: HMCPlan, seed: int, mesh: Mesh) -> None:
        self.target, self.plan, self.seed, self.mesh = target, plan, seed, mesh
        self.own, self.warmup = mesh.chains(plan.chains), plan.warmup
        self.chains = len(self.own)
        # Draws are taken every `thin` iterations after the first `begun`.
        self.begun, self.thin, self.max_steps = self.warmup, plan.thin, plan.max_steps
        self.total = self.begun + plan.draws * self.thin
        target.select_backend(plan.compile)
        if target.backend.name == "cuda" and (plan.mass_blocks or isinstance(plan.inverse_mass, CorrelatedMass)):
            # The CUDA kernel has a diagonal mass only.
            target.backend = Backend("torch", plan.compile)
        steps = GUESSED_STEPS if plan.step_size is None else math.ceil(plan.length / plan.step_size)
        self.trajectories = ChunkedTrajectories(target, plan.integrator, self.chains, plan.chains, self.total * steps)
        self.noise = ChainNoise(seed, "momentum", self.own, target.dim, device=target.device, dtype=target.dtype)
        self.uniform = ChainNoise(seed, "accept", self.own, 1, device=target.device, dtype=torch.float64, uniform=True)
        self.adaptation = self.warmup_kind(target, plan, seed, mesh, self._one_step)
        self.state: State
        self._placed = (self.adaptation.size, self.adaptation.size.to(target.device, target.dtype))
        # Per chain: acceptance, divergences, divergences in warm-up, iterations.
        self.sums = torch.zeros(4, self.chains, dtype=torch.float64, device=target.device)
        # Gradients of each chain.
        self.gradients = torch.zeros(self.chains, dtype=torch.float64)
        # Consecutive iterations in which every chain diverged, and the longest trajectory of the last one, in steps.
        self.all_diverged = self.steps = 0

    # -- state ---------------------------------------------------------------------------------------------------------
    @property
    def theta(self) -> Tensor:  # type: ignore[override]
        """Current positions (C, D)."""
        return self.state.theta

    @property
    def truncates(self) -> bool:
        """Whether `max_steps` truncates long trajectories, which it does not if the step size is given."""
        return self.plan.step_size is None

    def start(self, theta: Tensor) -> None:
        """Evaluate the starting points and, unless the step size is given, search for a rough one."""
        log_lik, gradient, log_prior = evaluate_start(self.target, theta, self.trajectories.slices, self.own.start)
        self.state = State(theta, gradient, log_lik, log_prior, torch.zeros_like(theta))
        self.gradients += 1
        self.adaptation.begin()

    def tensors(self) -> dict[str, Tensor]:
        """Return state, counts and everything adapted."""
        found = {f"state.{k}": v for k, v in self.state._asdict().items()}
        found |= {"sums": self.sums, "evaluations": self.gradients}
        found["counts"] = torch.tensor([self.done, self.all_diverged], dtype=torch.float64)
        found["collapsed"] = torch.tensor(float(self.target.collapsed), dtype=torch.float64)
        planned = [self.begun, self.thin, self.max_steps, self.total]
        found["planned"] = torch.tensor(planned, dtype=torch.float64)
        return {**found, **self.adaptation.tensors()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        device = self.target.device
        if bool(tensors["collapsed"]) != self.target.collapsed:
            kind = "without the output layer" if tensors["collapsed"] else "with all weights"
            raise StoreError(
                f"collapse: the run was sampling {kind}, which is not the case on this device. Resume it on the kind "
                "of device that it was started on"
            )
        self.state = State(**{name: tensors[f"state.{name}"].to(device) for name in State._fields})
        self.sums, self.gradients = tensors["sums"].to(device), tensors["evaluations"]
        self.done, self.all_diverged = (int(count) for count in tensors["counts"].tolist())
        if "planned" in tensors:
            self.begun, self.thin, self.max_steps, self.total = (int(n) for n in tensors["planned"].tolist())
        self.adaptation.restore(tensors, self.done)

    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the chains."""
        if name.startswith("state.") or name == "evaluations":
            return 0
        return 1 if name == "sums" else self.adaptation.chain_axis(name)

    def of_all(self, own: Tensor, axis: int = 0) -> Tensor:
        """Gather a per-chain tensor from all processes."""
        return self.mesh.all_chains(own, self.plan.chains, axis)

    # -- one iteration -------------------------------------------------------------------------------------------------
    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Refresh the momentum, run a trajectory, accept or reject; adapt during warm-up."""
        t = self.done
        # The first iteration has no momentum to keep.
        fraction = self.plan.refresh if t else 1.0
        momentum = refresh(self.state.momentum, self.noise.at(t), self.adaptation.inverse_mass, fraction)
        current = self.state._replace(momentum=momentum)
        steps = self._steps(t)
        proposal = self._propose(current, steps, stop)
        uniform = self.uniform.at(t)[:, 0]
        self.state, info = metropolis(current, proposal, self.adaptation.inverse_mass, uniform, self.target.weights)
        self.steps = max(steps)
        # In lockstep, a chain with fewer steps is evaluated while it waits for the others.
        taken = torch.tensor(steps if self.target.backend.fused else [self.steps] * self.chains, dtype=torch.float64)
        self.gradients = self.gradients + self.plan.integrator.gradients * taken
        self.done += 1
        self._check_divergence(info.divergent, info.energy_error)
        if t < self.warmup:
            self.sums[2] += info.divergent
            self.adaptation.observe(t, current, proposal, info, steps)
            self.state = self.adaptation.update(t, current.theta, self.state, info)
        else:
            self.sums[0] += info.acceptance
            self.sums[1] += info.divergent
            self.sums[3] += 1
        return {
            "acceptance": info.acceptance,
            "divergent": info.divergent,
            "energy": info.energy,
            "log_likelihood": self.state.log_likelihood,
            "log_prior": self.state.log_prior,
        }

    def keeps(self) -> bool:
        """Return whether this is a `thin`-th iteration after warm-up."""
        return self.done > self.begun and (self.done - self.begun) % self.thin == 0

    def prolong(self, draws: int, *, discard: bool) -> None:
        """Add draws. With `discard`, double truncated trajectories in length, others in number per draw."""
        if discard:
            self.begun = self.total = self.done
            if self.truncates and self._shortened(self.adaptation.size):
                self.max_steps *= 2
            else:
                self.thin *= 2
        self.total += draws * self.thin

    def _shortened(self, sizes: Tensor) -> bool:
        """Return whether `max_steps` truncates the trajectories of some chain."""
        return bool((torch.ceil(self.adaptation.length / sizes - 1e-9) > self.max_steps).any())

    def _length(self, t: int) -> float:
        """Return the length of this trajectory; the jitter is the same for all chains."""
        length = self.adaptation.length
        if t < self.warmup:
            length *= self.adaptation.part
        if self.plan.jitter:
            uniform = torch.rand((), generator=stream(self.seed, "trajectory length", t), dtype=torch.float64)
            length = length * (1 + self.plan.jitter * (2 * float(uniform) - 1))
        return length

    def _steps(self, t: int) -> list[int]:
        """Return the steps of this trajectory per chain."""
        length = self._length(t)
        most: float = self.adaptation.most_steps(t) if t < self.warmup else self.max_steps
        if not self.truncates:
            most = math.inf
        return [int(min(most, max(1, math.ceil(length / size - 1e-9)))) for size in self.adaptation.size.tolist()]

    def _propose(self, current: State, steps: list[int], stop: Callable[[], bool]) -> State:
        """Run a trajectory; the step sizes are copied to the device only on change, because a copy waits for a GPU."""
        size = self.adaptation.size
        if self._placed[0] is not size:
            self._placed = size, size.to(self.target.device, self.target.dtype)
        return self.trajectories.propose(current, self._placed[1], self.adaptation.inverse_mass, steps, stop)

    def _one_step(self, size: Tensor, trial: int) -> Tensor:
        """Return the acceptance (C,) of a single step with sizes (C,) from the current positions."""
        device, dtype = self.target.device, self.target.dtype
        draws = []
        for c in self.own:
            generator = stream(self.seed, "step search", c, self.done, trial, device=device)
            draws.append(torch.randn(1, self.target.dim, generator=generator, device=device, dtype=dtype))
        mass = self.adaptation.inverse_mass
        current = self.state._replace(momentum=refresh(self.state.momentum, torch.cat(draws), mass, 1.0))
        proposal = self.trajectories.propose(current, size.to(device, dtype), mass, [1] * self.chains, None)
        self.gradients = self.gradients + self.plan.integrator.gradients
        uniform = torch.zeros(self.chains, device=device)
        return metropolis(current, proposal, mass, uniform, self.target.weights)[1].acceptance.cpu()

    def phase(self) -> tuple[str, int, int]:
        """Return the phase of the next iteration: its name, first iteration and end."""
        return self.adaptation.phase(self.done) if self.done < self.warmup else ("sampling", self.warmup, self.total)

    def _check_divergence(self, divergent: Tensor, error: Tensor) -> None:
        """Raise if every trajectory has diverged since the first one: such a run would never move."""
        if self.plan.step_size is None and self.done <= self.warmup:
            return
        since = self.done - (self.warmup if self.plan.step_size is None else 0)
        if since > PATIENCE:
            return
        self.all_diverged = self.all_diverged + 1 if bool(self.of_all(divergent).all()) else 0
        if self.all_diverged == PATIENCE:
            used = float(self.adaptation.size.max())
            hint = float(self.adaptation.search(torch.full_like(self.adaptation.dual.log_size, used / 4)).min())
            raise SamplingError(
                f"step_size: every trajectory diverged in the first {PATIENCE} iterations with step size {used:.3g} "
                f"(median energy error {float(error.median()):.3g} over {self.steps} steps). Try step_size={hint:.1g} "
                f"or less, or let warm-up find it with step_size=None and warmup={max(100, self.warmup)}"
            )

    # -- reporting -----------------------------------------------------------------------------------------------------
    def live_values(self) -> dict[str, float | str]:
        """Return phase, acceptance, divergences, step size and steps per trajectory."""
        counted = self.sums[3].max()
        shown: dict[str, float | str] = {"phase": self.phase()[0] if self.done < self.warmup else "sampling"}
        if counted:
            acceptance = float((self.sums[0] / counted).mean())
            shown |= {"accept": round(acceptance, 3), "divergent": str(int(self.sums[1].sum()))}
        return {**shown, "step size": float(self.adaptation.size.mean()), "steps": str(self.steps)}

    def report(self) -> dict[str, Any]:
        """Return draws, acceptance, divergences and step size per chain."""
        sums, sizes = self.of_all(self.sums, 1), self.of_all(self.adaptation.size)
        acceptance, divergent = (sums[0] / sums[3].clamp(min=1)).tolist(), sums[1].tolist()
        draws = max(0, self.done - self.begun) // self.thin
        return {
            "iteration": self.done,
            "of": self.total,
            "phase": self.phase()[0] if self.done < self.total else "done",
            "chains": [
                {"draws": draws, "acceptance": a, "divergences": int(d), "step_size": float(s)}
                for a, d, s in zip(acceptance, divergent, sizes)
            ],
        }

    def history(self) -> dict[str, Any]:
        """Return phases, step sizes, acceptance, divergences and how the chains were evaluated."""
        sums, sizes = self.of_all(self.sums, 1), self.of_all(self.adaptation.size)
        most = self.max_steps
        wanted = torch.ceil(self.adaptation.length / sizes - 1e-9)
        phases = [*self.adaptation.phases, ("sampling", self.warmup, self.total)]
        return {
            "phases": [{"name": name, "first": first, "end": end} for name, first, end in phases],
            "step_size": sizes.tolist(),
            "trajectory_length": self.adaptation.length,
            "steps": int(wanted.clamp(max=most).max()) if self.truncates else int(wanted.max()),
            "trajectory_shortened": self.truncates and bool((wanted > most).any()),
            "mass": self.adaptation.mass.history(),
            "inverse_mass_range": self.adaptation.mass.range(),
            "acceptance": (sums[0] / sums[3].clamp(min=1)).tolist(),
            "divergences": [int(d) for d in sums[1].tolist()],
            "warmup_divergences": [int(d) for d in sums[2].tolist()],
            "restarted": [restart._asdict() for restart in self.adaptation.restarts],
            "gradients": int(self.of_all(self.gradients).sum()),
            "chains_at_once": self.trajectories.largest,
            "mesh": list(self.mesh.shape),
            "one_piece": self.target.whole(self.trajectories.largest),
            "compiled": self.trajectories.compiled,
            "native": self.target.backend.fused,
            "collapsed": self.target.collapsed,
            "cuda_graph": self.trajectories.graphed,
            "plan": f"{'looped' if self.target.looped else 'batched'}: {self.target.reason}",
        }
