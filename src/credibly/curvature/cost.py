"""The cost of an exact Fisher information: a backward pass, and a square matrix per row, for every output value."""

from __future__ import annotations

import logging
import math

import torch

from credibly.core.inputs import map_inputs
from credibly.curvature.scores import Fisher
from credibly.problem import Problem

log = logging.getLogger("credibly")
# Size of a row's Fisher root, in values, from which it reduces the rows per block.
MANY = 2**16
# Multiplications and additions per second and thread, or of a GPU, at best: they bound the time from below.
CPU_RATE, GPU_RATE = 1e11, 1e14
# Estimated seconds from which a warning about a long pass is logged.
LONG = 120.0


def output_size(problem: Problem) -> tuple[int, int]:
    """Return (elements, width) of a row's output: positions with a distribution of their own, and values of each."""
    layout, row = problem.layout, map_inputs(lambda t: t[:1], problem.sample.x)
    with torch.no_grad():
        weights = layout.read(layout.module)
        theta = torch.cat([weights, weights.new_zeros(layout.dim - layout.network_dim)])
        output = problem.likelihood.arrange(problem.forward(theta.unsqueeze(0), row), 1)
    return math.prod(output.shape[2:-1]), int(output.shape[-1])


def values_per_row(problem: Problem, fisher: Fisher) -> int:
    """Return the number of values of one row's Fisher root if they matter for memory, else 0."""
    if fisher.kind != "exact":
        return 0
    elements, width = output_size(problem)
    values = elements * width * width
    return values if values >= MANY else 0


def warn_if_long(problem: Problem, fisher: Fisher, parameters: int, rows_at_once: int) -> int:
    """Log a warning if the backward passes of a curvature must take minutes; return their number.

    Args:
        problem: the density.
        fisher: which Fisher information.
        parameters: those whose curvature is computed.
        rows_at_once: rows per block.
    """
    elements, width = output_size(problem)
    each = fisher.samples if fisher.kind == "sampled" else 1 if fisher.kind == "empirical" else elements * width
    passes = each * math.ceil(problem.n / rows_at_once)
    # A backward pass multiplies and adds every row with every parameter at least twice.
    rate = CPU_RATE * torch.get_num_threads() if problem.device.type == "cpu" else GPU_RATE
    seconds = 4.0 * each * problem.n * parameters / rate
    if seconds > LONG and fisher.kind == "exact":
        log.warning(
            "curvature: %s values per row of output take %s backward passes over blocks of %s rows, more than %s "
            'minutes. fisher="sampled" takes %s passes; random="last layer" and fewer rows help, too',
            f"{elements * width:,}",
            f"{passes:,}",
            f"{rows_at_once:,}",
            f"{seconds / 60:,.0f}",
            f"{math.ceil(problem.n / rows_at_once):,}",
        )
    return passes
