"""The HMC sampler: trajectories of all chains, Metropolis correction, and adaptation during warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credibly.core.chain_noise import ChainNoise
from credibly.core.compilation import Compile
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import SamplingError
from credibly.inference.adaptation import DualAveraging, LengthTrial, Welford, search_step_size, windows
from credibly.inference.kernels.hmc import Integrator, State, metropolis, refresh
from credibly.inference.sampling.sampler import Sampler
from credibly.inference.sampling.starts import evaluate_start
from credibly.inference.sampling.trajectory import ChunkedTrajectories
from credibly.inference.target import Target

# Steps per trajectory that compilation is planned for before the step size is known.
GUESSED_STEPS = 50
# Iterations in which every trajectory of every chain may diverge before the run gives up.
PATIENCE = 10


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


class HMCSampler(Sampler):
    """C chains of HMC on one target, in chunks of chains where they do not fit into memory together."""

    names = ("acceptance", "divergent", "energy", "log_likelihood", "log_prior")

    def __init__(self, target: Target, plan: HMCPlan, seed: int, mesh: Mesh) -> None:
        self.target, self.plan, self.seed, self.mesh = target, plan, seed, mesh
        self.own, self.warmup = mesh.chains(plan.chains), plan.warmup
        self.chains = len(self.own)
        self.total = self.warmup + plan.draws * plan.thin
        target.select_backend(plan.compile)
        steps = GUESSED_STEPS if plan.step_size is None else math.ceil(plan.length / plan.step_size)
        self.trajectories = ChunkedTrajectories(target, plan.integrator, self.chains, plan.chains, self.total * steps)
        self.noise = ChainNoise(seed, "momentum", self.own, target.dim, device=target.device, dtype=target.dtype)
        self.uniform = ChainNoise(seed, "accept", self.own, 1, device=target.device, dtype=torch.float64, uniform=True)
        self.phases = windows(self.warmup, plan.mass == "diagonal")
        self.state: State
        self.length, self.inverse_mass = plan.length, plan.inverse_mass
        self.size = torch.full((self.chains,), plan.step_size or 0.0, dtype=torch.float64)
        self._placed = (self.size, self.size.to(target.device, target.dtype))
        self.dual = DualAveraging(torch.ones(1 if plan.pooled else self.chains), plan.target_accept)
        self.welford = Welford(self.chains, target.dim, target.device)
        self.trial: LengthTrial | None = None
        # Per chain: acceptance, divergences, divergences in warm-up, iterations.
        self.sums = torch.zeros(4, self.chains, dtype=torch.float64, device=target.device)
        # Consecutive iterations in which every chain diverged, steps of the last trajectory, gradients in total.
        self.lost = self.steps = self.gradients = 0

    # -- state ---------------------------------------------------------------------------------------------------------
    @property
    def theta(self) -> Tensor:  # type: ignore[override]
        """Current positions (C, D)."""
        return self.state.theta

    def start(self, theta: Tensor) -> None:
        """Evaluate the starting points and, unless the step size is given, search for a rough one."""
        log_lik, gradient, log_prior = evaluate_start(self.target, theta, self.trajectories.slices, self.own.start)
        self.state = State(theta, gradient, log_lik, log_prior, torch.zeros_like(theta))
        self.gradients += self.plan.chains
        if self.plan.step_size is None:
            self._restart(self._search(torch.full_like(self.dual.log_size, self.plan.first_step_size)))

    def tensors(self) -> dict[str, Tensor]:
        """Return state, step sizes, mass, adaptation and counts."""
        counts = torch.tensor([self.done, self.lost, self.gradients], dtype=torch.float64)
        found = {**{f"state.{k}": v for k, v in self.state._asdict().items()}, "size": self.size, "sums": self.sums}
        found["counts"] = counts
        if self.inverse_mass is not None:
            found["inverse_mass"] = self.inverse_mass
        found |= {f"dual.{k}": v for k, v in self.dual.tensors().items()}
        if self.trial is not None:
            found |= {f"trial.{k}": v for k, v in self.trial.tensors().items()}
        if self.plan.tuned:
            found["length"] = torch.tensor(self.length, dtype=torch.float64)
        if self.phase()[0] == "mass":
            found |= {f"welford.{k}": v for k, v in self.welford.tensors().items()}
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""

        def below(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        device = self.target.device
        self.state = State(**{k: v.to(device) for k, v in below("state.").items()})
        self.size, self.sums = tensors["size"], tensors["sums"].to(device)
        self.done, self.lost, self.gradients = (int(count) for count in tensors["counts"].tolist())
        if "inverse_mass" in tensors:
            self.inverse_mass = tensors["inverse_mass"].to(device)
        self.dual.restore(below("dual."))
        if "length" in tensors:
            self.length = float(tensors["length"])
        if trial := below("trial."):
            self.trial = LengthTrial(self.chains, trial["jumps"].shape[-1], device)
            self.trial.restore(trial)
        if welford := below("welford."):
            self.welford.restore(welford)

    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the chains."""
        if name.startswith("state.") or name == "size" or name.endswith((".mean", ".squares", ".begun")):
            return 0
        if name.startswith("dual.") and name != "dual.count":
            return None if self.plan.pooled else 0
        return 1 if name in ("sums", "trial.jumps") else None

    def of_all(self, own: Tensor, axis: int = 0) -> Tensor:
        """Gather a per-chain tensor from all processes."""
        return self.mesh.all_chains(own, self.plan.chains, axis)

    # -- one iteration -------------------------------------------------------------------------------------------------
    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Refresh the momentum, run a trajectory, accept or reject; adapt during warm-up."""
        t = self.done
        # There is no momentum to keep in the first iteration.
        fraction = self.plan.refresh if t else 1.0
        momentum = refresh(self.state.momentum, self.noise.at(t), self.inverse_mass, fraction)
        current = self.state._replace(momentum=momentum)
        steps = self._steps(t)
        proposal = self._propose(current, steps, stop)
        self.state, info = metropolis(
            current, proposal, self.inverse_mass, self.uniform.at(t)[:, 0], self.target.weights
        )
        self.steps = max(steps)
        self.gradients += self.steps * self.plan.integrator.gradients * self.plan.chains
        self.done += 1
        self._check_divergence(info.divergent, info.energy_error)
        if t < self.warmup:
            self.sums[2] += info.divergent
            if self.plan.tuned:
                self._try_lengths(t, current.theta)
            self._adapt(t, info.acceptance)
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
        return self.done > self.warmup and (self.done - self.warmup) % self.plan.thin == 0

    def _steps(self, t: int) -> list[int]:
        """Return the steps of this trajectory per chain; the jitter is the same for all chains."""
        length = self.length
        if self.plan.tuned and t < self.warmup:
            length *= 0.25 if self.trial is None else self.trial.part
        if self.plan.jitter:
            uniform = torch.rand((), generator=stream(self.seed, "trajectory length", t), dtype=torch.float64)
            length = length * (1 + self.plan.jitter * (2 * float(uniform) - 1))
        most = self.plan.max_steps if self.plan.step_size is None else math.inf
        return [int(min(most, max(1, math.ceil(length / size - 1e-9)))) for size in self.size.tolist()]

    def _propose(self, current: State, steps: list[int], stop: Callable[[], bool] | None) -> State:
        return self.trajectories.propose(current, self._sizes(), self.inverse_mass, steps, stop)

    def _sizes(self) -> Tensor:
        """Return the step sizes on the target's device, copied only on change: a copy waits for the GPU."""
        if self._placed[0] is not self.size:
            self._placed = self.size, self.size.to(self.target.device, self.target.dtype)
        return self._placed[1]

    # -- adaptation ----------------------------------------------------------------------------------------------------
    def phase(self) -> tuple[str, int, int]:
        """Return the phase of the next iteration: its name, first iteration and end."""
        for phase in self.phases:
            if phase[1] <= self.done < phase[2]:
                return phase
        return ("sampling", self.warmup, self.total)

    def _adapt(self, t: int, acceptance: Tensor) -> None:
        name, _, end = next(p for p in self.phases if p[1] <= t < p[2])
        if self.plan.step_size is None:
            self.dual.update(self._pooled(acceptance))
            self.size = self.dual.size.expand(self.chains).clone()
        if name == "mass":
            self.welford.update(self.state.theta)
            if t + 1 == end:
                squares = self.of_all(self.welford.squares)
                self.inverse_mass = self.welford.variance(self.target.scale**2, squares).to(self.target.dtype)
                self.welford = Welford(self.chains, self.target.dim, self.target.device)
                if self.plan.step_size is None:
                    self._restart(self._search(self.dual.final))
        if t + 1 == self.warmup and self.plan.step_size is None:
            self.size = self.dual.final.expand(self.chains).clone()

    def _pooled(self, acceptance: Tensor) -> Tensor:
        """Return the mean acceptance of all chains (1,) for a pooled step size, else that of each chain (C,)."""
        return self.of_all(acceptance).mean(0, keepdim=True) if self.plan.pooled else acceptance

    def _try_lengths(self, t: int, before: Tensor) -> None:
        """Try trajectory lengths in turn once the mass is final; the last iteration of warm-up chooses."""
        masses = [end for name, _, end in self.phases if name == "mass"]
        if self.trial is not None:
            self.trial.update(self.target.features(before), self.target.features(self.state.theta))
        elif t + 1 == (masses[-1] if masses else self.warmup // 3):
            self.trial = LengthTrial(self.chains, self.target.features(before).shape[1], self.target.device)
        if self.trial is not None and t + 1 == self.warmup:
            jumps, values = self.of_all(self.trial.jumps, 1), self.trial.values
            left = self.trial.left(jumps, self.of_all(values.mean), self.of_all(values.squares))
            self.length *= self.trial.choice(left)
            self.trial = None

    def _restart(self, size: Tensor) -> None:
        self.dual.restart(size)
        self.size = self.dual.size.expand(self.chains).clone()

    def _search(self, size: Tensor) -> Tensor:
        """Return a rough step size for all chains (1,), or one for each (C,), independent of the others."""
        return search_step_size(
            lambda sizes, trial: self._pooled(self._one_step(sizes.expand(self.chains), trial)),
            size,
            self.plan.target_accept,
        )

    def _one_step(self, size: Tensor, trial: int) -> Tensor:
        """Return the acceptance (C,) of a single step of the sizes (C,) from the current positions."""
        device, dtype = self.target.device, self.target.dtype
        draws = []
        for c in self.own:
            generator = stream(self.seed, "step search", c, self.done, trial, device=device)
            draws.append(torch.randn(1, self.target.dim, generator=generator, device=device, dtype=dtype))
        noise = torch.cat(draws)
        current = self.state._replace(momentum=refresh(self.state.momentum, noise, self.inverse_mass, 1.0))
        before, self.size = self.size, size
        proposal = self._propose(current, [1] * self.chains, None)
        self.size = before
        self.gradients += self.plan.integrator.gradients * self.plan.chains
        uniform = torch.zeros(self.chains, device=device)
        return metropolis(current, proposal, self.inverse_mass, uniform, self.target.weights)[1].acceptance.cpu()

    def _check_divergence(self, divergent: Tensor, error: Tensor) -> None:
        """Raise if every trajectory diverges from the first one on: such a run would never move."""
        if self.plan.step_size is None and self.done <= self.warmup:
            return
        since = self.done - (self.warmup if self.plan.step_size is None else 0)
        if since > PATIENCE:
            return
        self.lost = self.lost + 1 if bool(self.of_all(divergent).all()) else 0
        if self.lost == PATIENCE:
            used = float(self.size.max())
            hint = float(self._search(torch.full_like(self.dual.log_size, used / 4)).min())
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
        return {**shown, "step size": float(self.size.mean()), "steps": str(self.steps)}

    def report(self) -> dict[str, Any]:
        """Return draws, acceptance, divergences and step size per chain."""
        sums, sizes = self.of_all(self.sums, 1), self.of_all(self.size)
        acceptance, divergent = (sums[0] / sums[3].clamp(min=1)).tolist(), sums[1].tolist()
        draws = max(0, self.done - self.warmup) // self.plan.thin
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
        sums, sizes = self.of_all(self.sums, 1), self.of_all(self.size)
        adapted, most = self.plan.step_size is None, self.plan.max_steps
        wanted = torch.ceil(self.length / sizes - 1e-9)
        mass = self.inverse_mass
        phases = [*self.phases, ("sampling", self.warmup, self.total)]
        return {
            "phases": [{"name": name, "first": first, "end": end} for name, first, end in phases],
            "step_size": sizes.tolist(),
            "trajectory_length": self.length,
            "steps": int(wanted.clamp(max=most).max()) if adapted else int(wanted.max()),
            "trajectory_shortened": adapted and bool((wanted > most).any()),
            "mass": self.plan.mass,
            "inverse_mass_range": None if mass is None else [float(mass.min()), float(mass.max())],
            "acceptance": (sums[0] / sums[3].clamp(min=1)).tolist(),
            "divergences": [int(d) for d in sums[1].tolist()],
            "warmup_divergences": [int(d) for d in sums[2].tolist()],
            "gradients": self.gradients,
            "chains_at_once": self.trajectories.largest,
            "mesh": list(self.mesh.shape),
            "one_piece": self.target.whole(self.trajectories.largest),
            "compiled": self.trajectories.compiled,
            "native": self.target.backend.fused,
            "cuda_graph": self.trajectories.graphed,
            "plan": f"{'looped' if self.target.looped else 'batched'}: {self.target.reason}",
        }
