"""Trajectories of many chains as one computation: in compiled code, or replayed as a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.core.compilation import Compile, compiled
from credibly.core.cuda_graphs import capture
from credibly.core.threads import one_thread
from credibly.inference.kernels.integrators import Integrator
from credibly.inference.target import Target

UNROLLED = 8  # steps in one call for small problems, where the call itself costs as much as the arithmetic of a step
WORTH_SHARING = 2**17  # values that a step computes, from which on threads share its work
FEW_VALUES = 2**20  # values that a step computes, beyond which the call does not matter
SMALL = 50_000  # parameters of all chains together, up to which a problem counts as small


class Stopped(Exception):
    """Raised between two steps when the user has asked to stop; the state before the trajectory is untouched."""


class Trajectory:
    """Steps of an integrator for C chains, in place on buffers of its own.

    Small networks go through code of our own (`native`), on a processor or on a GPU, a whole trajectory in one call. Elsewhere, where the
    target is evaluated in one piece, a step (or a few of them) is one compiled function; where it goes in
    micro-batches, the target's pieces are evaluated one after another. On a GPU the steps are captured once as a CUDA graph
    and replayed, which takes the launches out of small networks. How it is laid out is decided for `like` chains: as many as
    one process would take at once, so that a chain has the same bits however the chains are spread.
    """

    def __init__(
        self, target: Target, scheme: Integrator, chains: int, compile: Compile, calls: int, like: int | None = None
    ) -> None:
        like = like or chains
        self.target, self.scheme, self.chains = target, scheme, chains
        shape = (chains, target.dim)
        self.theta = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.momentum, self.gradient = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.log_likelihood = torch.zeros(chains, dtype=torch.float64, device=target.device)
        self.size = torch.zeros(chains, 1, dtype=target.dtype, device=target.device)
        self.inverse_mass = torch.ones(target.dim, dtype=target.dtype, device=target.device)
        self.alone = target.device.type == "cpu" and target.work(chains) < WORTH_SHARING
        self.native = target.native if target.kernel is None else target.kernel
        if target.kernel is not None:
            target.kernel.like = like
        self.graphs: dict[int, Any] = {}
        self.compiled, self.graphed = self.native is not None, False
        if self.native is not None:
            return
        whole = target.whole(chains)
        on_gpu = target.device.type == "cuda"
        self.single: Any = self._one
        self.several: Any = None
        if whole:
            self.single = compiled(
                self._one, compile, calls, target.device, like * target.dim, short=like * target.dim <= SMALL
            )
            self.compiled = self.single != self._one
        else:
            self.compiled = target.compile_pieces(compile, calls, like)
        small = like * target.dim <= SMALL and target.work(like) <= FEW_VALUES
        if whole and self.compiled and small and not on_gpu:
            self.several = compiled(self._few, True, calls, target.device, short=True)
        self.graphed = whole and on_gpu

    def run_each(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, size: Tensor, inverse_mass: Tensor | None, steps: Sequence[int],
        stop: Any = None,
    ) -> None:  # fmt: skip
        """The same with a number of steps for each chain."""
        if self.native is not None:
            self._run_native(theta, momentum, gradient, size, inverse_mass, list(steps), stop)
            return
        done = 0
        for upto in sorted(set(steps)):  # chains with fewer steps rest while the others go on
            going = size
            if done:
                going = size * torch.tensor([float(n >= upto) for n in steps], device=size.device, dtype=size.dtype)
            self.run(theta, momentum, gradient, going, inverse_mass, upto - done, stop)
            theta, momentum, gradient, done = self.theta, self.momentum, self.gradient, upto

    def _run_native(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, size: Tensor, inverse_mass: Tensor | None, left: list[int], stop: Any
    ) -> None:  # fmt: skip
        assert self.native is not None
        self.theta.copy_(theta)
        self.momentum.copy_(momentum)
        self.gradient.copy_(gradient)
        size = size.to(self.theta).contiguous()
        mass = None if inverse_mass is None else inverse_mass.to(self.theta).contiguous()
        most = self.native.steps_in_a_call(self.chains)
        while any(left):
            if stop is not None and stop():
                raise Stopped
            now = [min(most, n) for n in left]
            self.native.run(
                self.theta, self.momentum, self.gradient, self.log_likelihood, size, mass, now, self.scheme.kicks, self.scheme.drifts
            )  # fmt: skip
            left = [n - k for n, k in zip(left, now)]

    def run(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, size: Tensor, inverse_mass: Tensor | None, steps: int, stop: Any = None
    ) -> None:  # fmt: skip
        """From theta, momentum and gradient (C, D), so many steps of the sizes (C,); the result is in the buffers."""
        with torch.no_grad(), one_thread(self.alone):
            self.theta.copy_(theta)
            self.momentum.copy_(momentum)
            self.gradient.copy_(gradient)
            self.size.copy_(size.unsqueeze(1))
            if inverse_mass is not None:
                self.inverse_mass.copy_(inverse_mass)
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

    def _buffers(self) -> tuple[Tensor, ...]:
        return self.theta, self.momentum, self.gradient, self.log_likelihood, self.size, self.inverse_mass

    def _one(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, log_likelihood: Tensor, size: Tensor, inverse_mass: Tensor
    ) -> None:  # fmt: skip
        after = self.scheme.step(theta, momentum, gradient, size, inverse_mass, self.target.likelihood_and_grad)
        for mine, new in zip((theta, momentum, gradient, log_likelihood), after):
            mine.copy_(new)

    def _few(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, log_likelihood: Tensor, size: Tensor, inverse_mass: Tensor
    ) -> None:  # fmt: skip
        after: tuple[Tensor, ...] = (theta, momentum, gradient, log_likelihood)
        for _ in range(UNROLLED):
            after = self.scheme.step(after[0], after[1], after[2], size, inverse_mass, self.target.likelihood_and_grad)
        for mine, new in zip((theta, momentum, gradient, log_likelihood), after):
            mine.copy_(new)

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
