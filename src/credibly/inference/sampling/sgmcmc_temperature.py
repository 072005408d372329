"""The temperature of SG-MCMC chains, which shows a step that is too large: 1 if they sample the posterior.

    kinetic           mean over coordinates of m^2, whose expectation is 1
    configurational   -(w - c) . g / D for any fixed c, whose expectation is 1 by integration by parts

g is the gradient of the log density, here its minibatch estimate, which does not depend on w's own error; c is the
prior's mean. Gradient noise heats both; a step near the limit of stability heats or cools individual directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credibly.inference.target import ProblemTarget, Target


class Temperatures:
    """Means over the draws of C chains.

    Attributes:
        sums: kinetic and configurational temperature of each chain, summed over draws, and their number, (C, 3).
    """

    def __init__(self, target: Target, chains: int, *, overdamped: bool) -> None:
        loc = target.problem.prior.loc if isinstance(target, ProblemTarget) else torch.zeros(1)
        self.centre: Tensor | float = loc if bool(loc.any()) else 0.0
        self.overdamped = overdamped
        self.sums = torch.zeros(chains, 3, dtype=torch.float64, device=target.device)

    def add(self, theta: Tensor, momentum: Tensor, gradient: Tensor) -> None:
        """Add a draw (C, D) with its momentum and gradient."""
        for c in range(len(theta)):
            # One chain at a time, to limit the memory of temporaries.
            self.sums[c, 0] += torch.linalg.vector_norm(momentum[c], dtype=torch.float64) ** 2 / theta.shape[1]
            self.sums[c, 1] -= torch.dot((theta[c] - self.centre), gradient[c]).double() / theta.shape[1]
        self.sums[:, 2] += 1

    def history(self, sums: Tensor) -> dict[str, Any]:
        """Return the temperatures of all chains for the record, from their sums. SGLD has no kinetic one."""
        count = sums[:, 2].clamp_min(1)
        if not bool(sums[:, 2].any()):
            return {}
        found = {"configurational": [round(float(v), 4) for v in sums[:, 1] / count]}
        if not self.overdamped:
            found["kinetic"] = [round(float(v), 4) for v in sums[:, 0] / count]
        return {"temperature": found}
