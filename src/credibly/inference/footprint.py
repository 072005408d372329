"""How much memory methods need, as lower bounds: a run that cannot fit is refused before it starts."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import torch

from credibly.core.memory import check_fits, in_words
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.problem import Problem

# Buffers of the size of a chain in a sampler: position, momentum and gradient, and a copy of each for rejections.
CHAIN_BUFFERS = 6
FEWER = 'make fewer parameters random, such as random="head.*"'


def check_training(
    name: str, problem: Problem, *, parameters: float, copies: float = 3, result: float = 0.0, batch: int = 1
) -> None:
    """Raise if training does not fit into memory.

    Args:
        name: name of the method.
        problem: the problem it is fitted to.
        parameters: number of values that are optimised at a time, over all members.
        copies: number of further tensors of that size: a gradient and the optimiser's moments.
        result: number of further values that the posterior takes.
        batch: rows per step.
    """
    size = problem.layout.dtype.itemsize
    needs = {
        "weights": parameters * size,
        "gradient and optimiser": copies * parameters * size,
        "posterior": result * size,
        # Views and identities among the layers' outputs share memory, and autocast halves it.
        "activations": 0.5 * batch * problem.forward.row_width * size,
    }
    advice = f"Use fewer members or a lower rank if the method has them, {FEWER}, or use MAP"
    if needs["activations"] > sum(needs.values()) / 2:
        advice = "Pass a smaller batch_size, or accumulate=8 for eight microbatches per step"
    what = f"{name} of {problem.dim:,} parameters"
    check_fits("problem", what, needs, problem.device, advice)


def check_sampling(
    name: str,
    problem: Problem | Density,
    chains: int,
    draws: int,
    draw_dtype: str | None,
    out: str | os.PathLike[str] | None,
) -> None:
    """Raise if draws or state of the chains do not fit into memory, or if draws do not fit on the disk of `out`."""
    dtype = problem.layout.dtype if isinstance(problem, Problem) else problem.dtype
    stored: torch.dtype = getattr(torch, draw_dtype) if draw_dtype else dtype
    every = float(chains) * draws * problem.dim * stored.itemsize
    state = float(CHAIN_BUFFERS) * chains * problem.dim * dtype.itemsize
    what = f"{name} with {chains} chains of {draws} draws of {problem.dim:,} parameters"
    # With a folder, one draw of every chain is in memory at a time, or as many as make a shard.
    needs = {"draws": every if out is None else every / draws, "state of the chains": state}
    ways = f"use fewer chains, or {FEWER}"
    if out is None:
        ways = (
            f'Pass out="run/" to stream the draws to disk ({in_words(state + every / draws)} of memory), '
            f"use fewer chains or draws, or {FEWER}"
        )
    check_fits("draws" if out is None else "chains", what, needs, problem.device, ways[0].upper() + ways[1:])
    if out is None:
        return
    folder = Path(out).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if every > free:
        raise InputError(
            "out",
            f"the draws of {what} need {in_words(every)} on disk, {in_words(free)} are free in {str(folder)!r}",
            f'Use fewer draws, draw_dtype="bfloat16", another folder, or {FEWER}',
        )


def training_rows(batch: int, accumulate: int) -> int:
    """Return the number of rows whose activations are in memory at a time."""
    return math.ceil(batch / accumulate)


def smaller_run(problem: Problem, count: int, batch: int, buffers: int = CHAIN_BUFFERS) -> str:
    """Return the number of chains or members, or the batch size, that should fit after running out of memory.

    An estimate: `buffers` vectors per chain, and activations with their gradients; at most half of what failed.
    """
    size, forward = problem.layout.dtype.itemsize, problem.forward
    state, row = buffers * problem.dim * size, 2 * forward.row_width * size
    whole = torch.cuda.get_device_properties(problem.device).total_memory if problem.device.type == "cuda" else math.inf
    room = 0.8 * whole
    at_once = 1 if forward.looped else count
    each = state + (0 if forward.looped else row * batch)
    chains = (room - (row * batch if forward.looped else 0)) / each
    rows = (room - count * state) / (at_once * row)
    fewer, smaller = (
        max(1, min(most // 2, int(found) if found < most else most // 2))
        for most, found in ((count, chains), (batch, rows))
    )
    ways = ([f"{fewer} instead of {count}"] if count > 1 else []) + ([f"batch_size={smaller}"] if batch > 1 else [])
    return " or ".join(ways)
