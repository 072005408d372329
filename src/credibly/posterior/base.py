"""Posterior: what a method returns. It predicts, saves itself, and gives its draws of the weights."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, describe, map_inputs, row_count, to_inputs
from credibly.core.rng import check_seed, stream
from credibly.distributed.world import World, current, shard
from credibly.errors import InputError
from credibly.forward import Forward
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout
from credibly.predictive.base import Predictive
from credibly.priors.gaussian import GaussianPrior, by_moments, signature
from credibly.problem import Problem, try_network
from credibly.storage.record import Record as Record
from credibly.storage.stored_draws import StoredDraws

if TYPE_CHECKING:
    from credibly.diagnostics.summary import Diagnostics

KEPT_BYTES = 2**28  # streamed draws up to this size are read into memory for a prediction, larger ones in pieces


@dataclass(frozen=True)
class Model:
    """The part of a problem that prediction needs: network, flat layout and likelihood, without the data."""

    layout: Layout
    likelihood: Likelihood
    forward: Forward
    row: dict[str, Any]  # form, shapes and dtypes of a row of x, as `credibly.core.inputs.describe` gives them

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
        if not self.layout.extra:
            return {}
        return {k.removeprefix("likelihood."): v for k, v in self.layout.split(theta)[1].items()}


class Posterior(ABC):
    """A distribution over the weights of one model. Subclasses say how draws come out of it, and what is stored of it."""

    kind: ClassVar[str]

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
        """The likelihood of the problem."""
        return self.model.likelihood

    @abstractmethod
    def predict(self, x: Any) -> Predictive:
        """The Bayesian model average at x."""

    @abstractmethod
    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draws of the flat weight vector, (count, D)."""

    def as_prior(self) -> GaussianPrior:
        """This posterior as the prior of a problem with other data and the same network, where it is a Gaussian."""
        raise InputError(
            "as_prior",
            f"the posterior of {self.record.method or self.kind} is not a Gaussian over the weights",
            "Fit BayesByBackprop, Laplace, SWAG or a sampler, whose posteriors offer it",
        )

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored to have this posterior again, by name."""

    def description(self) -> Any:
        """What else has to be known, as plain JSON values."""
        return None

    @classmethod
    @abstractmethod
    def from_tensors(cls, model: Any, tensors: dict[str, Any], record: Record, description: Any) -> Self:
        """The inverse of `tensors` and `description`."""

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes a run folder; `credibly.load(path, net)` gives the same predictions bit for bit."""
        from credibly.posterior.store import save

        save(self, path, overwrite=overwrite)


class SampledPosterior(Posterior):
    """Draws of a flat vector, (chain, draw, D), each with equal weight, in memory or in a run folder.

    Attributes:
        statistics: what a sampler noted of every draw, by name: (chain, draw) each; empty for other methods.
    """

    def __init__(
        self, model: Model | None, draws: Tensor | StoredDraws, record: Record, statistics: dict[str, Tensor] | None = None
    ) -> None:  # fmt: skip
        super().__init__(model, record)
        dim = draws.shape[-1] if model is None else model.layout.dim
        if len(draws.shape) != 3 or draws.shape[-1] != dim or draws.shape[0] * draws.shape[1] == 0:
            found = f"has shape {tuple(draws.shape)}"
            raise InputError("draws", found, f"Pass (chain, draw, {dim}) with at least one draw")
        self._draws = draws
        self.statistics = statistics or {}

    @property
    def draws(self) -> Tensor:
        """(chain, draw, D). Draws that were streamed to a folder are read into memory here; `predict` needs only parts.

        In the network's dtype, whatever they are kept as.
        """
        return self._usable(self._draws.tensor() if isinstance(self._draws, StoredDraws) else self._draws)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draws with replacement, (count, D)."""
        total = self._draws.shape[0] * self._draws.shape[1]
        return self._pick(torch.randint(total, (count,), generator=stream(check_seed(seed), "posterior draws")))

    def as_prior(self, family: str = "diag") -> GaussianPrior:
        """A Gaussian with the mean and variances ("diag") or covariance ("full") of the draws, as the next problem's prior.

        It matches moments and is not the posterior itself, which is no Gaussian. "full" needs more draws than parameters.
        """
        return by_moments(self.draws.flatten(0, 1), signature(self.layout), family, self.record.method)

    def _pick(self, places: Tensor) -> Tensor:
        if isinstance(self._draws, StoredDraws):
            return self._usable(self._draws.pick(places))
        flat = self._draws.reshape(-1, self._draws.shape[-1])
        return self._usable(flat[places.to(flat.device)])

    def _usable(self, draws: Tensor) -> Tensor:
        return draws if self._model is None else draws.to(self._model.layout.dtype)

    def diagnostics(self, x: Any = None, *, spread: bool = False) -> Diagnostics:
        """R-hat, ESS and MCSE of the weights and, given held-out inputs x, of the predictions there; with a verdict in words.

        The predictions are what counts: weights of a network have symmetries, so chains may disagree on them and agree on
        every function of interest.

        With `spread` the processes of a run, which all have to call this, each look at some of the coordinates and of the rows of
        x, and tell each other what they found: no process needs all draws of a run that is in a folder.
        """
        from credibly.diagnostics.summary import diagnose

        functions, world = None, current() if spread else World()
        if x is not None:
            if world.size > 1:
                mine = shard(row_count(x), world.rank, world.size)
                if not mine:
                    found = f"has {row_count(x)} rows for {world.size} processes"
                    raise InputError("x", found, "Pass at least one row for each, or spread=False")
                x = map_inputs(lambda t: t[mine.start : mine.stop], x)
            functions = self.predict(x).functions().reshape(*self._draws.shape[:2], -1)
        known = self.statistics
        return diagnose(
            self._draws, functions, energy=known.get("energy"), acceptance=known.get("acceptance"),
            divergences=known.get("divergent"), network=self._model is not None, world=world,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The draws and what was noted of each."""
        kept = self._draws if isinstance(self._draws, Tensor) else self.draws
        return {"draws": kept, **{f"stat.{k}": v for k, v in self.statistics.items()}}

    @classmethod
    def from_tensors(cls, model: Model | None, tensors: dict[str, Any], record: Record, description: Any) -> Self:
        """From stored draws."""
        noted = {k.removeprefix("stat."): v for k, v in tensors.items() if k.startswith("stat.")}
        return cls(model, tensors["draws"], record, noted)

    def __repr__(self) -> str:
        chains, draws, dim = self._draws.shape
        return f"{type(self).__name__}({self.record.method or 'draws'}: {chains} x {draws} draws of {dim} parameters)"


