"""MC-Dropout: dropout training as variational inference (Gal & Ghahramani 2016).

q(w) masks the inputs of a weight matrix, W = diag(z) M with z ~ Bernoulli(keep). With a prior N(0, s^2) on the weights,

    KL(q || p) = keep / (2 s^2) ||M||^2 + 1/(2 s^2) ||b||^2 + const

and torch's dropout divides by keep, so the trained weights are W = keep M and the penalty on them is ||W||^2 / (2 s^2
keep). Minimising -ELBO is dropout training with that weight decay: it follows from N, the prior, the noise and the
rates, so the user never chooses it. The loss is -ELBO / N (with the problem's temperatures):

    (1/N) [ -(1/T_lik) sum_i log p(y_i | x_i, W, z_i) + (1/T_prior) ( sum_l ||W_l||^2 / (2 s^2 keep_l) + ||b||^2 / (2
    s^2) ) ]

For a Gaussian likelihood of precision tau, dividing it by tau gives (1/N) sum 1/2 ||y - f||^2 + lambda ||.||^2 with
lambda = keep l^2 / (2 N tau) on M and l = 1/s.

Concrete Dropout (Gal, Hron & Kendall 2017) learns the rates: masks are relaxed to be differentiable, and their entropy,
K_l H(rate_l) for K_l masked inputs, joins the objective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credibly.core.checks import check_integer, check_positive
from credibly.core.inputs import Inputs, map_inputs
from credibly.curvature.evidence import fit_own_parameters
from credibly.errors import InputError, TrainingError
from credibly.inference.method import Fit, initial
from credibly.inference.training.data import Data, folds, split
from credibly.inference.training.dropout_objective import DropoutObjective, Dropped
from credibly.inference.training.held_out_noise import HELD_OUT, noise_of_outputs, with_noise
from credibly.inference.training.loop import train
from credibly.inference.training.method import TrainingMethod
from credibly.inference.training.settings import Training
from credibly.inference.training.trained import Trained
from credibly.likelihoods import Gaussian, Likelihood, StudentT
from credibly.networks.dropout_masks import DROPOUT, masked_copy
from credibly.networks.normalisation import find_running_statistics, replace_batchnorm
from credibly.networks.shared_dropout import shared_dropout
from credibly.posterior.dropout import DropoutPosterior
from credibly.posterior.model import Model
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.storage.record import Record

Rate = float | Mapping[str, float]
# Rates and a precision, or one per target; None for the network's own, or learned.
Choice = tuple[Rate | None, float | list[float] | None]

# Fraction of the rows held out to choose rate and tau, unless `validation` or `folds` is given.
GRID_VALIDATION = 0.2
# Passes by which `from_trained` chooses the noise; fewer if each density of the search, of which every parameter needs
# hundreds, would take more than this many values.
NOISE_PASSES, LEAST_NOISE_PASSES, SEARCHED = 50, 10, 2**25


@dataclass(frozen=True, kw_only=True)
class MCDropout(TrainingMethod[DropoutPosterior]):
    """MC-Dropout: dropout stays on at prediction, as draws of the weights; the weight decay follows from the prior.

    Args:
        rate: dropout probability; None keeps the rates of the network's own layers (0.05 for inserted ones). Or rates
            by layer, {"0": 0.0, "*": 0.1}: the first pattern that matches a layer's name counts, and 0 exempts it.
            Several rates are compared by held-out log-likelihood, trained as one batch, and the best is fitted again on
            all rows.
        insert: name patterns of Linear and convolution layers before which dropout is inserted, "*" for all of them.
        tau: observation precision 1/scale^2 for a Gaussian or StudentT likelihood with a learned scale: a number fixes
            it, several are compared as the rates are. None learns it with the weights, or takes the likelihood's own
            fixed scale. "held-out" takes, for each rate, the one with the highest density on held-out rows (one per
            target with per_target=True), and fits again with it: noise learned with the weights is that of the training
            rows, which is too small if the network has fitted some of it.
        folds: number of folds for that comparison. 1 holds out the fraction `validation`, a fifth by default, once.
        concrete: learn the rate of each layer by Concrete Dropout; `rate` is then the initial value.
        init: "network", "fresh", "prior" or a (1, D) tensor.
    """

    name: ClassVar[str] = "dropout"
    label: ClassVar[str] = "MC-Dropout"
    uses_dropout: ClassVar[bool] = True
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
                raise InputError(name, f"must be a number or several of them, got {value!r}")
        for rate in _several(self.rate):
            _check_rate(rate, self.concrete)
        if isinstance(self.tau, str) and self.tau != HELD_OUT:
            raise InputError("tau", f"must be a positive number, several of them or {HELD_OUT!r}, got {self.tau!r}")
        for tau in self._taus():
            check_positive("tau", tau)
        check_integer("folds", self.folds)
        if self.concrete and len(_several(self.rate)) > 1:
            raise InputError(
                "rate",
                f"must be one initial rate with concrete=True, got {self.rate!r}",
                "Concrete Dropout learns the rates",
            )

    def _fit(self, fit: Fit) -> DropoutPosterior:
        """Train with the derived weight decay; the history has the objective and its two parts."""
        problem, seed = fit.problem, fit.seed
        rates = _several(self.rate)
        number = next((r for r in rates if isinstance(r, (int, float))), None)
        named = [pattern for r in rates if isinstance(r, Mapping) for pattern in r]
        network = Dropped(problem, self.insert, number, named)
        self._check(problem, network)
        choices: list[Choice] = list(itertools.product(_several(self.rate) or (None,), self._taus() or (None,)))
        history: dict[str, Any] = {}
        best = choices[0]
        data = split(problem, self, seed)
        start = initial(problem, self.init, 1, seed)
        if len(choices) > 1 or self.tau == HELD_OUT:
            best, history = self._search(fit, network, choices, start)
        done, objective = self._train(fit, network, [best], start, data, self.label)
        final = objective.final_rates(done.theta)[0]
        history |= {**done.history, "rates": final, "tau": best[1]}
        history |= {"dropout_off": network.inactive} if network.inactive else {}
        return self._posterior(problem, network, done.theta[0], final, fit.record(history))

    def takes_activations(self, problem: Problem) -> bool:
        """Return whether all dropout comes after the frozen body: before it, every pass has its own activations."""
        frozen = problem.split()
        if frozen is None:
            return True
        try:
            trial = map_inputs(lambda t: t[:2], problem.sample.x)
            whole = self._sites(problem.layout.module, trial)
            head = self._sites(frozen.forward.layout.module, frozen.features(trial))
        except InputError:  # a pattern of `insert` that matches no layer of the head
            return False
        return whole == head

    @classmethod
    def from_trained(
        cls,
        net: nn.Module,
        data: Any,
        likelihood: Likelihood,
        *,
        rate: float | None = None,
        insert: str | Sequence[str] | None = None,
    ) -> DropoutPosterior:
        """Wrap a network that was trained elsewhere with dropout. BatchNorm keeps its running statistics.

        Args:
            net: the trained network, with dropout layers (or name with `insert` where dropout was applied).
            data: (x, y), preferably rows that it was not trained on. They give the shapes and any own parameters of the
                likelihood, such as a learned scale: their mode given the network, and for levels of noise the highest
                density under dropout around it.
            likelihood: of y given the network's output.
            rate, insert: as in the settings.
        """
        if isinstance(net, nn.Module) and find_running_statistics(net):
            net = replace_batchnorm(net, "frozen")
        # A network may be frozen as a whole: nothing is trained here.
        frozen = isinstance(net, nn.Module) and not any(p.requires_grad for p in net.parameters())
        problem = Problem(net, data, likelihood, Normal(), random="*" if frozen else None)
        method = cls(rate=rate, insert=insert)
        network = Dropped(problem, insert, rate)
        theta = initial(problem, "network", 1, 0)[0]
        off = {"dropout_off": network.inactive} if network.inactive else {}
        record = method.record(problem, 0, {"from_trained": True, **off})
        posterior = method._posterior(problem, network, theta, network.rates, record)
        if problem.likelihood.parameters():
            theta = _with_noise_of_passes(posterior, problem, fit_own_parameters(problem, theta))
            posterior = method._posterior(problem, network, theta, network.rates, record)
        return posterior

    def _sites(self, module: nn.Module, trial: Inputs) -> set[str]:
        return set(masked_copy(module, self.insert, 0.5, shared=shared_dropout(module, DROPOUT, trial))[1])

    def _check(self, problem: Problem, network: Dropped) -> None:
        if not problem.prior.is_normal or bool((problem.prior.loc[: problem.layout.network_dim] != 0).any()):
            raise InputError("prior", "must be Normal with mean zero for MC-Dropout", "Use priors.Normal(scale)")
        learned = isinstance(problem.likelihood, (Gaussian, StudentT)) and problem.likelihood.scale == "learned"
        if self.tau is not None and not learned:
            name = type(problem.likelihood).__name__
            raise InputError(
                "tau",
                f"must be None with {name}, got {self.tau!r}",
                "It is for Gaussian and StudentT likelihoods with a learned scale; others learn their noise with the "
                "weights",
            )
        names = [site.name for site in network.sites]
        for pattern in {pattern for rate in _several(self.rate) if isinstance(rate, Mapping) for pattern in rate}:
            if not any(site.matches(pattern) for site in network.sites):
                raise InputError(
                    "rate", f"pattern {pattern!r} matches no dropout layer", f"They are {', '.join(names)}"
                )
        if self.folds > problem.n:
            raise InputError("folds", f"must be at most the number of rows, {problem.n}, got {self.folds}")
        alpha = next((site.name for site in network.sites if site.alpha), None)
        by_layer = any(isinstance(rate, Mapping) for rate in _several(self.rate))
        if alpha is not None and (self.concrete or by_layer or len(_several(self.rate)) > 1):
            raise InputError(
                "rate",
                f"must be a single fixed rate for alpha dropout, which {alpha!r} is",
                "Pass one rate, without concrete; compare rates by separate fits",
            )

    def _train(
        self, fit: Fit, network: Dropped, choices: list[Choice], start: Tensor, data: Data, title: str
    ) -> tuple[Trained, DropoutObjective]:
        problem, seed = fit.problem, fit.seed
        theta = start.expand(len(choices), -1).clone()
        rates = torch.tensor([network.rate_row(rate) for rate, _ in choices], dtype=theta.dtype, device=theta.device)
        for row, (_, tau) in enumerate(choices):
            if tau is not None:
                log_scales = [-0.5 * math.log(each) for each in _several(tau)]
                theta[row, problem.layout.network_dim :] = torch.tensor(log_scales, dtype=torch.float64).to(theta)
        batch = self.plan(data.count, problem.stream)[1]
        fixed = choices[0][1] is not None
        objective = DropoutObjective(
            problem, network, data.count, rates, batch=batch, seed=seed, concrete=self.concrete, fixed_scale=fixed
        )
        if self.concrete:
            theta = torch.cat([theta, torch.logit(rates)], -1)

        def partial(reached: Tensor, record: Record, error: TrainingError) -> DropoutPosterior:
            """Return the posterior of the member that failed."""
            rates = objective.final_rates(reached)[error.member]
            return self._posterior(problem, network, reached[error.member], rates, record)

        with fit.keep_partial(partial):
            done = train(
                problem,
                objective,
                theta,
                self,
                data,
                seed=seed,
                title=title,
                shared_batches=True,
                progress=fit.progress,
                mesh=fit.world.all_rows(),
            )
        return done, objective

    def _search(
        self, fit: Fit, network: Dropped, choices: list[Choice], start: Tensor
    ) -> tuple[Choice, dict[str, Any]]:
        """Train every pair of rate and tau as one batch, for every fold, and score it on the held-out rows."""
        problem = fit.problem
        parts = self._parts(problem, fit.seed)
        data = Data(parts[0].rows, None)
        if len(parts) > 1:
            resampled = torch.stack([torch.as_tensor(part.rows) for part in parts for _ in choices])
            data = Data(resampled.shape[1], None, resampled=resampled)
        title = f"grid of {len(choices)}" + (f" by {len(parts)} folds" if len(parts) > 1 else "")
        done, objective = self._train(fit, network, choices * len(parts), start, data, title)
        held_out = [part.held_out for part in parts if part.held_out is not None]
        theta, own = done.theta.clone(), slice(problem.layout.network_dim, problem.dim)
        if self.tau == HELD_OUT:
            for k, (rate, _) in enumerate(choices):
                fitted = theta[k :: len(choices), : problem.dim]  # by the folds
                outputs = [
                    (rows, objective.outputs(theta, k + f * len(choices), rows)) for f, rows in enumerate(held_out)
                ]
                noise = noise_of_outputs(problem, fitted[0], fitted[:, own].double().mean(0), outputs)
                fitted[:, own] = noise.to(theta)
                taus = torch.exp(-2 * noise).tolist()
                choices[k] = rate, taus if len(taus) > 1 else taus[0]
        scores = torch.zeros(len(choices), dtype=theta.dtype, device=problem.device)
        with torch.no_grad():
            for fold, rows in enumerate(held_out):
                members = slice(fold * len(choices), (fold + 1) * len(choices))
                scores += objective.densities(theta, members, rows) / len(parts)
        table = [
            {"rate": rate if rate is None else _plain(rate), "tau": tau, "held_out_log_density": float(score)}
            for (rate, tau), score in zip(choices, scores)
        ]
        return choices[int(scores.argmax())], {"grid": table}

    def _parts(self, problem: Problem, seed: int) -> list[Data]:
        """Return the training and held-out rows of every fold, equally many in each."""
        if self.folds == 1:
            return [split(problem, Training(validation=self.validation or GRID_VALIDATION, batch_size=None), seed)]
        return folds(problem, problem.n // self.folds, seed)[: self.folds]

    def _taus(self) -> tuple[float, ...]:
        return () if isinstance(self.tau, str) else _several(self.tau)

    def _posterior(
        self, problem: Problem, network: Dropped, theta: Tensor, rates: dict[str, float], record: Record
    ) -> DropoutPosterior:
        return DropoutPosterior(Model.of(problem), theta[: problem.dim].clone(), rates, network.inserted, record)

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return dropout before the last layer: a table has few columns, and dropping one loses all it contains."""
        settings = super().table_settings(layers, noise)
        return settings | ({"insert": str(2 * layers), "rate": 0.1} if layers else {})

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return dropout before the last layer, which the demo's networks do not have.

        The toys have one or two inputs.
        """
        return super().demo_settings(quick) | {"insert": "2", "rate": 0.1}


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
            raise InputError("rate", f"must be strictly between 0 and 1, got {value!r}")
    if not any(values):
        raise InputError("rate", f"must be above 0 for at least one layer, got {rate!r}")


def _with_noise_of_passes(posterior: DropoutPosterior, problem: Problem, theta: Tensor) -> Tensor:
    """Return weights (D,) with the noise of the highest density under dropout; `theta` has that without dropout."""
    noise = theta[problem.layout.network_dim :]
    if not problem.likelihood.noise_sign:
        return theta
    affordable = SEARCHED // (len(noise) * problem.y.numel())
    passes = max(LEAST_NOISE_PASSES, min(NOISE_PASSES, affordable))
    predictive = posterior.predict(problem.x, passes=passes)
    outputs = predictive.source.outputs(predictive.x, 0, passes).double()
    best = noise_of_outputs(problem, theta, noise, [(problem, outputs)])
    return with_noise(problem, theta.unsqueeze(0), best)[0]
