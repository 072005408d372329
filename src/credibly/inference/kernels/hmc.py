"""Hamiltonian Monte Carlo: integrators, momentum refresh and Metropolis correction.

    dw = M^-1 m dt,   dm = grad log p dt

    leapfrog        kick 1/2, drift 1, kick 1/2                                one gradient per step
    minimum error   kick b, drift 1/2, kick 1-2b, drift 1/2, kick b            two gradients per step, for larger steps

Both integrators are reversible, preserve volume, and have an energy error of second order in the step size. The
gradient at the end of a step is the one at the start of the next, so a step needs one gradient per drift.

    H(w, m) = -log p(w) + 1/2 m' M^-1 m          accept with probability min(1, exp(H(w, m) - H(w', m')))

Energy differences are taken in float64, for likelihood, prior and kinetic energy separately: they are small differences
of large sums. A proposal whose energy is not finite, or has grown by more than a thousand, is a divergence and is
rejected. A rejected proposal repeats the current point. With a partial refresh (Horowitz 1991) the momentum persists
from one trajectory to the next and is reversed at a rejection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.core.tempering import weighted_sum
from credibly.gaussians.mass import InverseMass, fresh_momentum, velocity

# theta (C, D) -> log likelihood (C,), gradient of log p (C, D).
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]

# McLachlan's two-stage scheme: the b with the smallest third-order error term.
_ROOT = (2 * 326**0.5 + 36) ** (1 / 3)
_B = 0.5 - _ROOT / 12 + 1 / (6 * _ROOT)


@dataclass(frozen=True)
class Integrator:
    """A palindrome of kicks (of the momentum) and drifts (of the position), as fractions of a step."""

    name: str
    kicks: tuple[float, ...]
    drifts: tuple[float, ...]

    @property
    def coefficients(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Kicks and drifts."""
        return self.kicks, self.drifts

    @property
    def gradients(self) -> int:
        """Gradients per step."""
        return len(self.drifts)

    def step(
        self,
        theta: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        size: Tensor,
        inverse_mass: InverseMass,
        evaluate: Evaluate,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take one step from theta, momentum (C, D) and the gradient at theta.

        `size` is (C, 1), `inverse_mass` is M^-1 (`gaussians.mass`). Returns theta, momentum, gradient and log
        likelihood (C,) at the end.
        """
        momentum = momentum + (self.kicks[0] * size) * gradient
        for drift, kick in zip(self.drifts, self.kicks[1:]):
            theta = theta + (drift * size) * velocity(momentum, inverse_mass)
            log_likelihood, gradient = evaluate(theta)
            momentum = momentum + (kick * size) * gradient
        return theta, momentum, gradient, log_likelihood


LEAPFROG = Integrator("leapfrog", (0.5, 0.5), (1.0,))
MINIMUM_ERROR = Integrator("minimum-error", (_B, 1 - 2 * _B, _B), (0.5, 0.5))
INTEGRATORS = {i.name: i for i in (LEAPFROG, MINIMUM_ERROR)}


def integrator(name: str) -> Integrator:
    """Return the integrator with the given name."""
    check_choice("integrator", name, INTEGRATORS)
    return INTEGRATORS[name]


# Growth of the energy beyond which a trajectory counts as divergent.
DIVERGENT = 1000.0


class State(NamedTuple):
    """The state of C chains: all (C, D) or (C,), with the parts of the density in float64."""

    theta: Tensor
    gradient: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    momentum: Tensor


class Info(NamedTuple):
    """The outcome of a transition, each (C,)."""

    acceptance: Tensor
    accepted: Tensor
    divergent: Tensor
    energy: Tensor
    energy_error: Tensor


def kinetic(momentum: Tensor, inverse_mass: InverseMass) -> Tensor:
    """Return 1/2 m' M^-1 m, (C,) in float64."""
    if isinstance(inverse_mass, Tensor):
        squares = torch.square(momentum) * inverse_mass
    else:
        squares = momentum * velocity(momentum, inverse_mass)
    return 0.5 * squares.sum(-1, dtype=torch.float64)


def refresh(momentum: Tensor, noise: Tensor, inverse_mass: InverseMass, fraction: float) -> Tensor:
    """Return sqrt(1 - fraction) of the old momentum plus noise ~ N(0, M) for the rest.

    Fraction 1 forgets the old one.
    """
    fresh = fresh_momentum(noise, inverse_mass)
    return fresh if fraction >= 1 else (1 - fraction) ** 0.5 * momentum + fraction**0.5 * fresh


def metropolis(
    state: State,
    proposal: State,
    inverse_mass: InverseMass,
    uniform: Tensor,
    weights: tuple[float | Tensor, float],
) -> tuple[State, Info]:
    """Return the next state: the proposal if it is accepted, else the current state with its momentum reversed.

    `state.momentum` is the momentum at the start of the trajectory; uniform (C,) lies in [0, 1). The weight of the
    likelihood may differ between chains, (C,).
    """
    before, after = kinetic(state.momentum, inverse_mass), kinetic(proposal.momentum, inverse_mass)
    potential = _potential(state, weights)
    error = (after - before) + (_change(proposal.log_likelihood, state.log_likelihood, weights[0]))
    # H' - H.
    error = error + _change(proposal.log_prior, state.log_prior, weights[1])
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


def _potential(state: State, weights: tuple[float | Tensor, float]) -> Tensor:
    """Return -log p, (C,)."""
    return -weighted_sum(state.log_likelihood, weights[0], state.log_prior, weights[1])


def _change(after: Tensor, before: Tensor, weight: float | Tensor) -> Tensor:
    """Return the contribution of one part of the density to the energy difference."""
    return weight * (before - after) if isinstance(weight, Tensor) or weight != 1 else before - after
