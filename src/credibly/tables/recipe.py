"""What is fitted to a table when the user says nothing: network, prior, noise, method and its settings, each for a reason.

A `Recipe` holds plain values, so that it goes into a file and comes back, and makes a `Problem` of standardised columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.checks import check_positive
from credibly.core.rng import global_stream
from credibly.errors import InputError
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, StudentT
from credibly.methods import METHODS, Method
from credibly.networks.zoo import ACTIVATIONS, mlp
from credibly.priors.elementwise import Normal
from credibly.problem import Problem

TASKS = ("regression", "classification")
NOISES = ("learned", "heteroscedastic", "student")

# Rows times parameters up to which the chains of HMC end within about a minute on two cores.
AFFORDABLE = 4_000_000


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a fit beside the data and the seed.

    Attributes:
        task: "regression" or "classification".
        hidden: widths of the hidden layers; () is the linear model.
        activation: one of `zoo.ACTIVATIONS`.
        prior_scale: deviation of the weights before division by the root of the fan-in; biases have it as it is. None is 1
            for a regression on standardised targets and 2 for classes, whose logits are larger where they are sure.
        noise: of a regression: "learned" (one scale, with a prior), "heteroscedastic" (it depends on x), "student" (learned,
            with heavy tails), or a known deviation in units of the standardised target.
        method: a name in METHODS, or "auto".
        settings: of the method, over those that `settings_for` gives.
    """

    task: str = "regression"
    hidden: tuple[int, ...] = (50,)
    activation: str = "silu"
    prior_scale: float | None = None
    noise: str | float = "learned"
    method: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InputError("task", f"found {self.task!r}", f"Pass one of {', '.join(TASKS)}")
        if self.method != "auto" and self.method not in METHODS:
            raise InputError("method", f"found {self.method!r}", f"Pass auto or one of {', '.join(METHODS)}")
        if self.activation not in ACTIVATIONS:
            raise InputError("activation", f"found {self.activation!r}", f"Pass one of {', '.join(ACTIVATIONS)}")
        if self.prior_scale is not None:
            check_positive("prior_scale", self.prior_scale)
        if isinstance(self.noise, str):
            if self.noise not in NOISES:
                known = ", ".join(NOISES)
                raise InputError("noise", f"found {self.noise!r}", f"Pass one of {known}, or a positive number")
        else:
            check_positive("noise", self.noise)
        if not isinstance(self.settings, Mapping):
            raise InputError("settings", f"found {self.settings!r}", "Pass a dict of the method's settings, or None")

    @property
    def scale(self) -> float:
        """Of the prior, as it is used."""
        return self.prior_scale if self.prior_scale is not None else 1.0 if self.task == "regression" else 2.0

    def likelihood(self, classes: int | None = None, targets: int = 1) -> Likelihood:
        """The noise model: of so many real targets, each with its own scale where it is learned, or of so many classes."""
        if self.task == "classification":
            return Bernoulli() if classes == 2 else Categorical()
        if isinstance(self.noise, str):
            if self.noise == "heteroscedastic":
                return HeteroscedasticGaussian()
            return (Gaussian if self.noise == "learned" else StudentT)(per_target=targets > 1)
        return Gaussian(self.noise)

    def outputs(self, targets: int = 1, classes: int | None = None) -> int:
        """How many values the network gives for a row."""
        if self.task == "classification":
            assert classes is not None
            return 1 if classes == 2 else classes
        return targets * (2 if self.noise == "heteroscedastic" else 1)

    def problem(
        self, x: npt.NDArray[Any], y: npt.NDArray[Any], *, classes: int | None = None, seed: int = 0, device: str | None = None
    ) -> Problem:  # fmt: skip
        """The density of standardised inputs (N, P) and targets: (N,) or (N, K) standardised, or labels from 0."""
        targets = y.shape[1] if y.ndim == 2 else 1
        with global_stream(seed, "network"):
            net = mlp(x.shape[1], self.hidden, self.outputs(targets, classes), self.activation)
        if device is not None:
            net = net.to(device)
        target = torch.from_numpy(np.ascontiguousarray(y, np.float32 if self.task == "regression" else np.int64))
        return Problem(
            net, data=(torch.from_numpy(np.ascontiguousarray(x, np.float32)), target),
            likelihood=self.likelihood(classes, targets), prior=Normal(self.scale, fan_in=True), device=device,
        )  # fmt: skip

    def resolved(self, rows: int, parameters: int) -> tuple[str, str]:
        """The name of the method and why it was taken."""
        if self.method != "auto":
            return self.method, "asked for"
        work = f"{rows:,} rows by {parameters:,} parameters"
        if rows * parameters <= AFFORDABLE:
            return (
                "hmc",
                f"{work} is small enough to sample the posterior itself, which no approximation is better than",
            )
        return "ensemble", f"{work} is too large for HMC in a minute or two; a deep ensemble is the best that is quick"

    def fitter(self, rows: int, parameters: int) -> Method:
        """The method with its settings; one that does not exist is refused with those that do."""
        name, _ = self.resolved(rows, parameters)
        kind = METHODS[name]
        if name == "dropout" and not self.hidden and "insert" not in self.settings:
            raise InputError(
                "method", "dropout has no hidden layer to drop units of", "Pass hidden layers, or another method"
            )
        known = [f for f in getattr(kind, "__dataclass_fields__", {}) if f != "name"]
        for key in self.settings:
            if key not in known:
                raise InputError("settings", f"{kind.__name__} has no {key!r}", f"It has {', '.join(sorted(known))}")
        return kind(**settings_for(name, len(self.hidden), self.noise) | dict(self.settings))


def settings_for(method: str, layers: int = 1, noise: str | float = "learned") -> dict[str, Any]:
    """Return the settings of a method for an ordinary table; none for a name that is not in METHODS."""
    return METHODS[method].table_settings(layers, noise) if method in METHODS else {}
