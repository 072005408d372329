"""The No-U-Turn sampler: trajectories that double until they turn back (Hoffman & Gelman 2014; Betancourt 2017).

A trajectory of 2^j points grows by another 2^j, forwards or backwards in time at random, until a part of it makes a
U-turn, a point diverges, or the maximum depth is reached. With p the momenta of a run of consecutive points and rho
their sum, a run turns when

    p_first' M^-1 rho <= 0    or    p_last' M^-1 rho <= 0

This is tested for each run of 2^k points that the doubling produces, and across its two halves: the left half with the
first point of the right one, and the right half with the last point of the left one. A new half that turns in itself,
or that diverges, is discarded.

The next state is drawn from the points with weights exp(-H): within a new half in proportion to the weights, between
the halves with probability min(1, W_new / W_old), which favours points far from the start. Both leave the density
invariant. All energies are differences from the start in float64, separately for likelihood, prior and kinetic energy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from credibly.core.inputs import Tensors
from credibly.gaussians.mass import InverseMass, velocity
from credibly.inference.kernels.hmc import DIVERGENT, Info, State, kinetic

# One integrator step of the signed sizes (C,) from theta, momentum and gradient. Chains that are not marked (C,) rest.
TakeStep = Callable[[Tensors, Tensor, Tensor], State]


class Segment(NamedTuple):
    """Momenta of a run of consecutive points in the order of integration, (C, D): first, last and sum."""

    first: Tensor
    last: Tensor
    total: Tensor


class Tree(NamedTuple):
    """The size of the trajectories, each (C,): doublings, integrator steps, whether the maximum depth ended them."""

    depth: Tensor
    steps: Tensor
    capped: Tensor


def uniforms(depth: int) -> int:
    """Return how many uniform numbers a transition takes per chain.

    For every doubling its direction and the choice between the halves, then one number per new point.
    """
    return 2 * depth + (1 << depth) - 1


def join(a: Segment, b: Segment) -> Segment:
    """Return the segment of a followed by b."""
    return Segment(a.first, b.last, a.total + b.total)


def turns(a: Segment, b: Segment, inverse_mass: InverseMass) -> Tensor:
    """Return whether a followed by b makes a U-turn, from end to end or across the halves, (C,)."""
    turned = torch.zeros(len(a.total), dtype=torch.bool, device=a.total.device)
    for first, last, total in (
        (a.first, b.last, a.total + b.total),
        (a.first, b.first, a.total + b.first),
        (a.last, b.last, a.last + b.total),
    ):
        speed = velocity(total, inverse_mass)
        turned |= ((first * speed).sum(-1) <= 0) | ((last * speed).sum(-1) <= 0)
    return turned


def energy_change(start: State, point: State, inverse_mass: InverseMass, weights: tuple[float, float]) -> Tensor:
    """Return H(point) - H(start), (C,), infinite where it is not a number."""
    error = kinetic(point.momentum, inverse_mass) - kinetic(start.momentum, inverse_mass)
    error = error + weights[0] * (start.log_likelihood - point.log_likelihood)
    error = error + weights[1] * (start.log_prior - point.log_prior)
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def transition(
    start: State,
    take_step: TakeStep,
    size: Tensor,
    inverse_mass: InverseMass,
    uniform: Tensor,
    weights: tuple[float, float],
    depth: int,
) -> tuple[State, Info, Tree]:
    """Grow a trajectory for every chain and return the state drawn from it.

    All chains that still grow have the same number of points, so they take their steps together; the others wait.

    Args:
        start: the states, with fresh momenta.
        take_step: see `TakeStep`.
        size: step sizes (C,).
        inverse_mass: M^-1.
        uniform: numbers in [0, 1), (C, `uniforms(depth)`).
        weights: inverse temperatures of likelihood and prior.
        depth: maximum number of doublings.
    """
    left: Tensors = (start.theta, start.momentum, start.gradient)
    right = left
    total, chosen = start.momentum, start
    growing = torch.ones(len(size), dtype=torch.bool, device=size.device)
    moved, divergent = torch.zeros_like(growing), torch.zeros_like(growing)
    log_weight = torch.zeros(len(size), dtype=torch.float64, device=size.device)
    accepted, steps, doublings, drawn_error, worst = (torch.zeros_like(log_weight) for _ in range(5))
    for level in range(depth):
        if not bool(growing.any()):
            break
        forward = uniform[:, 2 * level] < 0.5
        ahead = forward.unsqueeze(1)
        at = tuple(torch.where(ahead, last, first) for last, first in zip(right, left))
        signed = torch.where(forward, size, -size)
        # Finished runs of the new half, each shorter than the one before it, as the digits of a binary counter: a new
        # point merges with every run of its own length, and each merger is tested for a turn.
        runs: list[Segment] = []
        half_weight = torch.full_like(log_weight, -torch.inf)
        candidate, candidate_error = chosen, drawn_error
        for n in range(2**level):
            point = take_step(at, signed, growing)
            at = (point.theta, point.momentum, point.gradient)
            error = energy_change(start, point, inverse_mass, weights)
            steps = steps + growing
            accepted = accepted + torch.where(growing, torch.exp(-error.clamp(min=0)), 0.0)
            worst = torch.where(growing, torch.maximum(worst, error), worst)
            divergent = divergent | (growing & (error > DIVERGENT))
            growing = growing & ~divergent
            half_weight = torch.logaddexp(half_weight, -error)
            # Written so that a point of weight 0 is never drawn.
            pick = uniform[:, 2 * depth + 2**level - 1 + n] < torch.exp(-error - half_weight)
            candidate, candidate_error = _where(pick, point, candidate), torch.where(pick, error, candidate_error)
            segment, k = Segment(point.momentum, point.momentum, point.momentum), 0
            while n >> k & 1:
                growing = growing & ~turns(runs[-1], segment, inverse_mass)
                segment, k = join(runs.pop(), segment), k + 1
            runs.append(segment)
            if not bool(growing.any()):
                break
        else:
            # Chains that still grow have a new half without a turn.
            swap = growing & (uniform[:, 2 * level + 1] < torch.exp(half_weight - log_weight))
            chosen, drawn_error = _where(swap, candidate, chosen), torch.where(swap, candidate_error, drawn_error)
            moved = moved | swap
            log_weight = torch.where(growing, torch.logaddexp(log_weight, half_weight), log_weight)
            doublings = doublings + growing
            old = Segment(torch.where(ahead, left[1], right[1]), torch.where(ahead, right[1], left[1]), total)
            growing = growing & ~turns(old, runs[0], inverse_mass)
            total = total + runs[0].total
            right = tuple(torch.where(ahead, new, end) for new, end in zip(at, right))
            left = tuple(torch.where(ahead, end, new) for new, end in zip(at, left))
    before = kinetic(start.momentum, inverse_mass) - weights[0] * start.log_likelihood - weights[1] * start.log_prior
    info = Info(accepted / steps.clamp(min=1), moved, divergent, before + drawn_error, worst)
    return chosen, info, Tree(doublings, steps, growing)


def _where(pick: Tensor, a: State, b: State) -> State:
    return State(*(torch.where(pick.unsqueeze(1) if x.ndim > 1 else pick, x, y) for x, y in zip(a, b)))
