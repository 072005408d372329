"""The MCLMC sampler: microcanonical Langevin dynamics of all chains, with or without a Metropolis correction.

An iteration is a path of L / eps steps. Unadjusted, the direction is partly refreshed after every step and the end of
the path is the next state. Adjusted, a path starts in a random direction, follows the dynamics without noise, and is
accepted with probability min(1, exp(-energy error)). All chains have the same step size and length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.paths import follow as follow_paths
from credibly.core.chain_noise import ChainNoise
from credibly.core.rng import stream, stream_seed
from credibly.core.threads import one_thread
from credibly.distributed.world import Mesh
from credibly.errors import SamplingError
from credibly.inference.adaptation import Welford
from credibly.inference.kernels.hmc import DIVERGENT, State
from credibly.inference.kernels.mclmc import isokinetic, refresh_partly, refreshed_part, unit
from credibly.inference.sampling.mclmc_check import compare, iterations
from credibly.inference.sampling.mclmc_plan import MCLMCAdaptation, MCLMCPlan
from credibly.inference.sampling.sampler import Sampler, Stopped
from credibly.inference.sampling.starts import evaluate_start
from credibly.inference.sampling.trajectory import WORTH_SHARING, even_chunk
from credibly.inference.target import Target

# Relative variation of the length of adjusted paths, which breaks up periodic orbits.
JITTER = 0.2
# Consecutive iterations in which every chain may diverge before the run raises.
PATIENCE = 10
# Steps tried in the search for a rough step size.
TRIALS = 60


class MCLMCSampler(Sampler):
    """C chains of MCLMC on one target."""

    def __init__(self, target: Target, plan: MCLMCPlan, seed: int, mesh: Mesh) -> None:
        self.target, self.plan, self.seed, self.mesh = target, plan, seed, mesh
        self.own, self.warmup = mesh.chains(plan.chains), plan.warmup
        self.chains = len(self.own)
        self.names = ("divergent", "energy_error", "log_likelihood", "log_prior")
        if plan.adjusted:
            self.names = ("acceptance", *self.names)
        self.begun, self.thin = plan.warmup, plan.thin
        self.total = self.begun + plan.draws * self.thin
        target.select_backend(plan.compile)
        length = even_chunk(self.chains, target.chains_at_once(self.chains))
        self.slices = [slice(a, min(a + length, self.chains)) for a in range(0, self.chains, length)]
        self.single_thread = target.device.type == "cpu" and target.work(self.chains) < WORTH_SHARING
        self.noise = ChainNoise(seed, "direction", self.own, target.dim, device=target.device, dtype=target.dtype)
        self.uniform = ChainNoise(seed, "accept", self.own, 1, device=target.device, dtype=torch.float64, uniform=True)
        self.adaptation = MCLMCAdaptation(plan, self.chains, target.dim, target.device)
        self.state: State
        # Moments of the predictions of unadjusted draws, for the check of their bias.
        self.features: Welford | None = None
        # Per chain: acceptance, divergences, divergences in warm-up, iterations, squared energy errors, steps.
        self.sums = torch.zeros(6, self.chains, dtype=torch.float64, device=target.device)
        # Gradients of each chain; integrator steps so far, which number the noise; consecutive iterations in which all
        # chains diverged.
        self.gradients, self.steps_taken, self.all_diverged = 0, 0, 0

    # -- state ---------------------------------------------------------------------------------------------------------
    @property
    def theta(self) -> Tensor:  # type: ignore[override]
        """Current positions (C, D)."""
        return self.state.theta

    def start(self, theta: Tensor) -> None:
        """Evaluate the starting points and, unless the step size is given, search for a rough one."""
        log_lik, gradient, log_prior = evaluate_start(self.target, theta, self.slices, self.own.start)
        self.state = State(theta, gradient, log_lik, log_prior, self._fresh("first direction"))
        self.gradients += 1
        if self.plan.step_size is None:
            self.adaptation.begin(self._search())

    def _fresh(self, purpose: str, *index: int) -> Tensor:
        """Return random directions."""
        device, shape = self.target.device, (1, self.target.dim)
        rows = [
            torch.randn(shape, generator=stream(self.seed, purpose, c, *index, device=device), device=device)
            for c in self.own
        ]
        return unit(torch.cat(rows).to(self.target.dtype))

    def _search(self) -> float:
        """Return a step size at which a single step has about the target variance of the energy error."""
        size = 0.1 * math.sqrt(math.sqrt(self.target.dim))
        for trial in range(TRIALS):
            state = self.state._replace(momentum=self._fresh("step search", trial))
            error = self._step(state, size)[1]
            found = self.adaptation.wanted(size, self._variance(error.square()))
            if abs(math.log(found / size)) < 0.1:
                return found
            size = found
        if not 1e-8 < size < 1e8:
            outcome = "no energy error" if size > 1 else "too large an energy error"
            raise SamplingError(
                f"no step size was found: at {size:.1e} a single step has {outcome}. The density may be flat, its "
                "gradient may not match it, or data are not standardised"
            )
        return size

    def _variance(self, squares: Tensor) -> float:
        """Return the mean over all chains of squared energy errors (C,), per dimension."""
        return float(self._of_all(squares).mean()) / self.target.dim

    def tensors(self) -> dict[str, Tensor]:
        """Return state, counts and everything adapted."""
        found = {f"state.{k}": v for k, v in self.state._asdict().items()}
        counts = [self.done, self.all_diverged, self.gradients, self.steps_taken, self.begun, self.thin, self.total]
        if self.features is not None:
            found |= {f"features.{k}": v for k, v in self.features.tensors().items()}
        found |= {"sums": self.sums, "counts": torch.tensor(counts, dtype=torch.float64)}
        return {**found, **self.adaptation.tensors()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        device = self.target.device
        self.state = State(**{name: tensors[f"state.{name}"].to(device) for name in State._fields})
        self.sums = tensors["sums"].to(device)
        self.done, self.all_diverged, self.gradients, self.steps_taken, self.begun, self.thin, self.total = (
            int(n) for n in tensors["counts"].tolist()
        )
        if "features.mean" in tensors:
            self.features = Welford(self.chains, tensors["features.mean"].shape[1], device)
            self.features.restore({k: tensors[f"features.{k}"] for k in ("mean", "squares", "count")})
        self.adaptation.restore(tensors)

    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the chains."""
        if name.startswith("state.") or name.endswith((".mean", ".squares")):
            return 0
        return 1 if name == "sums" else None

    def _of_all(self, own: Tensor, axis: int = 0) -> Tensor:
        return self.mesh.all_chains(own, self.plan.chains, axis)

    # -- one iteration -------------------------------------------------------------------------------------------------
    def _step(self, state: State, size: float) -> tuple[State, Tensor]:
        """Return the state after one step, and its energy error (C,)."""
        found = []
        with torch.no_grad(), one_thread(self.single_thread):
            for part in self.slices:
                theta, direction, gradient, log_lik, change = isokinetic(
                    self.plan.integrator,
                    state.theta[part],
                    state.momentum[part],
                    state.gradient[part],
                    size,
                    self.plan.scale,
                    self.target.likelihood_and_grad,
                )
                exact = self.target.full_likelihood(theta)
                prior = self.target.log_prior(theta)
                found.append((theta, gradient, log_lik if exact is None else exact, prior, direction, change))
        self.gradients += self.plan.integrator.gradients
        *parts, change = found[0] if len(found) == 1 else (torch.cat(column) for column in zip(*found))
        after = State(*parts)
        error = change + self.target.weights[0] * (state.log_likelihood - after.log_likelihood)
        error = error + self.target.weights[1] * (state.log_prior - after.log_prior)
        return after, torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)

    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Follow a path, accept or reject it if adjusted, and adapt during warm-up."""
        t, plan, size, steps = self.done, self.plan, self.adaptation.size, self.adaptation.steps
        state, gradients = self.state, self.gradients
        if plan.adjusted:
            uniform = torch.rand((), generator=stream(self.seed, "trajectory length", t), dtype=torch.float64)
            steps = max(1, round(steps * (1 + JITTER * (2 * float(uniform) - 1))))
            state = state._replace(momentum=unit(self.noise.at(t)))
        try:
            follow = self._follow_native if self.target.backend.name == "cpp" else self._follow
            state, error, squares = follow(state, size, steps, stop)
        except Stopped:
            self.gradients = gradients
            raise
        # A path with an infinite error, or one that grows beyond bounds, has left the density.
        divergent = ~(error.abs() <= DIVERGENT)
        acceptance = torch.exp(-error.clamp(min=0)) if plan.adjusted else (~divergent).double()
        keep = self.uniform.at(t)[:, 0] < acceptance
        self._accept(keep & ~divergent, state)
        self.steps_taken, self.done = self.steps_taken + steps, t + 1
        self._check_divergence(divergent)
        squares = torch.nan_to_num(squares / steps, nan=torch.inf)
        if t < self.warmup:
            self.sums[2] += divergent
            theta = self.state.theta if plan.scale is None else self.state.theta / plan.scale
            self.adaptation.update(t, self._variance(squares), self._of_all(acceptance), theta, self._of_all)
        else:
            ones = torch.ones_like(acceptance)
            known = torch.where(divergent, 0.0, squares * steps)
            rows = (acceptance, divergent, 0 * ones, ones, known, torch.where(divergent, 0.0, ones * steps))
            self.sums += torch.stack([row.to(ones) for row in rows])
            if self.keeps() and not plan.adjusted:
                self._add_features()
        found = {
            "acceptance": acceptance,
            "divergent": divergent,
            "energy_error": error,
            "log_likelihood": self.state.log_likelihood,
            "log_prior": self.state.log_prior,
        }
        return {name: found[name] for name in self.names}

    def _follow(self, state: State, size: float, steps: int, stop: Callable[[], bool]) -> tuple[State, Tensor, Tensor]:
        """Return the state after a path, and the sums of its energy errors and of their squares (C,)."""
        error, squares = torch.zeros_like(state.log_likelihood), torch.zeros_like(state.log_likelihood)
        for k in range(steps):
            if stop():
                raise Stopped
            state, change = self._step(state, size)
            error, squares = error + change, squares + change.square()
            if not self.plan.adjusted:
                noise = self.noise.at(self.steps_taken + k)
                state = state._replace(
                    momentum=refresh_partly(state.momentum, noise, size, self.adaptation.persistence)
                )
        return state, error, squares

    def _follow_native(
        self, state: State, size: float, steps: int, stop: Callable[[], bool]
    ) -> tuple[State, Tensor, Tensor]:
        """Follow a path in C++, many steps per call and a chain per thread."""
        start = (state.theta, state.momentum, state.gradient, state.log_likelihood)
        moving = tuple(part.clone(memory_format=torch.contiguous_format) for part in start)
        density, scheme = self.target.backend.density, self.plan.integrator
        scale = None if self.plan.scale is None else self.plan.scale.contiguous()
        sums = torch.zeros(2, self.chains, dtype=torch.float64)
        strength, noise, k = 0.0, None, 0
        while k < steps:
            if stop():
                raise Stopped
            count = min(steps - k, density.steps_per_call(self.chains))
            if not self.plan.adjusted:
                strength = refreshed_part(size, self.adaptation.persistence, self.target.dim)
                count = min(count, self.noise.left(self.steps_taken + k))
                noise = self.noise.span(self.steps_taken + k, count)
            sums += follow_paths(density, moving, size, scale, count, (scheme.kicks, scheme.drifts), noise, strength)
            k += count
        self.gradients += steps * scheme.gradients
        theta, direction, gradient, log_likelihood = moving
        after = State(theta, gradient, log_likelihood, self.target.log_prior(theta), direction)
        return after, sums[0], sums[1]

    def _add_features(self) -> None:
        values = self.target.features(self.state.theta)
        if self.features is None:
            self.features = Welford(self.chains, values.shape[1], self.target.device)
        self.features.update(values)

    def _bias(self) -> dict[str, Any] | None:
        """Return the comparison with a short adjusted run from here; None if the run is too short to afford one."""
        count = iterations(self.done)
        if self.features is None or self.features.count < 2 or not count:
            return None
        length = self.adaptation.persistence * self.adaptation.LENGTH_ADJUSTED
        half = count // 2
        plan = replace(self.plan, adjusted=True, step_size=None, length=length, warmup=half, draws=count - half, thin=1)
        exact = MCLMCSampler(self.target, plan, stream_seed(self.seed, "bias check"), self.mesh)
        return compare(self.features, exact, self.target, self.state.theta, self._of_all)

    def _accept(self, keep: Tensor, after: State) -> None:
        """Continue from `after` where `keep`, elsewhere from the current state in the opposite direction."""
        before = self.state._replace(momentum=-self.state.momentum)
        self.state = State(*(torch.where(keep if a.ndim == 1 else keep[:, None], a, b) for a, b in zip(after, before)))

    def _check_divergence(self, divergent: Tensor) -> None:
        """Raise if every chain diverges for a while: such a run would never move."""
        if self.plan.step_size is None and self.done <= self.warmup:
            return
        # Processes exchange nothing after warm-up, so each judges its own chains.
        self.all_diverged = self.all_diverged + 1 if bool(divergent.all()) else 0
        if self.all_diverged == PATIENCE:
            raise SamplingError(
                f"step_size: every chain diverged in {PATIENCE} iterations in a row with step size "
                f"{self.adaptation.size:.3g}. Pass a smaller one, or let warm-up find it with step_size=None"
            )

    def keeps(self) -> bool:
        """Return whether this is a `thin`-th iteration after warm-up."""
        return self.done > self.begun and (self.done - self.begun) % self.thin == 0

    def prolong(self, draws: int, *, discard: bool) -> None:
        """Add draws; with `discard`, take twice as many iterations per draw."""
        if discard:
            self.begun = self.total = self.done
            self.features = None
            self.thin *= 2
        self.total += draws * self.thin

    # -- reporting -----------------------------------------------------------------------------------------------------
    def live_values(self) -> dict[str, float | str]:
        """Return phase, step size, steps per iteration and divergences."""
        shown: dict[str, float | str] = {"phase": self.adaptation.phase(self.done), "step size": self.adaptation.size}
        return {**shown, "steps": str(self.adaptation.steps), "divergent": str(int(self.sums[1].sum()))}

    def report(self) -> dict[str, Any]:
        """Return draws, divergences and step size per chain."""
        sums = self._of_all(self.sums, 1)
        draws = max(0, self.done - self.begun) // self.thin
        acceptance = (sums[0] / sums[3].clamp(min=1)).tolist()
        return {
            "iteration": self.done,
            "of": self.total,
            "phase": self.adaptation.phase(self.done) if self.done < self.total else "done",
            "chains": [
                {"draws": draws, "acceptance": a, "divergences": int(d), "step_size": self.adaptation.size}
                for a, d in zip(acceptance, sums[1].tolist())
            ],
        }

    def history(self) -> dict[str, Any]:
        """Return step size, length, the variance of the energy error and how the chains were evaluated."""
        sums, adaptation = self._of_all(self.sums, 1), self.adaptation
        variance = sums[4] / sums[5].clamp(min=1) / self.target.dim
        phases = [("length" if n == "mass" else n, first, end) for n, first, end in adaptation.phases]
        return {
            "phases": [
                {"name": name, "first": first, "end": end}
                for name, first, end in [*phases, ("sampling", self.warmup, self.total)]
            ],
            "adjusted": self.plan.adjusted,
            "step_size": [adaptation.size] * self.plan.chains,
            "trajectory_length": adaptation.length,
            "steps": adaptation.steps,
            "trajectory_shortened": bool(adaptation.length / adaptation.size > self.plan.max_steps + 0.5),
            "energy_variance": variance.tolist(),
            "energy_variance_goal": None if self.plan.adjusted else self.plan.energy_variance,
            "bias_check": None if self.plan.adjusted else self._bias(),
            "acceptance": (sums[0] / sums[3].clamp(min=1)).tolist(),
            "divergences": [int(d) for d in sums[1].tolist()],
            "warmup_divergences": [int(d) for d in sums[2].tolist()],
            "gradients": self.gradients * self.plan.chains,
            "chains_at_once": max(part.stop - part.start for part in self.slices),
            "mesh": list(self.mesh.shape),
            "native": self.target.backend.fused,
            "plan": f"{'looped' if self.target.looped else 'batched'}: {self.target.reason}",
        }
