"""Point estimates: maximum likelihood and maximum a posteriori.

    MLE: argmax_w sum_i log p(y_i | x_i, w)          MAP: argmax_w log p_T(w | D)

The same network, the same optimiser, the same minibatches: only the prior sets them apart, so pictures can be compared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from credibly.distributed.world import World
from credibly.inference.method import Method, fit_draws, initial
from credibly.inference.training.loop import Training, split, train
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.posterior.draws import DrawsPosterior
from credibly.problem import Problem


@dataclass(frozen=True, kw_only=True)
class _Point(Training, Method):
    """One set of weights. `init` is "network" (start from the weights given), "fresh", "prior" or a (1, D) tensor."""

    prior_weight: ClassVar[float]
    init: str | Tensor = "network"

    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> DrawsPosterior:
        """One parameter vector as a posterior of a single draw."""

        def work(world: World, shown: bool | None) -> tuple[Tensor, dict[str, Any]]:
            theta, data = initial(problem, self.init, 1, seed), split(problem, self, seed)
            objective = NegativeLogDensity(problem, data.count, self.prior_weight)
            title, mesh = type(self).__name__, world.all_rows()
            done = train(problem, objective, theta, self, data, seed=seed, title=title, progress=shown, mesh=mesh)
            return done.theta.unsqueeze(1), done.history

        return fit_draws(self, problem, seed, out, progress, work)


@dataclass(frozen=True, kw_only=True)
class MLE(_Point):
    """Maximum likelihood: the usual training, with the prior left out."""

    name: ClassVar[str] = "mle"
    prior_weight: ClassVar[float] = 0.0


@dataclass(frozen=True, kw_only=True)
class MAP(_Point):
    """Maximum a posteriori: the mode of the posterior, one set of weights."""

    name: ClassVar[str] = "map"
    prior_weight: ClassVar[float] = 1.0
