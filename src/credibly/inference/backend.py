"""The backend that runs the arithmetic of a run. It is selected once, before the first step, and only here.

| backend | selected for | what it runs |
|---|---|---|
| `cpp` | stacks of small Linear layers on a CPU, of any width for minibatch steps | C++ (`backends.cpp`) |
| `cuda` | the same small stacks under HMC on a GPU | one CUDA kernel per call (`backends.cuda`) |
| `torch` | every other network and density | torch: eager, compiled, or replayed as a CUDA graph |

`cpp` and `cuda` run full trajectories or blocks of steps per call, so nothing returns to Python in between. The
Triton units of a residual network belong to the network itself (`networks.fused_unit`) and run under `torch`.
`compile=False` always selects eager torch. Row weights are supported by `torch`, and by `cpp` up to the widths of
full-batch steps. All backends agree to rounding, and tests check that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from credibly.backends.cpp import wide
from credibly.backends.cpp.api import Scheme
from credibly.backends.cpp.density import CppDensity
from credibly.backends.cpp.in_use import library
from credibly.backends.cpp.stack import Stack
from credibly.backends.cpp.wide import WideDensity, supports_wide
from credibly.backends.cuda.density import CudaDensity
from credibly.core.chain_noise import ChainNoise, LargeNoise
from credibly.core.compilation import Compile, compiled
from credibly.core.inputs import Tensors
from credibly.core.rng import MANY, fill_normal
from credibly.gaussians.mass import InverseMass
from credibly.problem import Problem

# Rows of a batch times parameters up to which one thread is faster than several.
ONE_THREAD = 2**22
# Number of weights from which C++ steps that generate their own noise beat those that read it from memory.
SOME = 2**11


class FusedDensity(Protocol):
    """A density whose trajectories run in one call."""

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log likelihood (C,) and gradient of the log density (C, D)."""

    def run(
        self, state: Tensors, size: Tensor, inverse_mass: InverseMass, steps: Sequence[int], scheme: Scheme
    ) -> None:
        """Take each chain through its number of integrator steps, in place."""

    def steps_per_call(self, chains: int) -> int:
        """Return how many steps one call may take, so that Ctrl-C is answered in time."""


@dataclass(frozen=True)
class Backend:
    """The implementation of one run.

    Attributes:
        name: "torch", "cpp" or "cuda".
        density: what evaluates the density in C++ or CUDA; None for torch.
        compile: whether torch steps are compiled: True, False or "auto".
    """

    name: str
    compile: Compile
    density: Any = None

    @property
    def fused(self) -> bool:
        """Whether full trajectories or blocks of steps run outside Python."""
        return self.density is not None

    @property
    def trajectories(self) -> FusedDensity:
        """The density as `select_for_trajectories` selected it."""
        density: FusedDensity = self.density
        return density

    def compile_step(
        self,
        function: Callable[..., Any],
        calls: int,
        device: torch.device,
        values: int = 0,
        *,
        short: bool = False,
        always: bool = False,
    ) -> Callable[..., Any]:
        """Return a step of the torch backend, compiled if that pays off for `calls` calls on `values` parameters.

        Args:
            short: the step is so short that the code between its kernels is compiled too.
            always: compile in any case, for variants of a step that is already compiled.
        """
        mode = False if self.fused else True if always else self.compile
        return compiled(function, mode, calls, device, values, short=short)


TORCH = Backend("torch", False)


def select_for_trajectories(problem: Problem, weights: tuple[float, float], compile: Compile) -> Backend:
    """Select the backend of full-batch gradients and HMC trajectories. All rows must be in this process."""
    parts = (problem.layout, problem.x, problem.y, problem.likelihood, problem.prior, weights)
    if compile is not False and problem.micro_batch is None:
        density: FusedDensity | None = CppDensity.of(problem.forward.cpp_stack, *parts, problem.sample_weight)
        if density is not None:
            return Backend("cpp", compile, density)
        if problem.device.type == "cuda" and problem.sample_weight is None:
            density = CudaDensity.of(problem.forward.small_stack, *parts)
            if density is not None:
                return Backend("cuda", compile, density)
    return Backend("torch", compile)


def select_for_minibatches(
    problem: Problem, weights: tuple[float, float], compile: Compile, *, wide: Stack | None, one_by_one: bool
) -> Backend:
    """Select the backend of SGLD and SGHMC steps without an adapted preconditioner and without control variates.

    Args:
        problem, weights: the density and its inverse temperatures.
        compile: the method's setting.
        wide: the network of `wide_stack`, if the noise of the run is generated inside the step.
        one_by_one: whether chains take their steps one after another.
    """
    if compile is not False:
        parts = (problem.x, problem.y, problem.likelihood, problem.prior, weights)
        if wide is not None:
            return (
                Backend("cpp", compile, WideDensity(wide, *parts))
                if library() is not None
                else Backend("torch", compile)
            )
        if not one_by_one and problem.micro_batch is None:
            density = CppDensity.of(problem.forward.cpp_stack, problem.layout, *parts, problem.sample_weight)
            if density is not None:
                return Backend("cpp", compile, density)
    return Backend("torch", compile)


def select_for_training(
    problem: Problem, weights: tuple[float, float], compile: Compile, theta: Tensor, batch: int
) -> Backend:
    """Select the backend of training steps of the parameters theta (M, D) on minibatches of `batch` rows."""
    alone = len(theta) < torch.get_num_threads() and batch * theta.shape[1] > ONE_THREAD
    if compile is not False and not alone and theta.is_contiguous() and theta.dtype == problem.layout.dtype:
        parts = (problem.layout, problem.x, problem.y, problem.likelihood, problem.prior, weights)
        # Objectives are means over rows, so the weights have a mean of 1.
        density = CppDensity.of(problem.forward.cpp_stack, *parts, problem.relative_weight)
        if density is not None:
            return Backend("cpp", compile, density)
    return Backend("torch", compile)


def wide_stack(problem: Problem) -> Stack | None:
    """Return the network if C++ minibatch steps of any width apply to it.

    This also decides how the run's noise is generated, whether or not the C++ library is available.
    """
    forward = problem.forward
    if forward.looped or forward.stack is None or forward.module is not problem.layout.module:
        return None
    if forward.precision is not None or problem.sample_weight is not None:
        return None
    stack = Stack.of(forward.module, problem.layout, max_width=math.inf)
    return stack if supports_wide(stack, problem.x, problem.y, problem.likelihood, problem.prior) else None


def select_noise(
    seed: int,
    purpose: str,
    chains: range,
    dim: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    one_by_one: bool,
    compile: Compile,
    inside: bool,
) -> ChainNoise | LargeNoise:
    """Return the noise of minibatch steps: counter-based if that is faster, else from torch's generators.

    `inside` is whether C++ steps may generate it themselves. The choice depends on network, dtype and device, never on
    whether the C++ library is available.
    """
    if device.type == "cpu" and dtype == torch.float32 and dim >= (min(SOME, MANY) if inside else MANY):
        fill = wide.fill_normal if compile is not False and library() is not None else fill_normal
        return LargeNoise(seed, purpose, chains, dim, one_by_one=one_by_one, fill=fill)
    return ChainNoise(seed, purpose, chains, dim, device=device, dtype=dtype)
