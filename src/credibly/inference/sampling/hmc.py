"""HMC as a process: trajectories of all chains, Metropolis correction, adaptation in warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import SamplingError
from credibly.inference.adaptation import DualAveraging, LengthTrial, Welford, windows
from credibly.inference.kernels.hmc import State, metropolis, refresh
from credibly.inference.kernels.integrators import integrator
from credibly.inference.sampling.hmc_record import progress_report, run_history
from credibly.inference.sampling.loop import Process
from credibly.inference.sampling.noise import ChainNoise
from credibly.inference.sampling.starts import evaluate_start
from credibly.inference.sampling.trajectory import Trajectory
from credibly.inference.target import Target

if TYPE_CHECKING:
    from credibly.methods.hmc import HMC

GUESSED_STEPS = 50  # of a trajectory, before the step size is known
PATIENCE = 10  # iterations in which every trajectory of every chain may diverge


class HMCRun(Process):
    """C chains of HMC on one target, in chunks of chains where they do not fit into memory together."""

    names = ("acceptance", "divergent", "energy", "log_likelihood", "log_prior")

    def __init__(self, target: Target, options: HMC, seed: int, mesh: Mesh) -> None:
        self.target, self.options, self.seed, self.mesh = target, options, seed, mesh
        self.own, self.warmup = mesh.chains(options.chains), options.warmup
        self.chains = len(self.own)
        self.total = self.warmup + options.draws * options.thin
        self.scheme = integrator(options.integrator)
        if options.compile is not False:
            target.go_native() or target.go_kernel()
        length = even_share(self.chains, target.at_once(self.chains))
        self.slices = [slice(a, min(a + length, self.chains)) for a in range(0, self.chains, length)]
        self.length, self.kind = options.length(target), options.mass_kind(target)
        steps = GUESSED_STEPS
        if options.step_size is not None:
            steps = math.ceil(self.length / options.step_size)
        like = even_share(options.chains, target.at_once(options.chains))  # as one process would have it
        calls = (
            self.total * steps * math.ceil(options.chains / like) // 2
        )  # two functions are compiled: one step, and several
        sizes = {s.stop - s.start for s in self.slices}
        self.trajectories = {n: Trajectory(target, self.scheme, n, options.compile, calls, like) for n in sizes}
        self.noise = ChainNoise(seed, "momentum", self.own, target.dim, device=target.device, dtype=target.dtype)
        self.uniform = ChainNoise(seed, "accept", self.own, 1, device=target.device, dtype=torch.float64, uniform=True)
        self.phases = windows(self.warmup, self.kind == "diagonal")
        self.state: State
        self.inverse_mass = options.inverse_mass(target)
        self.size = torch.full((self.chains,), options.step_size or 0.0, dtype=torch.float64)
        self._placed = (self.size, self.size.to(target.device, target.dtype))
        self.dual = DualAveraging(torch.ones(1 if options.pooled else self.chains), options.target_accept)
        self.welford = Welford(self.chains, target.dim, target.device)
        self.trial: LengthTrial | None = None  # of trajectory lengths, while they are tried
        self.sums = torch.zeros(4, self.chains, dtype=torch.float64, device=target.device)
        self.lost = 0  # iterations in a row in which every chain diverged
        self.steps = 0  # of the last trajectory
        self.gradients = 0

    # -- the state -------------------------------------------------------------------------------------------------------
    @property
    def theta(self) -> Tensor:  # type: ignore[override]
        """Where the chains stand."""
        return self.state.theta

    def start(self, theta: Tensor) -> None:
        """Evaluates the starting points and, unless the step size is given, looks for one that is about right."""
        log_lik, gradient, log_prior = evaluate_start(self.target, theta, self.slices, self.own.start)
        self.state = State(theta, gradient, log_lik, log_prior, torch.zeros_like(theta))
        self.gradients += self.options.chains
        if self.options.step_size is None:
            self._restart(self._search(torch.full_like(self.dual.log_size, self.options.first_size(self.target))))

    def tensors(self) -> dict[str, Tensor]:
        """State, step sizes, mass, adaptation and counts."""
        counts = torch.tensor([self.done, self.lost, self.gradients], dtype=torch.float64)
        mass = {} if self.inverse_mass is None else {"inverse_mass": self.inverse_mass}
        adapting = {f"dual.{k}": v for k, v in self.dual.tensors().items()}
        if self.trial is not None:
            adapting |= {f"trial.{k}": v for k, v in self.trial.tensors().items()}
        if self.options.tuned:
            adapting["length"] = torch.tensor(self.length, dtype=torch.float64)
        if self.phase()[0] == "mass":
            adapting |= {f"welford.{k}": v for k, v in self.welford.tensors().items()}
        return {
            **{f"state.{k}": v for k, v in self.state._asdict().items()},
            "size": self.size, "sums": self.sums, "counts": counts, **mass, **adapting,
        }  # fmt: skip

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        device = self.target.device
        self.state = State(**{k: tensors[f"state.{k}"].to(device) for k in State._fields})
        self.size, self.sums = tensors["size"], tensors["sums"].to(device)
        done, lost, gradients = tensors["counts"].tolist()
        self.done, self.lost, self.gradients = int(done), int(lost), int(gradients)
        if "inverse_mass" in tensors:
            self.inverse_mass = tensors["inverse_mass"].to(device)
        self.dual.restore({k.removeprefix("dual."): v for k, v in tensors.items() if k.startswith("dual.")})
        if "length" in tensors:
            self.length = float(tensors["length"])
        trial = {k.removeprefix("trial."): v for k, v in tensors.items() if k.startswith("trial.")}
        if trial:
            self.trial = LengthTrial(self.chains, trial["jumps"].shape[-1], device)
            self.trial.restore(trial)
        running = {k.removeprefix("welford."): v for k, v in tensors.items() if k.startswith("welford.")}
        if running:
            self.welford.restore(running)

    def chain_axis(self, name: str) -> int | None:
        """Where the chains are in a tensor of the state."""
        if name.startswith("state.") or name == "size" or name.endswith((".mean", ".squares", ".begun")):
            return 0
        if name.startswith("dual.") and name != "dual.count":
            return None if self.options.pooled else 0
        return 1 if name in ("sums", "trial.jumps") else None

    def of_all(self, mine: Tensor, axis: int = 0) -> Tensor:
        """What every chain has, here or with another process."""
        return self.mesh.all_chains(mine, self.options.chains, axis)

    # -- one iteration ---------------------------------------------------------------------------------------------------
    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Refresh, trajectory, Metropolis; in warm-up also adaptation."""
        t = self.done
        share = self.options.refresh if t else 1.0  # at first there is none to keep
        momentum = refresh(self.state.momentum, self.noise.at(t), self.inverse_mass, share)
        begun = self.state._replace(momentum=momentum)
        steps = self._steps(t)
        proposal = self._propose(begun, steps, stop)
        self.state, info = metropolis(begun, proposal, self.inverse_mass, self.uniform.at(t)[:, 0], self.target.weights)
        self.steps = max(steps)
        self.gradients += self.steps * self.scheme.gradients * self.options.chains
        self.done += 1
        self._watch(info.divergent, info.energy_error)
        if t < self.warmup:
            self.sums[2] += info.divergent
            if self.options.tuned:
                self._try_lengths(t, begun.theta)
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
        """Every `thin`-th iteration after warm-up."""
        return self.done > self.warmup and (self.done - self.warmup) % self.options.thin == 0

    def _steps(self, t: int) -> list[int]:
        """Steps of this trajectory for each chain: its length over the step size, jittered alike for all chains."""
        length = self.length
        if self.options.tuned and t < self.warmup:
            length *= 0.25 if self.trial is None else self.trial.part
        if self.options.spread:
            place = torch.rand((), generator=stream(self.seed, "trajectory length", t), dtype=torch.float64)
            length = length * (1 + self.options.spread * (2 * float(place) - 1))
        most = self.options.max_steps if self.options.step_size is None else math.inf
        return [int(min(most, max(1, math.ceil(length / size - 1e-9)))) for size in self.size.tolist()]

    def _propose(self, begun: State, steps: list[int], stop: Callable[[], bool] | None) -> State:
        pieces = []
        for part in self.slices:
            path = self.trajectories[part.stop - part.start]
            theta, momentum, gradient = begun.theta[part], begun.momentum[part], begun.gradient[part]
            size, counts = self._sizes()[part], steps[part]
            path.run_each(theta, momentum, gradient, size, self.inverse_mass, counts, stop)
            prior = self.target.log_prior(path.theta)
            exact = self.target.full_likelihood(path.theta)
            found = (path.theta, path.gradient, path.log_likelihood if exact is None else exact, prior, path.momentum)
            pieces.append(found if len(self.slices) == 1 else tuple(f.clone() for f in found))
        return State(*pieces[0]) if len(pieces) == 1 else State(*(torch.cat(column) for column in zip(*pieces)))

    def _sizes(self) -> Tensor:
        """The step sizes where the chains are. Copied when they change: a copy has the host wait for all that a GPU has begun."""
        if self._placed[0] is not self.size:
            self._placed = self.size, self.size.to(self.target.device, self.target.dtype)
        return self._placed[1]

    # -- adaptation ------------------------------------------------------------------------------------------------------
    def phase(self) -> tuple[str, int, int]:
        """The phase of the next iteration: its name, first iteration and end."""
        for phase in self.phases:
            if phase[1] <= self.done < phase[2]:
                return phase
        return ("sampling", self.warmup, self.total)

    def _adapt(self, t: int, acceptance: Tensor) -> None:
        name, _, end = next(p for p in self.phases if p[1] <= t < p[2])
        if self.options.step_size is None:
            self.dual.update(self.of_all(acceptance).mean(0, keepdim=True) if self.options.pooled else acceptance)
            self.size = self.dual.size.expand(self.chains).clone()
        if name == "mass":
            self.welford.update(self.state.theta)
            if t + 1 == end:
                squares = self.of_all(self.welford.squares)
                self.inverse_mass = self.welford.variance(self.target.scale**2, squares).to(self.target.dtype)
                self.welford = Welford(self.chains, self.target.dim, self.target.device)
                if self.options.step_size is None:
                    self._restart(self._search(self.dual.final))
        if t + 1 == self.warmup and self.options.step_size is None:
            self.size = self.dual.final.expand(self.chains).clone()

    def _try_lengths(self, t: int, before: Tensor) -> None:
        """Tries trajectory lengths in turn once the chains are under way and the mass is final; the last iteration chooses."""
        masses = [end for name, _, end in self.phases if name == "mass"]
        if self.trial is not None:
            self.trial.update(self.target.features(before), self.target.features(self.state.theta))
        elif t + 1 == (masses[-1] if masses else self.warmup // 3):
            self.trial = LengthTrial(self.chains, self.target.features(before).shape[1], self.target.device)
        if self.trial is not None and t + 1 == self.warmup:
            left = self.trial.left(
                self.of_all(self.trial.jumps, 1), self.of_all(self.trial.values.mean), self.of_all(self.trial.values.squares)
            )  # fmt: skip
            self.length *= self.trial.choice(left)
            self.trial = None

    def _restart(self, size: Tensor) -> None:
        self.dual.restart(size)
        self.size = self.dual.size.expand(self.chains).clone()

    def _search(self, size: Tensor) -> Tensor:
        """Step sizes at which one step is accepted about as often as asked for, by doubling or halving from `size`.

        One for all chains (1,), or one for each (C,), which then does not depend on the others.
        """
        size, direction, found = size.clone(), torch.zeros_like(size), torch.zeros_like(size, dtype=torch.bool)
        for trial in range(100):
            acceptance = self._one_step(size.expand(self.chains), trial)
            acceptance = self.of_all(acceptance).mean(0, keepdim=True) if self.options.pooled else acceptance
            wanted = torch.where(acceptance > self.options.target_accept, 1.0, -1.0).to(size)
            turned = ~found & (direction != 0) & (wanted != direction)
            going = ~found & ~turned
            size = torch.where(turned & (wanted < 0), size / 2, torch.where(going, size * 2.0**wanted, size))
            direction, found = torch.where(going, wanted, direction), found | turned
            if bool(found.all()):
                return size
            lost = going & ((size < 1e-12) | (size > 1e12))
            if bool(lost.any()):
                break
        chain = int(lost.int().argmax())
        up = bool(direction[chain] > 0)
        raise SamplingError(
            f"no step size was found: even at {float(size[chain]):.1e} a single step is {'accepted' if up else 'rejected'}. "
            f"{'The density may be flat' if up else 'The gradient does not fit the density, or the data are not standardised'}"
        )

    def _one_step(self, size: Tensor, trial: int) -> Tensor:
        """Acceptance (C,) of one step of the sizes (C,) from where the chains stand."""
        noise = torch.cat(
            [
                torch.randn(
                    1, self.target.dim, generator=stream(self.seed, "step search", c, self.done, trial, device=self.target.device),
                    device=self.target.device, dtype=self.target.dtype,
                )
                for c in self.own
            ]
        )  # fmt: skip
        begun = self.state._replace(momentum=refresh(self.state.momentum, noise, self.inverse_mass, 1.0))
        kept, self.size = self.size, size
        proposal = self._propose(begun, [1] * self.chains, None)
        self.size = kept
        self.gradients += self.scheme.gradients * self.options.chains
        _, info = metropolis(
            begun, proposal, self.inverse_mass, torch.zeros(self.chains, device=noise.device), self.target.weights
        )
        return info.acceptance.cpu()

    def _watch(self, divergent: Tensor, error: Tensor) -> None:
        """Ends a run whose every trajectory diverges from the first on: it would never move."""
        if self.options.step_size is None and self.done <= self.warmup:
            return
        since = self.done - (self.warmup if self.options.step_size is None else 0)
        if since > PATIENCE:
            return
        self.lost = self.lost + 1 if bool(self.of_all(divergent).all()) else 0
        if self.lost == PATIENCE:
            used = float(self.size.max())
            hint = float(self._search(torch.full_like(self.dual.log_size, used / 4)).min())
            raise SamplingError(
                f"step_size: every trajectory diverged in the first {PATIENCE} iterations with step size {used:.3g} (energy error "
                f"{float(error.median()):.3g} in the median chain, over {self.steps} steps). Try step_size={hint:.1g} or less, or "
                f"leave it to warm-up with step_size=None and warmup={max(100, self.warmup)}"
            )

    # -- what is told ----------------------------------------------------------------------------------------------------
    def figures(self) -> dict[str, float | str]:
        """Phase, acceptance, divergences, step size and steps a trajectory."""
        name = self.phase()[0]
        counted = self.sums[3].max()
        acceptance = float((self.sums[0] / counted).mean()) if counted else self.options.target_accept
        shown: dict[str, float | str] = {"phase": name if self.done < self.warmup else "sampling"}
        if counted:
            shown |= {"accept": round(acceptance, 3), "divergent": str(int(self.sums[1].sum()))}
        return {**shown, "step size": float(self.size.mean()), "steps": str(self.steps)}

    def report(self) -> dict[str, Any]:
        """Per chain: draws, acceptance, divergences, step size."""
        return progress_report(self)

    def history(self) -> dict[str, Any]:
        """Phases, step sizes, acceptance, divergences and how the chains were laid out."""
        return run_history(self)


def even_share(chains: int, most: int) -> int:
    """Chains to take at once: at most so many, in shares of one length where that does not make them much smaller."""
    fewest = math.ceil(chains / most)
    even = next(k for k in range(fewest, chains + 1) if chains % k == 0)
    return chains // even if even <= 1.5 * fewest else math.ceil(chains / fewest)
