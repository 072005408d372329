"""Defaults for tables: network, prior, noise, method and its settings, with the reasons for them.

A `Recipe` holds plain values, so it can be stored in a file, and builds a `Problem` from standardised columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.checks import check_choice, check_positive
from credibly.core.rng import global_stream
from credibly.errors import InputError
from credibly.likelihoods import (
    Bernoulli,
    Beta,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Survival,
)
from credibly.likelihoods.continuous import STANDARD
from credibly.methods import METHODS, Method
from credibly.networks.tabular import tabular_mlp
from credibly.networks.zoo import ACTIVATIONS
from credibly.priors.elementwise import Normal
from credibly.problem import Problem
from credibly.tables.targets.tasks import LABELLED

TASKS = ("regression", "classification", "counts", "ordinal", "proportion", "survival")
# The last one is for counts alone.
NOISES = ("learned", "heteroscedastic", "student", "heteroscedastic-student", "poisson")
# Those whose scale is an output of the network.
PREDICTED = ("heteroscedastic", "heteroscedastic-student")
# Those with heavy tails, for which there is no compiled backend.
HEAVY = ("student", "heteroscedastic-student")

# Rows times parameters up to which HMC finishes within about a minute on two cores.
AFFORDABLE = 4_000_000
# The C++ backend supports only the likelihoods of regression and classification; autograd takes several times as long.
SLOWER = 8


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a fit besides the data and the seed.

    Attributes:
        task: "regression", "classification", "counts", "ordinal", "proportion" or "survival".
        hidden: widths of the hidden layers; () is the linear model.
        activation: one of `zoo.ACTIVATIONS`.
        prior_scale: prior standard deviation of the biases; that of the weights is divided by the square root of the
            fan-in. None is 1 for real targets and counts, and 2 for tasks on a logit scale, where confident outputs
            are larger.
        noise: for regression: "learned" (one scale, with a prior), "heteroscedastic" (depends on x), "student" (learned
            scale, heavy tails), "heteroscedastic-student" (both), or a known standard deviation in units of the
            standardised target. For counts: "learned" (negative binomial, with a learned dispersion) or "poisson".
        method: a name in METHODS, or "auto".
        settings: settings of the method that override those of `settings_for`.
        embedding: whether numeric columns have periodic embeddings.
        inputs: encoding of inputs, one of `input_scaling.KINDS`.
        transform: of a regression target, one of `transforms.CHOICES`.
        noise_floor: smallest standard deviation of heteroscedastic noise, in units of the standardised target.
    """

    task: str = "regression"
    hidden: tuple[int, ...] = (50,)
    activation: str = "silu"
    prior_scale: float | None = None
    noise: str | float = "learned"
    method: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    embedding: bool = False
    inputs: str = "standard"
    transform: str = "none"
    noise_floor: float = 0.0

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        check_choice("method", self.method, ("auto", *METHODS))
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.prior_scale is not None:
            check_positive("prior_scale", self.prior_scale)
        if isinstance(self.noise, str):
            if self.noise not in NOISES:
                known = ", ".join(repr(noise) for noise in NOISES)
                raise InputError("noise", f"must be one of {known} or a positive number, got {self.noise!r}")
            if self.noise == "poisson" and self.task != "counts":
                raise InputError("noise", f"'poisson' is for counts, got the task {self.task!r}")
        else:
            check_positive("noise", self.noise)
        if self.noise_floor:
            check_positive("noise_floor", self.noise_floor)
        if not isinstance(self.settings, Mapping):
            raise InputError("settings", f"must be a dict of settings of the method, got {self.settings!r}")

    @property
    def scale(self) -> float:
        """Prior scale with its default filled in."""
        logits = self.task in ("classification", "ordinal", "proportion")
        return self.prior_scale if self.prior_scale is not None else 2.0 if logits else 1.0

    @property
    def compiled(self) -> bool:
        """Whether the compiled sampler has the likelihood; with others a gradient takes several times as long."""
        return self.task == "classification" or (self.task == "regression" and self.noise not in HEAVY)

    def likelihood(self, classes: int | None = None, targets: int = 1) -> Likelihood:
        """Return the likelihood for the given number of classes, or of real targets with a learned scale each."""
        if self.task == "classification":
            return Bernoulli() if classes == 2 else Categorical()
        if self.task != "regression":
            counts = Poisson(unit=None) if self.noise == "poisson" else NegativeBinomial()
            others = {"counts": counts, "proportion": Beta(), "survival": Survival()}
            return Ordinal(classes=classes) if self.task == "ordinal" else others[self.task]
        if isinstance(self.noise, str):
            if self.noise in PREDICTED:
                kind = HeteroscedasticGaussian if self.noise == "heteroscedastic" else HeteroscedasticStudentT
                return kind(floor=self.noise_floor)
            # Targets are standardised, whichever of their rows a problem has.
            return (Gaussian if self.noise == "learned" else StudentT)(scale_prior=STANDARD, per_target=targets > 1)
        return Gaussian(self.noise)

    def outputs(self, targets: int = 1, classes: int | None = None) -> int:
        """Return the number of network outputs."""
        if self.task == "classification":
            assert classes is not None
            return 1 if classes == 2 else classes
        if self.task != "regression":
            return 1
        return targets * (2 if self.noise in PREDICTED else 1)

    def problem(
        self,
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        *,
        sample_weight: npt.NDArray[Any] | None = None,
        classes: int | None = None,
        seed: int = 0,
        device: str | None = None,
        numeric: tuple[int, ...] = (),
    ) -> Problem:
        """Build the problem from standardised inputs (N, P) and targets, (N,) or (N, K), or class indices (N,).

        `sample_weight` are the weights of the rows, (N,); None for ones. `numeric` are the indices of the numeric
        columns, which the recipe may embed.
        """
        targets = y.shape[1] if y.ndim == 2 else 1
        with global_stream(seed, "network"):
            embedded = numeric if self.embedding else ()
            outputs = self.outputs(targets, classes)
            net = tabular_mlp(x.shape[1], self.hidden, outputs, self.activation, embedded=embedded)
        if device is not None:
            net = net.to(device)
        target = torch.from_numpy(np.ascontiguousarray(y, np.int64 if self.task in LABELLED else np.float32))
        return Problem(
            net,
            data=(torch.from_numpy(np.ascontiguousarray(x, np.float32)), target),
            likelihood=self.likelihood(classes, targets),
            prior=Normal(self.scale, fan_in=True),
            sample_weight=sample_weight,
            device=device,
        )

    def resolved(self, rows: int, parameters: int) -> tuple[str, str]:
        """Return the name of the method and why it was chosen."""
        if self.method != "auto":
            return self.method, "requested"
        work = f"{rows:,} rows by {parameters:,} parameters"
        if rows * parameters <= AFFORDABLE // (1 if self.task in ("regression", "classification") else SLOWER):
            return "hmc", f"{work} is small enough for HMC, which samples the posterior without approximating it"
        reason = f"{work} is too large for HMC to finish within about two minutes"
        return "ensemble", f"{reason}; a deep ensemble is the best of the fast methods"

    def fitter(self, rows: int, parameters: int) -> Method:
        """Return the method with its settings. Raise on settings that it does not have."""
        name, why = self.resolved(rows, parameters)
        kind = METHODS[name]
        if name == "dropout" and not self.hidden and "insert" not in self.settings:
            raise InputError("method", "dropout needs a hidden layer", "Pass hidden layers, or another method")
        known = [f for f in getattr(kind, "__dataclass_fields__", {}) if f != "name"]
        for key in self.settings:
            if key not in known:
                advice = f"It has {', '.join(sorted(known))}"
                if self.method == "auto":
                    advice += f'. It was picked by method="auto" ({why}); name the method that the settings are for'
                raise InputError("settings", f"{kind.__name__} has no {key!r}", advice)
        return kind(**settings_for(name, len(self.hidden), self.noise) | dict(self.settings))


def settings_for(method: str, layers: int = 1, noise: str | float = "learned") -> dict[str, Any]:
    """Return the settings of a method for an ordinary table; none for a name that is not in METHODS."""
    return METHODS[method].table_settings(layers, noise) if method in METHODS else {}
