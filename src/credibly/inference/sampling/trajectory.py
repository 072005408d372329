"""Trajectories of many chains as one computation, whatever the backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.core.cuda_graphs import capture
from credibly.core.inputs import Tensors
from credibly.core.threads import one_thread
from credibly.gaussians.mass import CorrelatedMass, Factor, InverseMass
from credibly.inference.kernels.hmc import Integrator, State
from credibly.inference.sampling.sampler import Stopped
from credibly.inference.target import Target

# Steps per call for small problems, where the call itself costs as much as the arithmetic of a step.
UNROLLED = 8
# Number of values computed per step from which multithreading pays off.
WORTH_SHARING = 2**17
# Number of values computed per step beyond which the overhead of a call does not matter.
FEW_VALUES = 2**20
# Parameters of all chains together up to which a problem counts as small.
SMALL = 50_000

# Ranks of a mass are padded to multiples of this: compiled code and CUDA graphs have fixed shapes.
RANK_MULTIPLE = 16

Stop = Callable[[], bool]


class Trajectory:
    """Integrator steps of C chains, in place on its own buffers.

    In C++ or CUDA a trajectory is one call. In torch, a step (or a few) is one compiled function if the target is
    evaluated in one chunk; otherwise the target compiles its parts. On a GPU the steps are captured as a CUDA graph
    and replayed, which saves the kernel launches of small networks.

    Args:
        target: the density; its backend has been selected.
        scheme: the integrator.
        chains: C.
        calls: number of calls that a compiled step would serve.
        batch: chains that a single process would evaluate at once. It decides about compilation, so that a chain is
            bit-for-bit identical however the chains are distributed.
    """

    def __init__(self, target: Target, scheme: Integrator, chains: int, calls: int, batch: int | None = None) -> None:
        batch = batch or chains
        self.target, self.scheme, self.chains = target, scheme, chains
        self.backend = target.backend
        self.theta = torch.zeros(chains, target.dim, dtype=target.dtype, device=target.device)
        self.momentum, self.gradient = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.log_likelihood = torch.zeros(chains, dtype=torch.float64, device=target.device)
        self.size = torch.zeros(chains, 1, dtype=target.dtype, device=target.device)
        # A diagonal M^-1, or s of a correlated one with the starts and tensors of its factors.
        self.mass = torch.ones(target.dim, dtype=target.dtype, device=target.device)
        self.factor_starts: tuple[int, ...] = ()
        self.factors: Tensors = ()
        self.single_thread = target.device.type == "cpu" and target.work(chains) < WORTH_SHARING
        self.graphs: dict[int, Any] = {}
        self.compiled, self.graphed = self.backend.fused, False
        if self.backend.name == "cuda":
            self.backend.density.planned_chains = batch
        self.planned = calls, batch
        if not self.backend.fused:
            self._compile(calls, batch)

    def _compile(self, calls: int, batch: int) -> None:
        target, device, values = self.target, self.target.device, batch * self.target.dim
        whole = target.whole(self.chains)
        self.single: Any = self._step
        self.several: Any = None
        if whole:
            self.single = self.backend.compile_step(self._step, calls, device, values, short=values <= SMALL)
            self.compiled = self.single != self._step
        else:
            self.compiled = target.compile_parts(self.backend.compile, calls, batch)
        small = values <= SMALL and target.work(batch) <= FEW_VALUES
        if whole and self.compiled and small and device.type != "cuda":
            self.several = self.backend.compile_step(self._unrolled, calls, device, short=True, always=True)
        self.graphed = whole and device.type == "cuda"

    def run_each(
        self, start: Tensors, size: Tensor, inverse_mass: InverseMass, steps: Sequence[int], stop: Stop | None = None
    ) -> None:
        """Take chain c from `start` (theta, momentum, gradient) through steps[c] steps of size[c], into the buffers."""
        if self.backend.fused:
            self._run_fused(start, size, inverse_mass, list(steps), stop)
            return
        done = 0
        # Chains with fewer steps rest, with a step size of zero, until the others are done.
        for upto in sorted(set(steps)):
            moving = size
            if done:
                moving = size * torch.tensor([float(n >= upto) for n in steps], device=size.device, dtype=size.dtype)
            self.run(start, moving, inverse_mass, upto - done, stop)
            start, done = (self.theta, self.momentum, self.gradient), upto

    def run(
        self, start: Tensors, size: Tensor, inverse_mass: InverseMass, steps: int, stop: Stop | None = None
    ) -> None:
        """Take all chains from `start` (theta, momentum, gradient) through `steps` steps of the sizes (C,)."""
        with torch.no_grad(), one_thread(self.single_thread):
            self._load(start)
            self.size.copy_(size.unsqueeze(1))
            self._load_mass(inverse_mass)
            left = steps
            while left:
                if stop is not None and stop():
                    raise Stopped
                if self.graphed:
                    left -= self._replay(UNROLLED if left >= UNROLLED else 1)
                elif self.several is not None and left >= UNROLLED:
                    self.several(*self._buffers())
                    left -= UNROLLED
                else:
                    self.single(*self._buffers())
                    left -= 1

    def _run_fused(
        self, start: Tensors, size: Tensor, inverse_mass: InverseMass, left: list[int], stop: Stop | None
    ) -> None:
        density = self.backend.trajectories
        self._load(start)
        size = size.to(self.theta).contiguous()
        mass = inverse_mass.to(self.theta).contiguous() if isinstance(inverse_mass, Tensor) else inverse_mass
        most = density.steps_per_call(self.chains)
        while any(left):
            if stop is not None and stop():
                raise Stopped
            now = [min(most, n) for n in left]
            density.run(self._buffers()[:4], size, mass, now, self.scheme.coefficients)
            left = [n - k for n, k in zip(left, now)]

    def _load(self, start: Tensors) -> None:
        for buffer, value in zip((self.theta, self.momentum, self.gradient), start, strict=True):
            buffer.copy_(value)

    def _load_mass(self, inverse_mass: InverseMass) -> None:
        """Copy M^-1 into the buffers; factors of new shapes get new ones, which no graph has captured yet."""
        factors: list[Tensor] = []
        starts: tuple[int, ...] = ()
        if isinstance(inverse_mass, CorrelatedMass):
            padded = inverse_mass.padded(RANK_MULTIPLE)
            starts = tuple(factor.start for factor in padded.factors)
            factors = [tensor for factor in padded.factors for tensor in (factor.vectors, factor.values)]
        if starts != self.factor_starts or [f.shape for f in factors] != [f.shape for f in self.factors]:
            self.factor_starts, self.factors = starts, tuple(torch.empty_like(f) for f in factors)
            self.graphs.clear()
            # Compiled code has no guards: it would keep using the number of factors that it was compiled for.
            self._compile(*self.planned)
        if inverse_mass is not None:
            self.mass.copy_(inverse_mass if isinstance(inverse_mass, Tensor) else inverse_mass.scale)
        for buffer, factor in zip(self.factors, factors):
            buffer.copy_(factor)

    def _buffers(self) -> Tensors:
        return self.theta, self.momentum, self.gradient, self.log_likelihood, self.size, self.mass, *self.factors

    def _inverse_mass(self, mass: Tensor, factors: Tensors) -> InverseMass:
        if not factors:
            return mass
        parts = zip(self.factor_starts, factors[::2], factors[1::2])
        return CorrelatedMass(mass, tuple(Factor(*part) for part in parts))

    def _step(self, *buffers: Tensor) -> None:
        """Take one step in place on theta, momentum, gradient and log likelihood, with step sizes and mass."""
        theta, momentum, gradient, _, size, mass, *factors = buffers
        inverse = self._inverse_mass(mass, tuple(factors))
        after = self.scheme.step(theta, momentum, gradient, size, inverse, self.target.likelihood_and_grad)
        for buffer, value in zip(buffers, after):
            buffer.copy_(value)

    def _unrolled(self, *buffers: Tensor) -> None:
        """Take a fixed number of steps in one call."""
        after, (size, mass, *factors) = buffers[:4], buffers[4:]
        inverse = self._inverse_mass(mass, tuple(factors))
        for _ in range(UNROLLED):
            after = self.scheme.step(after[0], after[1], after[2], size, inverse, self.target.likelihood_and_grad)
        for buffer, value in zip(buffers, after):
            buffer.copy_(value)

    def _replay(self, count: int) -> int:
        if count not in self.graphs:
            self.graphs[count] = capture(
                lambda: self.single(*self._buffers()), self._buffers(), self.target.device, count
            )
            self.graphed = self.graphs[count] is not None
        if self.graphed:
            self.graphs[count].replay()
            return count
        self.single(*self._buffers())
        return 1


class ChunkedTrajectories:
    """Trajectories of all chains of a process, in chunks of chains that fit into memory together.

    Args:
        target, scheme: the density and the integrator.
        chains: chains of this process.
        all_chains: chains of the run.
        steps: total steps of the run, for the decision to compile.
    """

    def __init__(self, target: Target, scheme: Integrator, chains: int, all_chains: int, steps: int) -> None:
        self.target = target
        length = even_chunk(chains, target.chains_at_once(chains))
        self.slices = [slice(a, min(a + length, chains)) for a in range(0, chains, length)]
        # Same chunk size as in a single process, so that results do not depend on the number of processes.
        batch = even_chunk(all_chains, target.chains_at_once(all_chains))
        # Two functions are compiled, one step and several, hence half the calls.
        calls = steps * math.ceil(all_chains / batch) // 2
        sizes = {s.stop - s.start for s in self.slices}
        self.by_size = {n: Trajectory(target, scheme, n, calls, batch) for n in sizes}

    @property
    def largest(self) -> int:
        """Chains in the largest chunk."""
        return max(self.by_size)

    @property
    def compiled(self) -> bool:
        """Whether steps run as compiled code, by torch.compile or another backend."""
        return next(iter(self.by_size.values())).compiled

    @property
    def graphed(self) -> bool:
        """Whether steps are replayed as a CUDA graph."""
        return next(iter(self.by_size.values())).graphed

    def propose(
        self, current: State, size: Tensor, inverse_mass: InverseMass, steps: list[int], stop: Stop | None
    ) -> State:
        """Return the end points of trajectories from `current`: steps[c] steps of size[c] for chain c."""
        proposals = []
        for part in self.slices:
            self.target.select_rows(part)
            path = self.by_size[part.stop - part.start]
            start = (current.theta[part], current.momentum[part], current.gradient[part])
            path.run_each(start, size[part], inverse_mass, steps[part], stop)
            log_prior = self.target.log_prior(path.theta)
            exact = self.target.full_likelihood(path.theta)
            log_lik = path.log_likelihood if exact is None else exact
            found = (path.theta, path.gradient, log_lik, log_prior, path.momentum)
            proposals.append(found if len(self.slices) == 1 else tuple(f.clone() for f in found))
        if len(proposals) == 1:
            return State(*proposals[0])
        return State(*(torch.cat(column) for column in zip(*proposals)))

    def step(
        self,
        part: slice,
        start: Tensors,
        size: Tensor,
        inverse_mass: InverseMass,
        steps: list[int],
        stop: Stop | None,
    ) -> State:
        """Return the state after one step of the signed sizes for the chains of a chunk; those with 0 steps rest."""
        self.target.select_rows(part)
        path = self.by_size[part.stop - part.start]
        if not path.backend.fused:
            size = size * torch.tensor(steps, device=size.device, dtype=size.dtype)
            path.run(start, size, inverse_mass, 1, stop)
        else:
            path.run_each(start, size, inverse_mass, steps, stop)
        exact = self.target.full_likelihood(path.theta)
        log_lik = path.log_likelihood.clone() if exact is None else exact
        theta = path.theta.clone()
        return State(theta, path.gradient.clone(), log_lik, self.target.log_prior(theta), path.momentum.clone())


def even_chunk(chains: int, most: int) -> int:
    """Return how many chains to evaluate at once.

    At most `most`, in equal chunks unless those would be much smaller.
    """
    fewest = math.ceil(chains / most)
    even = next(k for k in range(fewest, chains + 1) if chains % k == 0)
    return chains // even if even <= 1.5 * fewest else math.ceil(chains / fewest)
