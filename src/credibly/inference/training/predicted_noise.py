"""Rescale the noise that a network predicts, by held-out rows.

A network that predicts its noise underestimates it on the rows that it has fitted, as a learned scale does; early
stopping only picks the best compromise between mean and noise. Methods that take learned noise from held-out rows
therefore multiply the predicted scale by the factor, the same for all rows and members, that maximises

    sum_i v_i log mean_m p(y_i | x_i, w_m)

over the rows i that decided early stopping, with weights v_i and the members m that have not seen them. The factor
becomes part of the weights: it is added to the biases of the outputs that are the log of the squared scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.core.rows import sum_rows
from credibly.inference.training.held_out_noise import Unseen, outputs_at
from credibly.problem import Problem

# Log factors to try, first coarsely and then in between: factors from 0.4 to 7.
LOWEST, HIGHEST, STEP, FINE = -1.0, 2.0, 0.1, 0.005
# Number of rows of the trial that locates the biases.
TRIAL = 3


def with_rescaled_noise(problem: Problem, theta: Tensor, unseen: Unseen) -> tuple[Tensor, float | None]:
    """Return members (M, D) with the predicted scale times the factor of highest held-out density, and the factor.

    The factor is None, and the members unchanged, if the network does not predict a scale or its outputs have no biases
    of their own.
    """
    place = scale_biases(problem, theta[:1])
    if place is None:
        return theta, None
    outputs = [(part, outputs_at(part, theta[list(members)])) for part, members in unseen if members]

    def density(log_factor: float) -> float:
        total = 0.0
        for part, output in outputs:
            scaled = part.likelihood.with_scale_factor(output, log_factor)
            rows = part.likelihood.log_prob(scaled, part.y.double(), {})
            mixture = torch.logsumexp(rows, 0, keepdim=True) - math.log(len(rows))
            total += float(sum_rows(mixture, part.sample_weight))
        return total

    best = 0.0
    for low, high, step in ((LOWEST, HIGHEST, STEP), (-STEP, STEP, FINE)):
        best = max((best + low + index * step for index in range(round((high - low) / step) + 1)), key=density)
    moved = theta.clone()
    moved[:, place] += 2 * best
    return moved, math.exp(best)


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
