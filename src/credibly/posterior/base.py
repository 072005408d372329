"""Posterior: what a method returns. It predicts, saves itself and gives draws of the weights."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from torch import Tensor

from credibly.errors import InputError
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout
from credibly.posterior.model import Model
from credibly.posterior.saving import save
from credibly.predictive.base import Predictive
from credibly.priors.gaussian import GaussianPrior
from credibly.storage.record import Record

# Every posterior class by its kind, filled in as the classes are defined. A run folder names its kind, so
# `credibly.load` can only build classes that are in here.
KINDS: dict[str, type[Posterior]] = {}


class Posterior(ABC):
    """A distribution over the weights of one model.

    Subclasses define how it is sampled and what is stored. One that sets `kind` can be loaded from a run folder.
    """

    kind: ClassVar[str]

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

    @abstractmethod
    def predict(self, x: Any) -> Predictive:
        """Return the Bayesian model average at x."""

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

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name."""

    def description(self) -> Any:
        """Return what else to store, as plain JSON values."""
        return None

    @classmethod
    @abstractmethod
    def from_tensors(cls, model: Any, tensors: dict[str, Any], record: Record, description: Any) -> Self:
        """Rebuild the posterior from its `tensors` and `description`."""

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a run folder. `credibly.load(path, net)` then gives bit-for-bit identical predictions."""
        save(self, path, overwrite=overwrite)
