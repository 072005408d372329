"""The outputs of networks that predict the scale of their noise, and the biases that shift it."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.problem import Problem

# Number of rows of the trial that locates the biases.
TRIAL = 3


def outputs_at(problem: Problem, theta: Tensor) -> Tensor:
    """Return the outputs of parameter vectors (M, D) at all rows, (M, N, ..., K) in float64."""
    with torch.no_grad():
        blocks = [problem.likelihood.arrange(problem.forward(theta, x), 1) for x, _, _ in problem.blocks(len(theta))]
    return torch.cat(blocks, 1).double()


def scale_biases(problem: Problem, theta: Tensor) -> slice | None:
    """Return where theta (1, D) has the biases that are added to the log of the squared scale; None if nowhere.

    They are the second half of the last parameter of the network if adding to them changes the outputs as a factor of
    the scale does.
    """
    if not problem.likelihood.predicts_scale:
        return None
    last = max((e for e in problem.layout.entries if e.stop <= problem.layout.network_dim), key=lambda e: e.stop)
    if len(last.shape) != 1 or last.shape[0] % 2:
        return None
    place = slice(last.stop - last.shape[0] // 2, last.stop)
    few = problem.subset(torch.arange(min(TRIAL, problem.n), device=problem.device))
    moved = theta.clone()
    moved[:, place] += 2.0
    before, after = (outputs_at(few, point) for point in (theta, moved))
    if before.shape[-1] != last.shape[0]:
        return None
    expected = problem.likelihood.with_scale_factor(before, 1.0)
    return place if torch.allclose(after, expected, rtol=1e-3, atol=1e-3) else None
