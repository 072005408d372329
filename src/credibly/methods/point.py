"""Point estimates: maximum likelihood and maximum a posteriori.

    MLE: argmax_w sum_i log p(y_i | x_i, w)          MAP: argmax_w log p_T(w | D)

Network, optimiser and minibatches are the same: only the prior differs, so the two can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from credibly.inference.method import Fit, initial
from credibly.inference.trained import trained_posterior
from credibly.inference.training.data import split
from credibly.inference.training.held_out_noise import HELD_OUT, TRAINING, check_noise_from, with_held_out_noise
from credibly.inference.training.loop import train
from credibly.inference.training.method import TrainingMethod, partial_draws
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.predicted_noise import with_rescaled_noise
from credibly.likelihoods import Likelihood
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model


@dataclass(frozen=True, kw_only=True)
class _Point(TrainingMethod[DrawsPosterior]):
    """One set of weights.

    Args:
        noise_from: rows that learned noise comes from: "training" (the joint mode with the weights, too small if the
            network has fitted some of the noise) or "held-out" (those of `validation`, or else ten folds, each
            predicted by a further fit to the others).
        init: "network" (start from the weights given), "fresh", "prior" or a (1, D) tensor.
    """

    prior_weight: ClassVar[float]
    noise_from: str = TRAINING
    init: str | Tensor = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_noise_from(self.noise_from)

    def _fit(self, fit: Fit) -> DrawsPosterior:
        """Return one parameter vector as a posterior of a single draw."""
        problem, seed = fit.problem, fit.seed
        with fit.keep_partial(partial(partial_draws, fit)):
            begin, data = initial(problem, self.init, 1, seed), split(problem, self, seed)
            objective = NegativeLogDensity(problem, data.count, self.prior_weight)
            title, mesh = type(self).__name__, fit.world.all_rows()
            # A copy, because training changes it and the folds of held-out noise also start from it.
            theta = begin.clone() if self.noise_from == HELD_OUT else begin
            done = train(
                problem, objective, theta, self, data, seed=seed, title=title, progress=fit.progress, mesh=mesh
            )
            theta, history = done.theta, done.history
            if self.noise_from == HELD_OUT:
                loss = partial(NegativeLogDensity, problem, prior_weight=self.prior_weight)
                theta, history["held_out_noise"] = with_held_out_noise(
                    problem, theta, data, loss, self, begin, seed=seed, progress=fit.progress, mesh=mesh
                )
                if data.stops:
                    theta, factor = with_rescaled_noise(problem, theta, data.unseen(1))
                    history |= {} if factor is None else {"noise_factor": factor}
        return DrawsPosterior(Model.of(problem), theta.unsqueeze(1), fit.record(history))

    @classmethod
    def from_trained(cls, net: nn.Module, data: Any, likelihood: Likelihood) -> DrawsPosterior:
        """Return a network that was trained elsewhere as a posterior of one draw. BatchNorm keeps its statistics.

        Args:
            net: the trained network.
            data: (x, y), preferably rows that it was not trained on. They give the shapes and, if the likelihood's
                scale is "learned", the noise scale.
            likelihood: of y given the network's output.
        """
        return trained_posterior(cls(), [net], data, likelihood)

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return settings that estimate the noise on held-out rows.

        A point estimate has no other source of width, and its training residuals are too small.
        """
        return super().table_settings(layers, noise) | {"noise_from": HELD_OUT}


@dataclass(frozen=True, kw_only=True)
class MLE(_Point):
    """Maximum likelihood: the usual training, without a prior."""

    name: ClassVar[str] = "mle"
    prior_weight: ClassVar[float] = 0.0
    # Without the prior there is a mode, and the scales stay where they start.
    infers_scales: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class MAP(_Point):
    """Maximum a posteriori: the mode of the posterior, one set of weights."""

    name: ClassVar[str] = "map"
    prior_weight: ClassVar[float] = 1.0
