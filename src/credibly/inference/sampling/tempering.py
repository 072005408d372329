"""The sampler of parallel tempering: ladders of HMC replicas at K temperatures that exchange their positions.

All replicas of all ladders are one computation of C x K chains. An iteration is a trajectory of every replica and then
a proposal to exchange neighbours. Trajectories have the same number of steps at every temperature, so no replica waits
for another; at high temperatures, where the density is wider, larger steps make them longer. The draws of a
ladder are the positions at its lowest temperature, that of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.chain_noise import ChainNoise
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import SamplingError
from credibly.inference.kernels.hmc import State, metropolis, refresh
from credibly.inference.kernels.tempering import exchange, exchange_probability
from credibly.inference.sampling.hmc import GUESSED_STEPS, PATIENCE
from credibly.inference.sampling.hmc_plan import HMCPlan
from credibly.inference.sampling.sampler import Sampler
from credibly.inference.sampling.starts import evaluate_start
from credibly.inference.sampling.tempered_target import TemperedTarget
from credibly.inference.sampling.tempering_warmup import Spacing, TemperingWarmup
from credibly.inference.sampling.trajectory import ChunkedTrajectories
from credibly.inference.sampling.warmup import UNSCALED_STEPS
from credibly.inference.target import Target


class TemperingSampler(Sampler):
    """C ladders of K replicas on one target. Row c K + k of the state is replica k of ladder c.

    Args:
        target: the density at the problem's own temperature.
        plan: plan of the trajectories; its chains are the ladders.
        beta: inverse temperatures (K,), decreasing from 1.
        spacing: whether and how warm-up adapts their spacing.
        seed, mesh: of the run.
    """

    names = ("acceptance", "divergent", "energy", "log_likelihood", "log_prior", "swapped")

    def __init__(self, target: Target, plan: HMCPlan, beta: Tensor, spacing: Spacing, seed: int, mesh: Mesh) -> None:
        self.target, self.plan, self.seed, self.mesh = target, plan, seed, mesh
        self.own, self.warmup, self.count = mesh.chains(plan.chains), plan.warmup, len(beta)
        self.chains = len(self.own)
        self.rows = range(self.own.start * self.count, self.own.stop * self.count)
        self.begun, self.thin, self.max_steps = self.warmup, plan.thin, plan.max_steps
        self.total = self.begun + plan.draws * self.thin
        self.tempered = TemperedTarget(target, len(self.rows))
        self.tempered.select_backend(plan.compile)
        everyone, steps = plan.chains * self.count, self.total * GUESSED_STEPS
        self.trajectories = ChunkedTrajectories(self.tempered, plan.integrator, len(self.rows), everyone, steps)
        device, dtype = target.device, target.dtype
        self.noise = ChainNoise(seed, "momentum", self.rows, target.dim, device=device, dtype=dtype)
        self.uniform = ChainNoise(seed, "accept", self.rows, 1, device=device, dtype=torch.float64, uniform=True)
        self.coins = ChainNoise(
            seed, "swap", self.own, self.count - 1, device=device, dtype=torch.float64, uniform=True
        )
        self.adaptation = TemperingWarmup(target, plan, mesh, beta, spacing, self._one_step)
        self.tempered.set_beta(beta.repeat(self.chains))
        self.state: State
        # Whether a position has been at the highest temperature since it was last at the lowest, (C, K).
        self.returning = torch.zeros(self.chains, self.count, dtype=torch.bool, device=device)
        # Sums after warm-up, (C, K): acceptance, divergences, and (C, K-1) rejections of exchanges.
        self.accepted = torch.zeros(self.chains, self.count, dtype=torch.float64, device=device)
        self.divergent = torch.zeros_like(self.accepted)
        self.rejected = torch.zeros(self.chains, self.count - 1, dtype=torch.float64, device=device)
        # Per ladder: round trips after warm-up, divergences of its coldest replica in warm-up.
        self.trips = torch.zeros(self.chains, dtype=torch.float64, device=device)
        self.early = torch.zeros_like(self.trips)
        # Iterations after warm-up, gradients of each replica, steps of the last trajectory, and consecutive iterations
        # in which all trajectories at the lowest temperature diverged.
        self.counted = self.gradients = self.steps = self.all_diverged = 0

    # -- state ---------------------------------------------------------------------------------------------------------
    @property
    def theta(self) -> Tensor:  # type: ignore[override]
        """Current positions at the lowest temperature, (C, D)."""
        return self.state.theta[:: self.count]

    def start(self, theta: Tensor) -> None:
        """Start all replicas of a ladder at its starting point, and search for rough step sizes."""
        most = self.target.chains_at_once(self.chains)
        slices = [slice(a, min(a + most, self.chains)) for a in range(0, self.chains, most)]
        log_lik, gradient, log_prior = evaluate_start(self.target, theta, slices, self.own.start)
        found = (theta, gradient, log_lik, log_prior, torch.zeros_like(theta))
        state = State(*(part.repeat_interleave(self.count, 0) for part in found))
        gradient = self.tempered.at_other_beta(state.theta, state.gradient, self.tempered.beta)
        self.state = state._replace(gradient=gradient)
        self.adaptation.begin()

    def tensors(self) -> dict[str, Tensor]:
        """Return state, counts and everything adapted; the first axis of per-replica tensors runs over the ladders."""
        found = {f"state.{k}": self._by_ladder(v) for k, v in self.state._asdict().items()}
        for name in ("returning", "accepted", "divergent", "rejected", "trips", "early"):
            found[f"ladder.{name}"] = getattr(self, name)
        counts = [self.done, self.counted, self.gradients, self.steps, self.all_diverged]
        found["counts"] = torch.tensor(counts, dtype=torch.float64)
        planned = [self.begun, self.thin, self.max_steps, self.total]
        found["planned"] = torch.tensor(planned, dtype=torch.float64)
        return {**found, **self.adaptation.tensors()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        device = self.target.device
        self.state = State(**{k: tensors[f"state.{k}"].to(device).flatten(0, 1) for k in State._fields})
        for name in ("returning", "accepted", "divergent", "rejected", "trips", "early"):
            setattr(self, name, tensors[f"ladder.{name}"].to(device))
        self.done, self.counted, self.gradients, self.steps, self.all_diverged = (
            int(n) for n in tensors["counts"].tolist()
        )
        self.begun, self.thin, self.max_steps, self.total = (int(n) for n in tensors["planned"].tolist())
        self.adaptation.restore(tensors)
        self.tempered.set_beta(self.adaptation.beta.repeat(self.chains))

    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the ladders."""
        return 0 if name.startswith(("state.", "ladder.")) else self.adaptation.chain_axis(name)

    def _by_ladder(self, values: Tensor) -> Tensor:
        """Return a per-row tensor (C K, ...) as (C, K, ...)."""
        return values.reshape(self.chains, self.count, *values.shape[1:])

    def _of_all(self, own: Tensor) -> Tensor:
        return self.mesh.all_chains(own, self.plan.chains)

    # -- one iteration -------------------------------------------------------------------------------------------------
    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Run a trajectory of every replica, then exchange neighbours; adapt during warm-up."""
        t, mass = self.done, self.adaptation.inverse_mass
        fraction = self.plan.refresh if t else 1.0
        current = self.state._replace(momentum=refresh(self.state.momentum, self.noise.at(t), mass, fraction))
        steps = self._steps(t)
        proposal = self._propose(current, self.adaptation.size, steps, stop)
        self.state, info = metropolis(current, proposal, mass, self.uniform.at(t)[:, 0], self.tempered.row_weights)
        self.steps, self.done = steps, t + 1
        self.gradients += self.plan.integrator.gradients * steps
        acceptance, divergent = self._by_ladder(info.acceptance), self._by_ladder(info.divergent)
        order, rejection = self._exchange(t)
        if t < self.warmup:
            self.early += divergent[:, 0]
            cold = self.state.theta[:: self.count], self.state.gradient[:: self.count]
            if self.adaptation.update(t, *cold, acceptance, rejection):
                self._set_ladder()
        else:
            self._check_divergence(divergent[:, 0])
            self.counted += 1
            self.accepted += acceptance
            self.divergent += divergent
            self.rejected += rejection
        return {
            "acceptance": acceptance[:, 0],
            "divergent": divergent[:, 0],
            "energy": self._by_ladder(info.energy)[:, 0],
            "log_likelihood": self.state.log_likelihood[:: self.count],
            "log_prior": self.state.log_prior[:: self.count],
            "swapped": order[:, 0],
        }

    def _exchange(self, t: int) -> tuple[Tensor, Tensor]:
        """Exchange positions between neighbours.

        Return the replica whose position each temperature now has, (C, K), and the rejections (C, K-1) of all
        pairs, proposed or not. Momenta do not depend on positions and stay where they are.
        """
        beta = self.adaptation.beta.to(self.target.device)
        log_lik = self.target.weights[0] * self._by_ladder(self.state.log_likelihood)
        probability = exchange_probability(log_lik, beta)
        order = exchange(probability, self.coins.at(t), t)
        first = torch.arange(self.chains, device=order.device).unsqueeze(1) * self.count
        source = (first + order).flatten()
        moved = State(*(part[source] for part in self.state))
        gradient = self.tempered.at_other_beta(moved.theta, moved.gradient, (beta / beta[order]).flatten())
        self.state = moved._replace(gradient=gradient, momentum=self.state.momentum)
        self.returning = self.returning.gather(1, order)
        self.returning[:, -1] = True
        if t >= self.warmup:
            self.trips += self.returning[:, 0]
        self.returning[:, 0] = False
        return order, 1 - probability

    def _set_ladder(self) -> None:
        """Use the current temperatures of the adaptation, and rescale the gradients to them."""
        before, beta = self.tempered.beta, self.adaptation.beta.repeat(self.chains).to(self.target.device)
        gradient = self.tempered.at_other_beta(self.state.theta, self.state.gradient, beta / before)
        self.state = self.state._replace(gradient=gradient)
        self.tempered.set_beta(beta)

    def _steps(self, t: int) -> int:
        """Return the steps of this trajectory: those that the lowest temperature needs for the trajectory length."""
        length, most = self.plan.length, self._most_steps
        if self.plan.jitter:
            uniform = torch.rand((), generator=stream(self.seed, "trajectory length", t), dtype=torch.float64)
            length *= 1 + self.plan.jitter * (2 * float(uniform) - 1)
        if t < self.warmup and self.adaptation.learns_mass and t < self.adaptation.phases[0][2]:
            most = min(most, UNSCALED_STEPS)
        return int(min(most, max(1, math.ceil(length / float(self.adaptation.size[0]) - 1e-9))))

    def _propose(self, current: State, sizes: Tensor, steps: int, stop: Callable[[], bool] | None) -> State:
        """Return the end points of trajectories with step sizes (K,)."""
        placed = sizes.to(self.target.device, self.target.dtype).repeat(self.chains)
        mass = self.adaptation.inverse_mass
        return self.trajectories.propose(current, placed, mass, [steps] * len(self.rows), stop)

    def _one_step(self, sizes: Tensor, trial: int) -> Tensor:
        """Return the acceptance (C, K) of a single step with sizes (K,) from the current positions."""
        device, dtype = self.target.device, self.target.dtype
        draws = []
        for row in self.rows:
            generator = stream(self.seed, "step search", row, self.done, trial, device=device)
            draws.append(torch.randn(1, self.target.dim, generator=generator, device=device, dtype=dtype))
        mass = self.adaptation.inverse_mass
        current = self.state._replace(momentum=refresh(self.state.momentum, torch.cat(draws), mass, 1.0))
        proposal = self._propose(current, sizes, 1, None)
        self.gradients += self.plan.integrator.gradients
        uniform = torch.zeros(len(self.rows), device=device)
        info = metropolis(current, proposal, mass, uniform, self.tempered.row_weights)[1]
        return self._by_ladder(info.acceptance).cpu()

    def _check_divergence(self, divergent: Tensor) -> None:
        """Raise if every trajectory at the lowest temperature has diverged since warm-up ended."""
        if self.counted >= PATIENCE:
            return
        self.all_diverged = self.all_diverged + 1 if bool(self._of_all(divergent).all()) else 0
        if self.all_diverged == PATIENCE:
            raise SamplingError(
                f"step_size: every trajectory diverged in the first {PATIENCE} iterations after warm-up with step size "
                f"{float(self.adaptation.size[0]):.3g}. Pass a smaller step_size, or None and more than {self.warmup} "
                "iterations, or another init"
            )

    # -- the run -------------------------------------------------------------------------------------------------------
    def keeps(self) -> bool:
        """Return whether this is a `thin`-th iteration after warm-up."""
        return self.done > self.begun and (self.done - self.begun) % self.thin == 0

    def prolong(self, draws: int, *, discard: bool) -> None:
        """Add draws. With `discard`, double truncated trajectories in length, others in number per draw."""
        if discard:
            self.begun = self.total = self.done
            if self._wanted > self._most_steps:
                self.max_steps *= 2
            else:
                self.thin *= 2
        self.total += draws * self.thin

    @property
    def _most_steps(self) -> float:
        """Maximum steps of a trajectory; no limit if the step size is given."""
        return self.max_steps if self.plan.step_size is None else math.inf

    @property
    def _wanted(self) -> int:
        """Number of steps of a full-length trajectory."""
        return math.ceil(self.plan.length / float(self.adaptation.size[0]) - 1e-9)

    def phase(self) -> tuple[str, int, int]:
        """Return the phase of the next iteration: its name, first iteration and end."""
        return self.adaptation.phase(self.done) if self.done < self.warmup else ("sampling", self.warmup, self.total)

    # -- reporting -----------------------------------------------------------------------------------------------------
    def live_values(self) -> dict[str, float | str]:
        """Return phase, acceptance, swaps, round trips, step size and steps per trajectory."""
        shown: dict[str, float | str] = {"phase": self.phase()[0]}
        if self.counted:
            shown["accept"] = round(float(self.accepted[:, 0].mean()) / self.counted, 3)
            shown["swaps"] = round(1 - float(self.rejected.mean()) / self.counted, 3)
            shown["round trips"] = str(int(self.trips.sum()))
            shown["divergent"] = str(int(self.divergent[:, 0].sum()))
        return {**shown, "step size": float(self.adaptation.size[0]), "steps": str(self.steps)}

    def report(self) -> dict[str, Any]:
        """Return draws, acceptance, divergences and step size per ladder, at the lowest temperature."""
        acceptance = (self._of_all(self.accepted)[:, 0] / max(1, self.counted)).tolist()
        divergent, size = self._of_all(self.divergent)[:, 0].tolist(), float(self.adaptation.size[0])
        draws = max(0, self.done - self.begun) // self.thin
        return {
            "iteration": self.done,
            "of": self.total,
            "phase": self.phase()[0] if self.done < self.total else "done",
            "chains": [
                {"draws": draws, "acceptance": a, "divergences": int(d), "step_size": size}
                for a, d in zip(acceptance, divergent)
            ],
        }

    def history(self) -> dict[str, Any]:
        """Return ladder, exchanges and round trips, phases, step sizes, and how the chains were evaluated."""
        count, mass = max(1, self.counted), self.adaptation.inverse_mass
        rejected = self._of_all(self.rejected).mean(0) / count
        accepted, divergent = self._of_all(self.accepted), self._of_all(self.divergent)
        phases = [*self.adaptation.phases, ("sampling", self.warmup, self.total)]
        return {
            "phases": [{"name": name, "first": first, "end": end} for name, first, end in phases],
            "temperatures": (1 / self.adaptation.beta).tolist(),
            "swap_acceptance": (1 - rejected).tolist(),
            "communication_barrier": float(rejected.sum()),
            "round_trips": [int(n) for n in self._of_all(self.trips).tolist()],
            "iterations": self.counted,
            "step_size": self.adaptation.size.tolist(),
            "trajectory_length": self.plan.length,
            "steps": int(min(self._wanted, self._most_steps)),
            "trajectory_shortened": self._wanted > self._most_steps,
            "mass": self.plan.mass,
            "inverse_mass_range": None if mass is None else [float(mass.min()), float(mass.max())],
            "acceptance": (accepted[:, 0] / count).tolist(),
            "acceptance_by_temperature": (accepted.mean(0) / count).tolist(),
            "divergences": [int(d) for d in divergent[:, 0].tolist()],
            "divergences_by_temperature": [int(d) for d in divergent.sum(0).tolist()],
            "warmup_divergences": [int(d) for d in self._of_all(self.early).tolist()],
            # All replicas of a ladder share the one at their starting point.
            "gradients": (self.gradients * self.count + 1) * self.plan.chains,
            "chains_at_once": self.trajectories.largest,
            "mesh": list(self.mesh.shape),
            "one_piece": self.target.whole(self.trajectories.largest),
            "compiled": self.trajectories.compiled,
            "native": self.target.backend.fused,
            "cuda_graph": self.trajectories.graphed,
            "plan": f"{'looped' if self.target.looped else 'batched'}: {self.target.reason}",
        }
