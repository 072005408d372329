"""MC-Dropout: dropout training as variational inference (Gal & Ghahramani 2016).

q(w) masks the inputs of a weight matrix, W = diag(z) M with z ~ Bernoulli(keep). With a prior N(0, s^2) on the weights

    KL(q || p) = keep / (2 s^2) ||M||^2 + 1/(2 s^2) ||b||^2 + const

and torch's dropout divides by keep, so the weights that are trained are W = keep M and the penalty on them is
||W||^2 / (2 s^2 keep). Minimising -ELBO is dropout training with that decay: it follows from N, the prior, the noise and the
rates, and nobody types it. What is minimised here is -ELBO / N (tempered parts as in the problem):

    (1/N) [ -(1/T_lik) sum_i log p(y_i | x_i, W, z_i) + (1/T_prior) ( sum_l ||W_l||^2 / (2 s^2 keep_l) + ||b||^2 / (2 s^2) ) ]

For a Gaussian likelihood of precision tau, dividing it by tau gives (1/N) sum 1/2 ||y - f||^2 + lambda ||.||^2 with
lambda = keep l^2 / (2 N tau) on M and l = 1/s.

Concrete dropout (Gal, Hron & Kendall 2017) learns the rates: masks are relaxed to be differentiable, and the entropy of the
masks, K_l H(rate_l) for K_l masked inputs, joins the objective.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credibly.dropout_posterior import DropoutPosterior
from credibly.errors import InputError, TrainingError
from credibly.likelihoods import Likelihood
from credibly.methods.dropout_objective import DropoutObjective, Dropped
from credibly.methods.method import Method, fit_with_rows, initial, partial_result
from credibly.methods.training import Data, Trained, Training, split, train
from credibly.norms import find_running_statistics, replace_batchnorm
from credibly.posterior import Model
from credibly.priors import Normal
from credibly.problem import Problem
from credibly.world import Mesh

Choice = tuple[float | None, float | None]  # a rate and a precision; None for the network's own, or learned

GRID_VALIDATION = 0.2  # rows held out to choose rate and tau, unless `validation` says otherwise


@dataclass(frozen=True, kw_only=True)
class MCDropout(Training, Method):
    """MC-Dropout: dropout kept on at prediction, as a draw of the weights; the weight decay follows from the prior.

    Args:
        rate: probability of dropping; None keeps the rates of the network's own layers (0.05 for inserted ones). Several
            rates are compared by held-out log-likelihood, trained as one batch, and the best is fitted again on all rows.
        insert: name patterns of Linear and convolution layers before which dropout is inserted, "*" for all of them.
        tau: observation precision for a Gaussian likelihood with learned scale: a number fixes it, several are compared as
            the rates are. None learns it with the weights, or takes the likelihood's own fixed scale.
        concrete: learn the rate of each place by Concrete Dropout; `rate` is then where it starts.
        init: "network", "fresh", "prior" or a (1, D) tensor.
    """

    name: ClassVar[str] = "dropout"
    rate: float | Sequence[float] | None = None
    insert: str | Sequence[str] | None = None
    tau: float | Sequence[float] | None = None
    concrete: bool = False
    init: str | Tensor = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("rate", self.rate), ("tau", self.tau)):
            if value is not None and not _several(value):
                raise InputError(name, f"found {value!r}", "Pass a number, or several of them")
        for rate in _several(self.rate):
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1:
                raise InputError("rate", f"found {rate!r}", "Pass a number between 0 and 1")
        for tau in _several(self.tau):
            if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not math.isfinite(tau) or tau <= 0:
                raise InputError("tau", f"found {tau!r}", "Pass a positive number")
        if self.concrete and len(_several(self.rate)) > 1:
            raise InputError(
                "rate",
                f"found {self.rate!r} with concrete=True",
                "Concrete Dropout learns the rates; pass one to start from",
            )

    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> DropoutPosterior:
        """Dropout training with the derived decay; the history has the objective and its two parts."""
        return fit_with_rows(self, problem, seed, out, progress, self._fit)

    def _fit(
        self, problem: Problem, seed: int, mesh: Mesh, out: str | os.PathLike[str] | None, progress: bool | None
    ) -> DropoutPosterior:
        network = Dropped(problem, self.insert, _several(self.rate)[0] if self.rate is not None else None)
        self._check(problem, network)
        choices: list[Choice] = list(itertools.product(_several(self.rate) or (None,), _several(self.tau) or (None,)))
        history: dict[str, Any] = {}
        best = choices[0]
        data = split(problem, self, seed)
        start = initial(problem, self.init, 1, seed)
        if len(choices) > 1:
            best, history = self._search(problem, network, choices, start, seed, progress, out, mesh)
        done, objective = self._train(problem, network, [best], start, data, seed, "MC-Dropout", progress, out, mesh)
        rates = objective.final_rates(done.theta)[0]
        history |= {**done.history, "rates": rates, "tau": best[1]}
        return self._posterior(problem, network, done.theta[0], rates, seed, history)

    @classmethod
    def from_trained(
        cls, net: nn.Module, data: Any, likelihood: Likelihood, *, rate: float | None = None, insert: str | Sequence[str] | None = None
    ) -> DropoutPosterior:  # fmt: skip
        """Wraps a network that was trained elsewhere with dropout. BatchNorm keeps its running statistics.

        Args:
            net: the trained network, with dropout layers (or name with `insert` where dropout was applied).
            data: (x, y), best rows that it was not trained on. Only shapes are taken from them, and the noise scale when the
                likelihood's is "learned": the one with the highest log-likelihood under dropout.
            likelihood: what y is given the network's output.
        """
        if isinstance(net, nn.Module) and find_running_statistics(net):
            net = replace_batchnorm(net, "frozen")
        problem = Problem(net, data, likelihood, Normal())
        method = cls(rate=rate, insert=insert)
        network = Dropped(problem, insert, rate)
        theta = initial(problem, "network", 1, 0)[0]
        posterior = method._posterior(problem, network, theta, network.rates, 0, {"from_trained": True})
        if "log_scale" in problem.likelihood.parameters():
            theta = _with_best_scale(posterior, problem)
            posterior = method._posterior(problem, network, theta, network.rates, 0, {"from_trained": True})
        return posterior

    def _check(self, problem: Problem, network: Dropped) -> None:
        if not problem.prior.is_normal or bool((problem.prior.loc[: problem.layout.network_dim] != 0).any()):
            raise InputError(
                "prior", "MC-Dropout's decay is derived for Normal priors centred at zero", "Use priors.Normal(scale)"
            )
        if self.tau is not None and "log_scale" not in problem.likelihood.parameters():
            name = type(problem.likelihood).__name__
            raise InputError(
                "tau",
                f"found {self.tau!r} with {name}",
                'It is for likelihoods with a learned scale, such as Gaussian("learned")',
            )
        alpha = next((site.name for site in network.sites if site.alpha), None)
        if alpha is not None and (self.concrete or len(_several(self.rate)) > 1):
            raise InputError(
                "rate",
                f"{alpha!r} is alpha dropout, whose rescaling goes with one rate",
                "Pass one rate, without concrete; compare rates by fits of their own",
            )

    def _train(
        self, problem: Problem, network: Dropped, choices: list[Choice], start: Tensor, data: Data, seed: int,
        title: str, progress: bool | None, out: str | os.PathLike[str] | None, mesh: Mesh,
    ) -> tuple[Trained, DropoutObjective]:  # fmt: skip
        theta = start.expand(len(choices), -1).clone()
        rates = torch.tensor([network.rate_row(rate) for rate, _ in choices], dtype=theta.dtype, device=theta.device)
        for row, (_, tau) in enumerate(choices):
            if tau is not None:
                theta[row, problem.layout.network_dim :] = -0.5 * math.log(tau)
        batch = self.plan(data.count)[1]
        fixed = self.tau is not None
        objective = DropoutObjective(
            problem, network, data.count, rates, batch=batch, seed=seed, concrete=self.concrete, fixed_scale=fixed
        )
        if self.concrete:
            theta = torch.cat([theta, torch.logit(rates)], -1)

        def partial(reached: Tensor, error: TrainingError) -> DropoutPosterior:
            rates_then = objective.final_rates(reached)[error.member]  # of the member that failed
            history = {"error": str(error)}
            return self._posterior(problem, network, reached[error.member], rates_then, seed, history, "partial")

        with partial_result(out, partial):
            done = train(
                problem, objective, theta, self, data, seed=seed, title=title, shared_batches=True, progress=progress,
                mesh=mesh,
            )  # fmt: skip
        return done, objective

    def _search(
        self, problem: Problem, network: Dropped, choices: list[Choice], start: Tensor, seed: int, progress: bool | None,
        out: str | os.PathLike[str] | None, mesh: Mesh,
    ) -> tuple[Choice, dict[str, Any]]:  # fmt: skip
        """Every pair of rate and tau trained side by side on part of the rows, scored on the rest."""
        options = Training(validation=self.validation or GRID_VALIDATION, batch_size=None)
        held = split(problem, options, seed)
        rows = Data(held.rows, None)
        done, objective = self._train(
            problem, network, choices, start, rows, seed, f"grid of {len(choices)}", progress, out, mesh
        )
        assert held.held_out is not None
        with torch.no_grad():
            scores = objective.score(done.theta, held.held_out)
        table = [
            {"rate": rate, "tau": tau, "held_out_log_density": float(score)}
            for (rate, tau), score in zip(choices, scores)
        ]
        return choices[int(scores.argmax())], {"grid": table}

    def _posterior(
        self, problem: Problem, network: Dropped, theta: Tensor, rates: dict[str, float], seed: int, history: dict[str, Any], status: str = "complete"
    ) -> DropoutPosterior:  # fmt: skip
        record = self.record(problem, seed, history, status)
        return DropoutPosterior(Model.of(problem), theta[: problem.dim].clone(), rates, network.inserted, record)


def _several(value: float | Sequence[float] | None) -> tuple[float, ...]:
    return () if value is None else (value,) if isinstance(value, (int, float)) else tuple(value)


def _with_best_scale(posterior: DropoutPosterior, problem: Problem) -> Tensor:
    """The weights with the noise scale, one for all targets, that gives the data the highest log density under dropout."""
    theta = posterior.theta.clone()
    residual = (posterior.predict(problem.x).functions() - problem.likelihood.restore(problem.y)).square().mean().sqrt()
    best, best_value = theta, -math.inf
    for log_scale in torch.log(residual) + torch.linspace(-3, 1, 41, device=theta.device):
        theta[problem.layout.network_dim :] = log_scale
        trial = DropoutPosterior(posterior.model, theta, posterior.rates, posterior.inserted, posterior.record)
        value = float(trial.predict(problem.x, passes=50).log_prob(problem.likelihood.restore(problem.y)).mean())
        if value > best_value:
            best, best_value = theta.clone(), value
    return best
