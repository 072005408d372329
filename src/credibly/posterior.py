"""Posterior: what a method returns. It predicts, saves itself, and gives its draws of the weights."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credibly.errors import InputError
from credibly.forward import Forward
from credibly.inputs import Inputs, describe, map_inputs, to_inputs
from credibly.layout import Layout
from credibly.likelihoods import Likelihood
from credibly.predictive import Predictive
from credibly.problem import Problem, try_network
from credibly.rng import check_seed, stream


@dataclass(frozen=True)
class Model:
    """The part of a problem that prediction needs: network, flat layout and likelihood, without the data."""

    layout: Layout
    likelihood: Likelihood
    forward: Forward
    row: dict[str, Any]  # form, shapes and dtypes of a row of x, as `credibly.inputs.describe` gives them

    @classmethod
    def of(cls, problem: Problem) -> Model:
        """The model of a problem."""
        return cls(problem.layout, problem.likelihood, problem.forward, describe(problem.x))

    def inputs(self, x: Any) -> Inputs:
        """x checked and on the model's device; a wrong shape is refused before anything is computed."""
        ready = to_inputs(x, self.layout.device, self.layout.dtype, convert=True)
        try_network(self.layout, map_inputs(lambda t: t[:1], ready))
        return ready

    def extra(self, theta: Tensor) -> dict[str, Tensor]:
        """The likelihood's own parameters in theta (S, D)."""
        return {k.removeprefix("likelihood."): v for k, v in self.layout.split(theta)[1].items()}


@dataclass(frozen=True)
class Record:
    """How a posterior came about: method, settings, seed, data, what was seen on the way. All of it plain JSON values."""

    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    n: int = 0
    fingerprint: str = ""
    prior: Any = None
    tempering: dict[str, float] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    status: str = "complete"


class Posterior(ABC):
    """A distribution over the weights of one model. Subclasses say how draws come out of it, and what is stored of it."""

    kind: ClassVar[str]

    def __init__(self, model: Model, record: Record) -> None:
        self.model = model
        self.record = record

    @property
    def layout(self) -> Layout:
        """Where each parameter lies in the flat vector."""
        return self.model.layout

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the problem."""
        return self.model.likelihood

    @abstractmethod
    def predict(self, x: Any) -> Predictive:
        """The Bayesian model average at x."""

    @abstractmethod
    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draws of the flat weight vector, (count, D)."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored to have this posterior again, by name."""

    def description(self) -> Any:
        """What else has to be known, as plain JSON values."""
        return None

    @classmethod
    @abstractmethod
    def from_tensors(cls, model: Model, tensors: dict[str, Tensor], record: Record, description: Any) -> Self:
        """The inverse of `tensors` and `description`."""

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes a run folder; `credibly.load(path, net)` gives the same predictions bit for bit."""
        from credibly.store import save

        save(self, path, overwrite=overwrite)


class DrawsPosterior(Posterior):
    """Draws of the weights, (chain, draw, D), each with equal weight: one for a point estimate, M for an ensemble."""

    kind: ClassVar[str] = "draws"

    def __init__(self, model: Model, draws: Tensor, record: Record) -> None:
        super().__init__(model, record)
        if draws.ndim != 3 or draws.shape[-1] != model.layout.dim or draws.shape[0] * draws.shape[1] == 0:
            raise InputError(
                "draws",
                f"has shape {tuple(draws.shape)}",
                f"Pass (chain, draw, {model.layout.dim}) with at least one draw",
            )
        self.draws = draws

    def predict(self, x: Any, *, draws: int | None = None) -> Predictive:
        """The Bayesian model average at x, over all draws or an evenly spaced subset of them."""
        flat = self.draws.reshape(-1, self.layout.dim)
        if draws is not None:
            if isinstance(draws, bool) or not isinstance(draws, int) or not draws >= 1:
                raise InputError("draws", f"found {draws!r}", "Pass a whole number from 1 up, or None for all")
            flat = flat[torch.linspace(0, len(flat) - 1, min(draws, len(flat))).round().long()]
        return Predictive(WeightDraws(self.model, flat), self.model.inputs(x))

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draws with replacement, (count, D)."""
        flat = self.draws.reshape(-1, self.layout.dim)
        picks = torch.randint(len(flat), (count,), generator=stream(check_seed(seed), "posterior draws"))
        return flat[picks.to(flat.device)]

    def module(self, chain: int = 0, draw: int = -1) -> nn.Module:
        """A plain `nn.Module` with the weights of one draw, for use outside this package."""
        return self.layout.write(self.draws[chain, draw])

    def tensors(self) -> dict[str, Tensor]:
        """The draws."""
        return {"draws": self.draws}

    @classmethod
    def from_tensors(cls, model: Model, tensors: dict[str, Tensor], record: Record, description: Any) -> Self:
        """From stored draws."""
        return cls(model, tensors["draws"], record)

    def __repr__(self) -> str:
        chains, draws, dim = self.draws.shape
        return f"DrawsPosterior({self.record.method or 'draws'}: {chains} x {draws} draws of {dim} parameters, {type(self.likelihood).__name__})"


class WeightDraws:
    """A source of outputs from explicit weight vectors (S, D)."""

    def __init__(self, model: Model, theta: Tensor) -> None:
        self.model = model
        self.theta = theta
        self.likelihood = model.likelihood
        self.count = len(theta)

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Arranged outputs (stop - start, rows, ..., K)."""
        with torch.no_grad():
            return self.likelihood.arrange(self.model.forward(self.theta[start:stop], x), 1)

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """The likelihood's own parameters in those draws."""
        return self.model.extra(self.theta[start:stop])

    def row_width(self) -> int:
        """Values one row takes in the network."""
        return self.model.forward.row_width
