"""Minibatch steps of all chains in compiled code of our own: many in one call, of small networks and of wide ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from credibly.backends.cpp.density import NativeDensity
from credibly.backends.cpp.library import library
from credibly.backends.cpp.stack import Stack
from credibly.backends.cpp.wide import WideDensity, takes
from credibly.inference.sampling.noise import ChainNoise, LargeNoise
from credibly.inference.target import ProblemTarget, Target

if TYPE_CHECKING:
    from credibly.inference.sampling.sgmcmc import SGMCMCRun
    from credibly.methods.sgmcmc import _SGMCMC


class NativeChains:
    """Steps of a run on its own tensors; a small network takes noise from memory, a wide one makes its own."""

    def __init__(self, run: SGMCMCRun, density: NativeDensity | WideDensity) -> None:
        self.run, self.density = run, density

    def advance(self, t: int, figures: Tensor) -> int:
        """As many steps from step t on as have their rows and noise side by side, up to so many figures; how many those are."""
        run, density = self.run, self.density
        count, rows = len(figures), None
        if isinstance(run.noise, ChainNoise):
            count = min(count, run.noise.left(t))
        if isinstance(density, WideDensity) and run.batches is not None:
            count = min(count, density.steps_in_a_call(run.chains, run.batches.batch))
        if run.batches is not None:
            count = min(count, run.batches.left(t))
            rows = run.batches.span(t, count)
        momentum, gradient = (run.momentum, run.gradient) if run.options.has_momentum else (None, None)
        state = (run.theta, momentum, gradient, run.value, rows, run.scale)
        if isinstance(density, WideDensity):
            assert isinstance(run.noise, LargeNoise)
            density.minibatch_steps(*state, run.noise.keys(t, count), figures[:count].contiguous())
        else:
            assert isinstance(run.noise, ChainNoise)
            density.minibatch_steps(*state, run.noise.span(t, count), figures[:count].contiguous())
        return count


def wide_stack(target: Target, options: _SGMCMC) -> Stack | None:
    """The network, where steps go through the code for wide ones if that is at hand: what decides about the noise."""
    if not isinstance(target, ProblemTarget) or target.spread or target.looped or options.preconditioned:
        return None
    problem, forward = target.problem, target.problem.forward
    if forward.stack is None or forward.module is not problem.layout.module or forward.precision is not None:
        return None
    stack = Stack.of(forward.module, problem.layout, widest=math.inf)
    return stack if takes(stack, problem.x, problem.y, problem.likelihood, problem.prior) else None


def native_chains(run: SGMCMCRun, stack: Stack | None) -> NativeChains | None:
    """None where there is no compiled code for the network and the method, or it was not wanted; the stack is that of a wide one."""
    target = run.target
    if run.options.compile is False or run.options.preconditioned:
        return None
    if isinstance(run.noise, LargeNoise):
        if stack is None or library() is None or not isinstance(target, ProblemTarget):
            return None
        problem = target.problem
        parts = (problem.x, problem.y, problem.likelihood, problem.prior, target.weights)
        return NativeChains(run, WideDensity(stack, *parts))
    if run.apart or not target.go_native() or target.native is None:
        return None
    return NativeChains(run, target.native)
