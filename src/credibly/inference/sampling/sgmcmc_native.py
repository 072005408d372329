"""Minibatch steps of SG-MCMC that run outside Python: blocks of steps in C++, and single steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.wide import WideDensity
from credibly.core.chain_noise import ChainNoise, LargeNoise
from credibly.core.cuda_graphs import Branches, Replayed
from credibly.inference.training.batches import Batches


def fused_steps(
    density: Any,
    state: tuple[Tensor | None, ...],
    noise: ChainNoise | LargeNoise,
    batches: Batches | None,
    scale: float,
    t: int,
    controls: Tensor,
) -> int:
    """Take steps in one call of the C++ backend and return how many: a wide network generates its own noise.

    `state` is theta, momentum, gradient, the root of the preconditioner and the log likelihood.
    """
    count, rows, chains = len(controls), None, len(state[0]) if state[0] is not None else 0
    if isinstance(noise, ChainNoise):
        count = min(count, noise.left(t))
    if isinstance(density, WideDensity) and batches is not None:
        count = min(count, density.steps_per_call(chains, batches.batch))
    if batches is not None:
        count = min(count, batches.left(t))
        rows = batches.span(t, count)
    drawn: Any = noise.keys(t, count) if isinstance(noise, LargeNoise) else noise.span(t, count)
    density.minibatch_steps(*state, rows, scale, drawn, controls[:count].contiguous())
    return count


def replayed_step(step: Callable[..., Any], chains: int, device: torch.device, *, one_by_one: bool) -> Replayed | None:
    """Return the step as a CUDA graph; chains that are evaluated in turn run side by side in it. None on a CPU."""
    if device.type != "cuda":
        return None
    if not one_by_one or chains == 1:
        return Replayed(step, device)
    branches = Branches(device)

    def of_all(*tensors: Any) -> None:
        buffers, (rows, noise, controls) = tensors[:-3], tensors[-3:]

        def of(c: int) -> Callable[[], None]:
            one = slice(c, c + 1)
            own = None if rows is None else rows[one]
            return lambda: step(*(b[one] for b in buffers), own, noise[one], controls)

        branches([of(c) for c in range(chains)])

    return Replayed(of_all, device)
