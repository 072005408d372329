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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credibly.distributed.world import Mesh
from credibly.errors import InputError, TrainingError
from credibly.inference.method import Method, fit_with_rows, initial, partial_result
from credibly.inference.training.dropout_objective import DropoutObjective, Dropped
from credibly.inference.training.loop import Data, Trained, Training, folds, split, train
from credibly.likelihoods import Likelihood
from credibly.networks.normalisation import find_running_statistics, replace_batchnorm
from credibly.posterior.dropout import DropoutPosterior
from credibly.posterior.model import Model
from credibly.priors.elementwise import Normal
from credibly.problem import Problem

Rate = float | Mapping[str, float]
Choice = tuple[Rate | None, float | None]  # rates and a precision; None for the network's own, or learned

GRID_VALIDATION = 0.2  # rows held out to choose rate and tau, unless `validation` or `folds` says otherwise
HELD_OUT = "held-out"
SCALES = 51  # noise scales that are tried by held-out rows, a factor of 1.16 apart, up to 1.6 times the spread of the targets
LOWEST, HIGHEST = -7.0, 0.5


@dataclass(frozen=True, kw_only=True)
class MCDropout(Training, Method):
    """MC-Dropout: dropout kept on at prediction, as a draw of the weights; the weight decay follows from the prior.

    Args:
        rate: probability of dropping; None keeps the rates of the network's own layers (0.05 for inserted ones). Or rates by
            place, {"0": 0.0, "*": 0.1}: of the first pattern that a layer's name matches, 0 to spare it. A list of several
            is compared by held-out log-likelihood, trained as one batch, and the best is fitted again on all rows.
        insert: name patterns of Linear and convolution layers before which dropout is inserted, "*" for all of them.
        tau: observation precision for a Gaussian likelihood with learned scale: a number fixes it, several are compared as
            the rates are. None learns it with the weights, or takes the likelihood's own fixed scale. "held-out" takes, for
            each rate, the one that gives held-out rows the highest density, and fits again with it: a noise learned with
            the weights is that of the training rows, which is too small where the network has taken some of it for signal.
        folds: parts of the rows that are held out in turn to compare by, each part by fits to the others. 1 holds out the
            fraction `validation`, a fifth by default, once.
        concrete: learn the rate of each place by Concrete Dropout; `rate` is then where it starts.
        init: "network", "fresh", "prior" or a (1, D) tensor.
    """

    name: ClassVar[str] = "dropout"
    rate: Rate | Sequence[Rate] | None = None
    insert: str | Sequence[str] | None = None
    tau: float | Sequence[float] | str | None = None
    folds: int = 1
    concrete: bool = False
    init: str | Tensor = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("rate", self.rate), ("tau", self.tau)):
            if value is not None and not _several(value):
                raise InputError(name, f"found {value!r}", "Pass a number, or several of them")
        for rate in _several(self.rate):
            _check_rate(rate, self.concrete)
        if isinstance(self.tau, str) and self.tau != HELD_OUT:
            raise InputError("tau", f"found {self.tau!r}", f"Pass a positive number, several of them, or {HELD_OUT!r}")
        for tau in self._taus():
            if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not math.isfinite(tau) or tau <= 0:
                raise InputError("tau", f"found {tau!r}", "Pass a positive number")
        if isinstance(self.folds, bool) or not isinstance(self.folds, int) or self.folds < 1:
            raise InputError("folds", f"found {self.folds!r}", "Pass a whole number from 1 up")
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
        network = Dropped(
            problem, self.insert, next((r for r in _several(self.rate) if isinstance(r, (int, float))), None)
        )
        self._check(problem, network)
        choices: list[Choice] = list(itertools.product(_several(self.rate) or (None,), self._taus() or (None,)))
        history: dict[str, Any] = {}
        best = choices[0]
        data = split(problem, self, seed)
        start = initial(problem, self.init, 1, seed)
        if len(choices) > 1 or self.tau == HELD_OUT:
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
        names = [site.name for site in network.sites]
        for pattern in {pattern for rate in _several(self.rate) if isinstance(rate, Mapping) for pattern in rate}:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    "rate", f"pattern {pattern!r} matches no place of dropout", f"They are {', '.join(names)}"
                )
        if self.folds > problem.n:
            raise InputError(
                "folds", f"found {self.folds} for {problem.n} rows", "Pass at most as many as there are rows"
            )
        alpha = next((site.name for site in network.sites if site.alpha), None)
        by_place = any(isinstance(rate, Mapping) for rate in _several(self.rate))
        if alpha is not None and (self.concrete or by_place or len(_several(self.rate)) > 1):
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
        fixed = choices[0][1] is not None
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
        """Every pair of rate and tau trained side by side on part of the rows, scored on the rest; and that for every fold."""
        parts = self._parts(problem, seed)
        data = Data(parts[0].rows, None)
        if len(parts) > 1:
            resampled = torch.stack([torch.as_tensor(part.rows) for part in parts for _ in choices])
            data = Data(resampled.shape[1], None, resampled=resampled)
        title = f"grid of {len(choices)}" + (f" by {len(parts)} folds" if len(parts) > 1 else "")
        done, objective = self._train(
            problem, network, choices * len(parts), start, data, seed, title, progress, out, mesh
        )
        scales = self._scales(problem)
        scores = torch.zeros(
            1 if scales is None else len(scales), len(choices), dtype=done.theta.dtype, device=problem.device
        )
        with torch.no_grad():
            for place, part in enumerate(parts):
                assert part.held_out is not None
                mine = slice(place * len(choices), (place + 1) * len(choices))
                scores += objective.densities(done.theta, mine, part.held_out, scales) / len(parts)
        if scales is not None:
            choices = [
                (rate, float(torch.exp(-2 * scales[scores[:, k].argmax()]))) for k, (rate, _) in enumerate(choices)
            ]
        best = scores.amax(0)
        table = [
            {"rate": rate if rate is None else _plain(rate), "tau": tau, "held_out_log_density": float(score)}
            for (rate, tau), score in zip(choices, best)
        ]
        return choices[int(best.argmax())], {"grid": table}

    def _parts(self, problem: Problem, seed: int) -> list[Data]:
        """Rows to train on and those held out, for every fold; as many in each."""
        if self.folds == 1:
            return [split(problem, Training(validation=self.validation or GRID_VALIDATION, batch_size=None), seed)]
        return folds(problem, problem.n // self.folds, seed)[: self.folds]

    def _taus(self) -> tuple[float, ...]:
        return () if isinstance(self.tau, str) else _several(self.tau)

    def _scales(self, problem: Problem) -> Tensor | None:
        """Log noise scales to try on held-out rows."""
        if self.tau != HELD_OUT:
            return None
        spread = problem.y.double().std().log()
        return spread + torch.linspace(LOWEST, HIGHEST, SCALES, dtype=torch.float64, device=problem.device)

    def _posterior(
        self, problem: Problem, network: Dropped, theta: Tensor, rates: dict[str, float], seed: int, history: dict[str, Any], status: str = "complete"
    ) -> DropoutPosterior:  # fmt: skip
        record = self.record(problem, seed, history, status)
        return DropoutPosterior(Model.of(problem), theta[: problem.dim].clone(), rates, network.inserted, record)


def _several(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, float, Mapping)) else tuple(value)


def _plain(rate: Rate) -> Any:
    return dict(rate) if isinstance(rate, Mapping) else rate


def _check_rate(rate: Any, concrete: bool) -> None:
    values = list(rate.values()) if isinstance(rate, Mapping) else [rate]
    for value in values:
        number = not isinstance(value, bool) and isinstance(value, (int, float))
        if not number or not 0 <= value < 1 or (value == 0 and (concrete or not isinstance(rate, Mapping))):
            raise InputError("rate", f"found {value!r}", "Pass a number between 0 and 1")
    if not any(values):
        raise InputError("rate", f"found {rate!r}", "Pass a rate above 0 for one of the places at least")


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
