"""Integrators of Hamilton's equations dw = M^-1 m dt, dm = grad log p dt: palindromes of kicks and drifts.

    leapfrog        kick 1/2, drift 1, kick 1/2                                one gradient a step
    minimum error   kick b, drift 1/2, kick 1-2b, drift 1/2, kick b            two gradients a step, for larger steps

Both are reversible, keep volume, and have an energy error of second order in the step. The gradient at the end of a step is
the one at the start of the next, so a step takes one gradient a drift.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from credibly.errors import InputError

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # theta (C, D) -> log likelihood (C,), gradient of log p (C, D)

# McLachlan's two-stage scheme: the b for which the error term of third order is smallest.
_ROOT = (2 * 326**0.5 + 36) ** (1 / 3)
_B = 0.5 - _ROOT / 12 + 1 / (6 * _ROOT)


@dataclass(frozen=True)
class Integrator:
    """Lengths of the kicks (of the momentum) and of the drifts (of the position) in between, in parts of a step."""

    name: str
    kicks: tuple[float, ...]
    drifts: tuple[float, ...]

    @property
    def gradients(self) -> int:
        """Gradients that one step takes."""
        return len(self.drifts)

    def step(
        self, theta: Tensor, momentum: Tensor, gradient: Tensor, size: Tensor, inverse_mass: Tensor | None, evaluate: Evaluate
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """One step of theta, momentum (C, D) with the gradient at theta; size is (C, 1), inverse_mass (D,) or None for 1.

        Returns theta, momentum, gradient and the log likelihood (C,) at the end.
        """
        momentum = momentum + (self.kicks[0] * size) * gradient
        for drift, kick in zip(self.drifts, self.kicks[1:]):
            velocity = momentum if inverse_mass is None else momentum * inverse_mass
            theta = theta + (drift * size) * velocity
            log_likelihood, gradient = evaluate(theta)
            momentum = momentum + (kick * size) * gradient
        return theta, momentum, gradient, log_likelihood


LEAPFROG = Integrator("leapfrog", (0.5, 0.5), (1.0,))
MINIMUM_ERROR = Integrator("minimum-error", (_B, 1 - 2 * _B, _B), (0.5, 0.5))
INTEGRATORS = {i.name: i for i in (LEAPFROG, MINIMUM_ERROR)}


def integrator(name: str) -> Integrator:
    """By name."""
    if name not in INTEGRATORS:
        raise InputError("integrator", f"found {name!r}", f"Pass one of {', '.join(INTEGRATORS)}")
    return INTEGRATORS[name]
