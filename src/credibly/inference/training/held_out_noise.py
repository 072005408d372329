"""Learned noise from held-out rows.

The joint mode of weights and noise underestimates the noise: it is that of residuals which the weights have made
small. For a linear model with P weights and a flat prior its variance is RSS / N, although the expectation of RSS is
(N - P) sigma^2; a network on a small table may fit most of its rows exactly. Methods that keep only a mode therefore
take the noise that maximises the log predictive density of held-out rows,

    sum_i v_i log mean_m p(y_i | x_i, w_m, s) + log p(s),

where v_i is the weight of row i, m are the members that have not seen it and s the likelihood's own parameters, such as
a log scale: one value for all members. What the members get wrong together counts as noise, and what they disagree
about does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.core.rows import sum_rows
from credibly.curvature.evidence import own_log_prior
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.inference.training.data import Data, folds
from credibly.inference.training.loop import train
from credibly.inference.training.objectives import Objective
from credibly.inference.training.scale_outputs import outputs_at
from credibly.inference.training.settings import Training
from credibly.problem import Problem

TRAINING, HELD_OUT = "training", "held-out"
# Number of folds whose rows are predicted by a fit to the others, if training itself holds out none.
FOLDS = 10
# Log scales to try relative to the members' mean, first coarsely and then in between: factors from 0.14 to 3,000 in
# steps of 0.2 %.
LOWEST, HIGHEST, STEP, FINE = -2.0, 8.0, 0.1, 0.002

Unseen = Sequence[tuple[Problem, Sequence[int]]]
Outputs = Sequence[tuple[Problem, Tensor]]


def check_noise_from(value: str) -> None:
    """Raise unless the setting is one of the two."""
    check_choice("noise_from", value, (TRAINING, HELD_OUT))


def held_out_noise(problem: Problem, theta: Tensor, unseen: Unseen) -> Tensor:
    """Return the likelihood's own parameters with the highest density of held-out rows, (E,) in float64.

    Args:
        problem: the problem that the members were fitted to.
        theta: the members, (M, D).
        unseen: held-out rows, each part with the members that have not seen it.
    """
    outputs = [(part, outputs_at(part, theta[list(members)])) for part, members in unseen if members]
    noise = theta[:, problem.layout.network_dim :].double().mean(0)
    return noise_of_outputs(problem, theta[0], noise, outputs)


def noise_of_outputs(problem: Problem, theta: Tensor, noise: Tensor, outputs: Outputs) -> Tensor:
    """Return the likelihood's own parameters with the highest density of the mixture over outputs, (E,) in float64.

    Args:
        problem: the problem that the weights were fitted to.
        theta: weights (D,), which the prior of the own parameters may depend on.
        noise: the own parameters (E,) around which the search is.
        outputs: rows and the arranged outputs there of each component of the mixture, (M, N, ..., K) in float64.
    """
    theta = theta.double().unsqueeze(0)
    network = theta[0, : problem.layout.network_dim]
    sign, noise = problem.likelihood.noise_sign, noise.double()

    def density(tried: Tensor) -> float:
        extra = problem.extra(with_noise(problem, theta, tried))
        total = float(own_log_prior(problem.prior, network, tried))
        for part, output in outputs:
            rows = part.likelihood.log_prob(output, part.y.double(), extra)
            mixture = torch.logsumexp(rows, 0, keepdim=True) - math.log(len(rows))
            total += float(sum_rows(mixture, part.sample_weight))
        return total

    # Several parameters, one per target, interact only through the weights of the members: two rounds suffice.
    for coordinate in [*range(len(noise))] * (1 if len(noise) == 1 else 2):
        for low, high, step in ((LOWEST, HIGHEST, STEP), (-STEP, STEP, FINE)):
            tried = [noise.clone() for _ in range(round((high - low) / step) + 1)]
            for index, candidate in enumerate(tried):
                candidate[coordinate] += sign * (low + index * step)
            noise = max(tried, key=density)
    return noise


def with_noise(problem: Problem, theta: Tensor, noise: Tensor) -> Tensor:
    """Return members (M, D) that all have the given parameters of the likelihood, (E,)."""
    network = theta[:, : problem.layout.network_dim]
    return torch.cat([network, noise.to(theta.dtype).expand(len(theta), -1)], -1)


def with_held_out_noise(
    problem: Problem,
    theta: Tensor,
    data: Data,
    objective: Callable[[int], Objective],
    options: Training,
    begin: Tensor,
    *,
    seed: int,
    progress: bool | None = None,
    mesh: Mesh | None = None,
) -> tuple[Tensor, list[float]]:
    """Return members (M, D) with the noise of rows that they have not seen, and that noise.

    Args:
        problem: all rows.
        theta: the members, fitted to the training rows of `data`.
        data: its held-out rows are used if it has any; otherwise those of `FOLDS` fits to all folds but one.
        objective: the loss of such a fit, given its number of rows.
        options: training settings, also those of such a fit.
        begin: starting points of such fits, taken in turn.
        seed: seed of the folds and the shuffles.
        progress: whether to show a progress bar.
        mesh: processes that share the rows of each minibatch.
    """
    if problem.dim == problem.layout.network_dim or not problem.likelihood.noise_sign:
        return theta, []
    if data.stops:
        noise = held_out_noise(problem, theta, data.unseen(len(theta)))
        return with_noise(problem, theta, noise), noise.tolist()
    if problem.n == 1:
        raise InputError(
            "noise_from",
            f"must be {TRAINING!r} with a single row, got {HELD_OUT!r}",
            "Or give the likelihood a fixed scale",
        )
    count = min(FOLDS, problem.n)
    parts = folds(problem, problem.n // count, seed)[:count]
    rows = torch.stack([torch.as_tensor(part.rows) for part in parts])
    others = Data(rows.shape[1], None, resampled=rows)
    title = f"noise by {count} folds"
    start = torch.stack([begin[k % len(begin)] for k in range(count)])
    done = train(
        problem,
        objective(others.count),
        start,
        options,
        others,
        seed=seed,
        title=title,
        progress=progress,
        mesh=mesh,
    ).theta
    unseen = [(part.held_out, [fold]) for fold, part in enumerate(parts) if part.held_out is not None]
    noise = held_out_noise(problem, done, unseen)
    return with_noise(problem, theta, noise), noise.tolist()
