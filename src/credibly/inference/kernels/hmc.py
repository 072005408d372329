"""Hamiltonian Monte Carlo: momentum refresh and Metropolis correction around a trajectory.

    H(w, m) = -log p(w) + 1/2 m' M^-1 m          accept with probability min(1, exp(H(w, m) - H(w', m')))

Differences of energies are taken in float64, likelihood, prior and kinetic part each by itself: they are small differences of
large sums. A proposal whose energy is not finite, or has grown by more than a thousand, is a divergence and is rejected. A
rejected proposal repeats the current point. With a partial refresh (Horowitz 1991) the momentum goes on from one trajectory
to the next and turns round at a rejection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DIVERGENT = 1000.0  # growth of the energy beyond which a trajectory has left the level set


class State(NamedTuple):
    """Where C chains stand, and what the next trajectory needs: all (C, D) or (C,); parts of the density in float64."""

    theta: Tensor
    gradient: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    momentum: Tensor


class Info(NamedTuple):
    """What a transition did, each (C,)."""

    acceptance: Tensor
    accepted: Tensor
    divergent: Tensor
    energy: Tensor
    energy_error: Tensor


def kinetic(momentum: Tensor, inverse_mass: Tensor | None) -> Tensor:
    """1/2 m' M^-1 m, (C,) in float64."""
    squares = torch.square(momentum) if inverse_mass is None else torch.square(momentum) * inverse_mass
    return 0.5 * squares.sum(-1, dtype=torch.float64)


def refresh(momentum: Tensor, noise: Tensor, inverse_mass: Tensor | None, share: float) -> Tensor:
    """A new momentum: sqrt(1 - share) of the old one, and noise ~ N(0, M) for the rest; share = 1 forgets the old one."""
    fresh = noise if inverse_mass is None else noise * inverse_mass.rsqrt()
    return fresh if share >= 1 else (1 - share) ** 0.5 * momentum + share**0.5 * fresh


def metropolis(
    state: State, proposal: State, inverse_mass: Tensor | None, uniform: Tensor, weights: tuple[float, float]
) -> tuple[State, Info]:
    """The next state: the proposal where it is accepted, else the state with its momentum turned round.

    `state.momentum` is the one the trajectory began with; uniform (C,) lies in [0, 1).
    """
    before, after = kinetic(state.momentum, inverse_mass), kinetic(proposal.momentum, inverse_mass)
    potential = _potential(state, weights)
    error = (after - before) + (_change(proposal.log_likelihood, state.log_likelihood, weights[0]))
    error = error + _change(proposal.log_prior, state.log_prior, weights[1])  # H' - H
    error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    acceptance = torch.exp(-error.clamp(min=0))
    accepted = uniform < acceptance
    energy = before + potential
    pick = accepted.unsqueeze(1)
    chosen = State(
        torch.where(pick, proposal.theta, state.theta),
        torch.where(pick, proposal.gradient, state.gradient),
        torch.where(accepted, proposal.log_likelihood, state.log_likelihood),
        torch.where(accepted, proposal.log_prior, state.log_prior),
        torch.where(pick, proposal.momentum, -state.momentum),
    )
    # An infinite error times an accepted flag of False would be NaN, hence the where.
    return chosen, Info(acceptance, accepted, error > DIVERGENT, torch.where(accepted, energy + error, energy), error)


def _potential(state: State, weights: tuple[float, float]) -> Tensor:
    """-log p, (C,)."""
    likelihood, prior = (
        part if w == 1 else w * part for w, part in zip(weights, (state.log_likelihood, state.log_prior))
    )
    return -(likelihood + prior)


def _change(after: Tensor, before: Tensor, weight: float) -> Tensor:
    """What one part of the density adds to the energy difference."""
    return before - after if weight == 1 else weight * (before - after)