class DrawsPosterior(SampledPosterior):
    """Draws of a network's weights: one for a point estimate, M for an ensemble, many for a sampler."""

    kind: ClassVar[str] = "draws"

    def predict(self, x: Any, *, draws: int | None = None) -> Predictive:
        """The Bayesian model average at x, over all draws or an evenly spaced subset of them."""
        total = self._draws.shape[0] * self._draws.shape[1]
        if draws is not None and (isinstance(draws, bool) or not isinstance(draws, int) or not draws >= 1):
            raise InputError("draws", f"found {draws!r}", "Pass a whole number from 1 up, or None for all")
        if draws is not None and draws < total:
            theta: Tensor | StoredDraws = self._pick(torch.linspace(0, total - 1, draws).round().long())
        elif isinstance(self._draws, StoredDraws) and self._draws.bytes > KEPT_BYTES:
            theta = self._draws
        else:
            theta = self.draws.reshape(-1, self.layout.dim)
        return Predictive(WeightDraws(self.model, theta), self.model.inputs(x))

    def to_arviz(self, x: Any = None) -> Any:
        """The draws by tensor name, what the sampler noted and, given x, the predictions there, as ArviZ has them."""
        from credibly.diagnostics.summary import to_arviz

        network, own = self.layout.split(self.draws)
        functions = None
        if x is not None:
            functions = self.predict(x).functions()
            functions = functions.reshape(*self._draws.shape[:2], *functions.shape[1:])
        return to_arviz({**network, **own}, statistics=self.statistics, functions=functions)

    def module(self, chain: int = 0, draw: int = -1) -> nn.Module:
        """A plain `nn.Module` with the weights of one draw, for use outside this package."""
        chains, draws, _ = self._draws.shape
        if not (-chains <= chain < chains and -draws <= draw < draws):
            raise InputError("draw", f"found chain {chain}, draw {draw}", f"There are {chains} chains of {draws} draws")
        return self.layout.write(self._pick(torch.tensor([chain % chains * draws + draw % draws]))[0])


class DensityPosterior(SampledPosterior):
    """Draws of a density that is not a network's."""

    kind: ClassVar[str] = "density"

    def predict(self, x: Any) -> Predictive:
        """There is nothing to predict with."""
        raise InputError("predict", "a density has no network", "Use posterior.draws, or fit a credibly.Problem")

    def to_arviz(self) -> Any:
        """The draws and what the sampler noted, as ArviZ has them."""
        from credibly.diagnostics.summary import to_arviz

        return to_arviz({"theta": self.draws}, statistics=self.statistics)


class WeightDraws:
    """A source of outputs from explicit weight vectors (S, D), in memory or on the disk."""

    def __init__(self, model: Model, theta: Tensor | StoredDraws) -> None:
        self.model = model
        self.theta = theta
        self.likelihood = model.likelihood
        self.count = len(theta) if isinstance(theta, Tensor) else theta.shape[0] * theta.shape[1]

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Arranged outputs (stop - start, rows, ..., K)."""
        theta = self.theta[start:stop] if isinstance(self.theta, Tensor) else self.theta.rows(start, stop)
        with torch.no_grad():
            return self.likelihood.arrange(self.model.forward(theta, x), 1)

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """The likelihood's own parameters in those draws."""
        if isinstance(self.theta, Tensor):
            return self.model.extra(self.theta[start:stop])
        first = self.model.layout.network_dim
        own = self.theta.columns(first, self.theta.shape[2]).flatten(0, 1)[start:stop]
        return self.model.extra(torch.cat([own.new_zeros(len(own), first), own], -1))

    def row_width(self) -> int:
        """Values one row takes in the network."""
        return self.model.forward.row_width

    def native_width(self) -> int | None:
        """The same where compiled code does it, which keeps outputs alone; None where it does not."""
        forward = self.model.forward
        return forward.native.outputs if forward.stack is not None and forward.native is not None else None
