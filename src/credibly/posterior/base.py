"""Posterior: the result of a fit. It predicts, saves itself and gives draws of the weights."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from credibly.conformal.calibration import Calibration, Settings, calibrate
from credibly.conformal.loo import LooCalibration, LooPredictive, loo_calibrate
from credibly.conformal.predictive import CalibratedPredictive, GuaranteedPredictive
from credibly.core.html import fact_table
from credibly.core.inputs import blank_row
from credibly.errors import InputError, StoreError
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout
from credibly.posterior.botorch_model import botorch_mixture, botorch_model
from credibly.posterior.model import Model
from credibly.posterior.saving import save
from credibly.predictive.base import Predictive
from credibly.predictive.streamed import StreamedPredictive
from credibly.priors.gaussian import GaussianPrior
from credibly.problem import Problem
from credibly.storage.record import Record

# Every posterior class by its kind, filled in as the classes are defined. A run folder names its kind, so
# `credibly.load` can only build classes that are in here.
KINDS: dict[str, type[Posterior]] = {}


def _export(module: str) -> Any:
    """Return a module of `credibly.export`, which builds on posteriors and is loaded when it is first used."""
    return importlib.import_module(f"credibly.export.{module}")


class Posterior(ABC):
    """A distribution over the weights of one model.

    Subclasses define how it is sampled and what is stored. One that sets `kind` can be loaded from a run folder.
    """

    kind: ClassVar[str]
    # Settings of `predict` that make a draw one function of all rows.
    joint_settings: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls) and KINDS.setdefault(cls.kind, cls) is not cls:
            raise TypeError(f"{cls.__name__}.kind is {cls.kind!r}, which {KINDS[cls.kind].__name__} has already")

    def __init__(self, model: Model | None, record: Record) -> None:
        self._model = model
        self.record = record

    @property
    def model(self) -> Model:
        """Network, layout and likelihood."""
        if self._model is None:
            raise InputError("posterior", "is of a density, which has no network", "Use its draws")
        return self._model

    @property
    def layout(self) -> Layout:
        """Where each parameter lies in the flat vector."""
        return self.model.layout

    @property
    def likelihood(self) -> Likelihood:
        """The problem's likelihood."""
        return self.model.likelihood

    def _repr_html_(self) -> str:
        network = {} if self._model is None else {**self.layout.facts(), "likelihood": self.likelihood}
        settings = ", ".join(f"{name}={value!r}" for name, value in self.record.settings.items() if name != "kind")
        facts = {"posterior": repr(self), "method": self.record.method or "none", "settings": settings, **network}
        facts |= {"training rows": f"{self.record.n:,}", "seed": self.record.seed, "status": self.record.status}
        return fact_table(type(self).__name__, facts)

    @abstractmethod
    def predict(self, x: Any, *, grad: bool = False) -> Predictive:
        """Return the Bayesian model average at x.

        With `grad`, x requires a gradient, and moments, uncertainties, log densities, samples of real targets and
        functions are differentiable in it. Quantiles are not.
        """

    @abstractmethod
    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw flat weight vectors, (count, D)."""

    def as_prior(self) -> GaussianPrior:
        """Return this posterior, if it is Gaussian, as the prior of a problem with other data and the same network."""
        raise InputError(
            "as_prior",
            f"the posterior of {self.record.method or self.kind} is not a Gaussian over the weights",
            "Fit BayesByBackprop, Laplace, SWAG or a sampler, whose posteriors offer it",
        )

    def diagnostics(self, x: Any = None, y: Any = None, *, spread: bool = False) -> Any:
        """Return R-hat, ESS and MCSE of chains; see `DrawsPosterior`. Raise for a posterior without chains."""
        raise InputError(
            "diagnostics",
            f"compares chains, and {self.record.method or self.kind} has none: its draws are independent",
            "Judge it on held-out rows: credibly.evaluate(posterior.predict(x), y)",
        )

    def calibrate(
        self,
        x: Any,
        y: Any,
        *,
        groups: Any = None,
        score: str = "auto",
        probabilities: str | None = None,
        fallback: str = "raise",
        allow_empty: bool = False,
        penalty: float = 0.1,
        penalty_from: int = 2,
        seed: int = 0,
    ) -> CalibratedPosterior:
        """Return this posterior with intervals and prediction sets that carry a finite-sample coverage guarantee.

        Split conformal prediction: for new rows exchangeable with the n calibration rows, `interval(level)` and
        `prediction_set(level)` contain y with a probability of at least `level`, however wrong the model is. That is
        an average over rows, not a statement about each x.

        Args:
            x: inputs of calibration rows, which the fit must not have seen.
            y: their targets or labels. A level needs at least level / (1 - level) rows: 9 for 0.9, 99 for 0.99.
            groups: one label per row (strings or numbers), for a guarantee within each group; pass those of the new
                rows to `predict` too.
            score: "pit" or "cqr" for real targets and counts, "aps" or "raps" for labels; "auto" is the first.
            probabilities: "temperature" or "isotonic" to recalibrate class probabilities too; None leaves them.
            fallback: for a group that is unknown or has too few rows: "raise", or "pooled" to use all rows.
            allow_empty: whether prediction sets may be empty, which makes their coverage exact.
            penalty: of "raps", per label in a set beyond `penalty_from`.
            penalty_from: number of labels that "raps" does not penalise.
            seed: of the randomisation of prediction sets.
        """
        settings = Settings(score, probabilities, fallback, allow_empty, penalty, penalty_from, seed)
        own = self.posterior if isinstance(self, CalibratedPosterior) else self
        return CalibratedPosterior(own, calibrate(own.predict(x), y, groups=groups, settings=settings))

    def calibrate_by_loo(
        self,
        problem: Problem,
        *,
        rows: int = 1000,
        score: str = "auto",
        allow_empty: bool = False,
        penalty: float = 0.1,
        penalty_from: int = 2,
        seed: int = 0,
    ) -> CalibratedPosterior:
        """Return this posterior with the intervals and prediction sets of jackknife+, from the training rows alone.

        Every row is scored under the draws reweighted to the posterior without it (PSIS-LOO), so no row is held out and
        nothing is fitted again. With exact weights the coverage is at least 2 level - 1 and in practice close to the
        level. The guarantee is approximate where `calibration.bad_k` of the rows have unreliable weights (Pareto k
        above 0.7). Draws have to be of the posterior: at least 25, at temperature 1.

        Args:
            problem: the problem that was fitted.
            rows: at most this many training rows are scored, chosen at random.
            score: "pit" for real targets, "aps" or "raps" for labels; "auto" is the first.
            allow_empty: whether prediction sets may be empty.
            penalty: of "raps", per label in a set beyond `penalty_from`.
            penalty_from: number of labels that "raps" does not penalise.
            seed: of the chosen rows and the randomisation of prediction sets.
        """
        if any(t != 1 for t in (self.record.tempering or vars(problem.tempering)).values()):
            raise InputError("problem", "is tempered, and leave-one-out weights are defined at T = 1")
        settings = Settings(score, None, "raise", allow_empty, penalty, penalty_from, seed)
        own = self.posterior if isinstance(self, CalibratedPosterior) else self
        y = problem.y if problem.likelihood.support == "class" else problem.likelihood.restore(problem.y)
        found = loo_calibrate(own.predict(problem.x), y, weight=problem.sample_weight, rows=rows, settings=settings)
        return CalibratedPosterior(own, found)

    def as_botorch(self, *, mixture: bool = False, **settings: Any) -> Any:
        """Return this posterior as a BoTorch model, an ensemble of the functions E(y | x, w_s) of its draws.

        A sample of it is one function at all q points, without observation noise, and gradients in X pass through the
        network. It works with acquisition functions that sample (`qLogExpectedImprovement` and the others that start
        with q). The draws are those of `predict(x, **settings)`, chosen once; BoTorch is an optional dependency.

        Args:
            mixture: return a fully Bayesian model instead, as BoTorch's NUTS models are: the mixture over draws of
                N(E(y | x, w_s), Var(y | x, w_s)), with observation noise, for analytic acquisition functions.
            settings: of `predict`, such as the number of draws.
        """
        trial = self.predict(blank_row(self.model.row, self.layout.device), **{**self.joint_settings, **settings})
        return (botorch_mixture if mixture else botorch_model)(trial.source, self.model)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        x: Any = None,
        levels: Sequence[float] | None = None,
        draws: int | None = None,
        seed: int = 0,
        overwrite: bool = False,
    ) -> Any:
        """Write the predictions as one graph that runs without credibly: model.onnx, or model.pt2 of torch.export.

        All draws are constants of the graph, and the number of rows is free. Outputs are named as in `Predictive`:
        mean, variance, aleatoric, epistemic and quantile_0.05 and so on; for labels probabilities, total, aleatoric
        and epistemic. Before the file is put in place it is run on a few rows and compared with `predict`, to 1e-5.
        Returns a record of what was written: inputs, outputs, size, differences and notes.

        Args:
            path: the file, ending in .onnx (needs `credibly[export]`) or .pt2.
            x: rows for the trace and the comparison; None uses random ones. Pass some if inputs are integers.
            levels: probabilities of the quantiles; None is 0.05, 0.5 and 0.95 for Gaussian and Student-t noise.
            draws: number of draws; None uses all stored ones, or as many as `predict` by default.
            seed: seed of draws that are not stored: of Gaussian posteriors, dropout masks and Laplace.
            overwrite: whether to replace an existing file.
        """
        return _export("posteriors").export_posterior(
            self, path, x=x, levels=levels, draws=draws, seed=seed, overwrite=overwrite
        )

    def compress(self, n: int, x: Any, y: Any = None, *, seed: int = 0) -> Posterior:
        """Return a posterior with n of the draws, chosen so that the predictions at x change least.

        The choice minimises the Kullback-Leibler divergence from the model average over all draws, estimated from
        samples of it. `record.history["compressed"]` holds what was lost, measured on other samples: the mean log
        density in nats per row (`log_density_loss`) and the total variation.

        Args:
            n: number of draws to keep.
            x: inputs like those to be predicted, such as the training inputs; up to 300 of them are used.
            y: targets at x; if given, the mean log density before and after is recorded too.
            seed: seed of the samples.
        """
        found: Posterior = _export("compression").compress(self, n, x, y, seed=seed)
        return found

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name."""

    def description(self) -> Any:
        """Return everything else to store, in plain JSON."""
        return None

    @classmethod
    @abstractmethod
    def from_tensors(cls, model: Any, tensors: dict[str, Any], record: Record, description: Any) -> Self:
        """Rebuild the posterior from its `tensors` and `description`."""

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a run folder. `credibly.load(path, net)` then gives bit-for-bit identical predictions."""
        save(self, path, overwrite=overwrite)


class CalibratedPosterior(Posterior):
    """A posterior with the calibration of its intervals and prediction sets, from `calibrate` or `calibrate_by_loo`.

    Attributes:
        posterior: the posterior itself.
        calibration: the scores of the calibration rows.
    """

    kind: ClassVar[str] = "calibrated"

    def __init__(self, posterior: Posterior, calibration: Calibration | LooCalibration) -> None:
        super().__init__(posterior.model, posterior.record)
        self.posterior = posterior
        self.calibration = calibration

    def predict(self, x: Any, *, groups: Any = None, grad: bool = False) -> GuaranteedPredictive:
        """Return predictions at x whose intervals and prediction sets carry the guarantee.

        Args:
            x: inputs.
            groups: one label per row, for a calibration with groups; None for the guarantee over all groups together.
            grad: whether moments and densities are differentiable in x; intervals are not.
        """
        predictive = self.posterior.predict(x, grad=grad)
        if isinstance(predictive, StreamedPredictive) and self.likelihood.support in ("class", "binary"):
            # Their randomisation depends on the inputs of each row.
            found = "must be in memory for prediction sets that carry a guarantee, got a loader"
            raise InputError("x", found, "Predict batch by batch: for x, _ in loader: posterior.predict(x)")
        if isinstance(self.calibration, Calibration):
            return CalibratedPredictive(predictive, self.calibration, groups=groups)
        if groups is not None:
            raise InputError("groups", "must be None: leave-one-out calibrations have no groups")
        return LooPredictive(predictive, self.calibration)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw flat weight vectors, (count, D)."""
        return self.posterior.sample(count, seed=seed)

    def diagnostics(self, x: Any = None, y: Any = None, *, spread: bool = False) -> Any:
        """Return the diagnostics of the posterior's chains."""
        return self.posterior.diagnostics(x, y, spread=spread)

    def as_prior(self) -> GaussianPrior:
        """Return the posterior as a prior, if it is Gaussian. The calibration is no part of it."""
        return self.posterior.as_prior()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the posterior and of the calibration."""
        own = {f"calibration.{name}": value for name, value in self.calibration.arrays().items()}
        return {**self.posterior.tensors(), **own}

    def description(self) -> Any:
        """Return the kind and description of the posterior, and the facts of the calibration."""
        inner = {"kind": self.posterior.kind, "description": self.posterior.description()}
        by = "rows" if isinstance(self.calibration, Calibration) else "loo"
        return {"posterior": inner, "by": by, "calibration": self.calibration.facts()}

    @classmethod
    def from_tensors(cls, model: Any, tensors: dict[str, Any], record: Record, description: Any) -> Self:
        """Rebuild the posterior and its calibration."""
        own = {k.removeprefix("calibration."): v for k, v in tensors.items() if k.startswith("calibration.")}
        rest = {k: v for k, v in tensors.items() if not k.startswith("calibration.")}
        inner = description["posterior"]
        if inner["kind"] not in KINDS:
            raise StoreError(f"path: the manifest is altered (unknown: {inner['kind']!r})")
        posterior = KINDS[inner["kind"]].from_tensors(model, rest, record, inner["description"])
        kind = Calibration if description["by"] == "rows" else LooCalibration
        return cls(posterior, kind.from_dict({**description["calibration"], **own}))

    def __repr__(self) -> str:
        return f"CalibratedPosterior({self.posterior!r}, {self.calibration.rows} calibration rows)"
