"""Posteriors that consist of draws, in memory or in a run folder, and the outputs of a network at given weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credibly.core.autodiff import grad_for
from credibly.core.checks import check_integer
from credibly.core.inputs import Inputs, map_inputs, row_count, to_values
from credibly.core.rng import check_seed, stream
from credibly.distributed.world import World, current, shard
from credibly.errors import InputError
from credibly.posterior.base import Posterior
from credibly.posterior.loaders import reads_loaders
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive
from credibly.predictive.heads import predictive_of
from credibly.predictive.per_draw import per_draw
from credibly.priors.gaussian import GaussianPrior, by_moments, signature
from credibly.storage.record import Record
from credibly.storage.stored_draws import StoredDraws

if TYPE_CHECKING:
    # Imported on first use, so that fitting and predicting do not wait for it.
    from credibly.diagnostics.summary import Diagnostics

# Streamed draws up to this size are read into memory for a prediction, larger ones in chunks.
KEPT_BYTES = 2**28


class SampledPosterior(Posterior):
    """Equally weighted draws of a flat vector, (chain, draw, D), in memory or in a run folder.

    Attributes:
        statistics: a sampler's statistics per draw by name, (chain, draw) each; empty for other methods.
    """

    def __init__(
        self,
        model: Model | None,
        draws: Tensor | StoredDraws,
        record: Record,
        statistics: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__(model, record)
        dim = draws.shape[-1] if model is None else model.layout.dim
        if len(draws.shape) != 3 or draws.shape[-1] != dim or draws.shape[0] * draws.shape[1] == 0:
            expected = f"must have shape (chain, draw, {dim}) and at least one draw"
            raise InputError("draws", f"{expected}, got shape {tuple(draws.shape)}")
        self._draws = draws
        self.statistics = statistics or {}

    @property
    def shape(self) -> torch.Size:
        """(chains, draws, D), without reading stored draws."""
        return self._draws.shape

    @property
    def draws(self) -> Tensor:
        """The draws, (chain, draw, D), in the network's dtype.

        Draws that were streamed to a folder are all read into memory here; `predict` reads large ones in chunks.
        """
        return self._cast(self._draws.tensor() if isinstance(self._draws, StoredDraws) else self._draws)

    def in_memory(self) -> Self:
        """Return the posterior with its draws in memory, so that it no longer depends on its run folder."""
        if not isinstance(self._draws, StoredDraws):
            return self
        return type(self)(self._model, self._draws.tensor(), self.record, self.statistics)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Resample the draws with replacement, (count, D)."""
        total = self._draws.shape[0] * self._draws.shape[1]
        return self._pick(torch.randint(total, (count,), generator=stream(check_seed(seed), "posterior draws")))

    def as_prior(self, family: str = "diag") -> GaussianPrior:
        """Return a Gaussian prior with the mean and the variances ("diag") or covariance ("full") of the draws.

        It matches the moments of the posterior, which is itself not Gaussian. "full" needs more draws than parameters.
        """
        return by_moments(self.draws.flatten(0, 1), signature(self.layout), family, self.record.method)

    def _pick(self, indices: Tensor) -> Tensor:
        if isinstance(self._draws, StoredDraws):
            return self._cast(self._draws.pick(indices))
        flat = self._draws.reshape(-1, self._draws.shape[-1])
        return self._cast(flat[indices.to(flat.device)])

    def _cast(self, draws: Tensor) -> Tensor:
        return draws if self._model is None else draws.to(self._model.layout.dtype)

    def diagnostics(self, x: Any = None, y: Any = None, *, spread: bool = False) -> Diagnostics:
        """Return R-hat, ESS and MCSE of the weights and of the predictions at held-out inputs x, with a verdict.

        Convergence is judged by the predictions: a network's weights have symmetries, so chains may disagree on the
        weights and agree on every function of interest. Chains may also agree on every predicted mean and disagree
        about the noise. The verdict is therefore about the worst of the means, variances that depend on x, learned
        scales, the log likelihood of the training data and, given y, the log density of every row.

        With `spread`, every process of a run has to call this. Each handles some of the coordinates and rows of x, and
        the results are gathered: no process needs all draws of a run that is in a folder.
        """
        if y is not None and x is None:
            raise InputError("x", "must be given with y", "Pass the inputs that the targets y belong to")
        functions, world = None, current() if spread else World()
        quantities = self._scalars(world)
        if x is not None:
            if world.size > 1:
                mine = shard(row_count(x), world.rank, world.size)
                if not mine:
                    found = f"must have a row per process, got {row_count(x)} rows for {world.size} processes"
                    raise InputError("x", found, "Pass more rows, or spread=False")
                x = map_inputs(lambda t: t[mine.start : mine.stop], x)
                y = None if y is None else to_values(y, "y")
                y = None if y is None else y[mine.start : mine.stop]
            shape = self._draws.shape[:2]
            found_there = per_draw(self.predict(x), y)
            functions = found_there.means.reshape(*shape, -1)
            if found_there.variances is not None:
                quantities["variances"] = found_there.variances.reshape(*shape, -1)
            if found_there.log_densities is not None:
                quantities["log densities"] = found_there.log_densities.reshape(*shape, -1)
        from credibly.diagnostics.summary import diagnose

        return diagnose(
            self._draws,
            functions,
            energy=self.statistics.get("energy"),
            acceptance=self.statistics.get("acceptance"),
            divergences=self.statistics.get("divergent"),
            quantities=quantities,
            network=self._model is not None,
            one_start=bool((self.record.history.get("starts") or {}).get("identical")),
            temperature=(self.record.history.get("temperature") or {}).get("kinetic"),
            local=bool(self.record.history.get("local")),
            world=world,
        )

    def _scalars(self, world: World) -> dict[str, Tensor]:
        """Return the likelihood's own parameters and the log likelihood of each draw; this process's part of them."""
        if self._model is None:
            return {}
        found = {}
        first, dim = self.layout.network_dim, self.layout.dim
        if dim > first:
            draws = self._draws
            own = draws[..., first:] if isinstance(draws, Tensor) else draws.columns(first, dim)
            names = {name.rpartition(".")[2] for name in self.layout.extra}
            found["noise scale" if names == {"log_scale"} else "learned parameters"] = own
        # The log likelihood of a minibatch is not a function of the draw.
        if "log_likelihood" in self.statistics and self.record.history.get("batch_size") is None:
            found["log likelihood"] = self.statistics["log_likelihood"].unsqueeze(-1)
        parts = {name: shard(values.shape[-1], world.rank, world.size) for name, values in found.items()}
        return {name: values[..., parts[name].start : parts[name].stop] for name, values in found.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the draws and their statistics."""
        kept = self._draws if isinstance(self._draws, Tensor) else self.draws
        return {"draws": kept, **{f"stat.{k}": v for k, v in self.statistics.items()}}

    @classmethod
    def from_tensors(cls, model: Model | None, tensors: dict[str, Any], record: Record, description: Any) -> Self:
        """Rebuild the posterior from stored draws and statistics."""
        statistics = {k.removeprefix("stat."): v for k, v in tensors.items() if k.startswith("stat.")}
        return cls(model, tensors["draws"], record, statistics)

    def __repr__(self) -> str:
        chains, draws, dim = self._draws.shape
        return f"{type(self).__name__}({self.record.method or 'draws'}: {chains} x {draws} draws of {dim} parameters)"


class DrawsPosterior(SampledPosterior):
    """Draws of a network's weights: one for a point estimate, M for an ensemble, many for a sampler."""

    kind: ClassVar[str] = "draws"

    @reads_loaders
    def predict(self, x: Any, *, draws: int | None = None, grad: bool = False) -> Predictive:
        """Return the Bayesian model average at x over all draws, or over `draws` of them, evenly spaced.

        With `grad`, results are differentiable in x; see `Posterior.predict`.
        """
        total = self._draws.shape[0] * self._draws.shape[1]
        if draws is not None:
            check_integer("draws", draws, advice="None uses all of them")
        if draws is not None and draws < total:
            theta: Tensor | StoredDraws = self._pick(torch.linspace(0, total - 1, draws).round().long())
        elif isinstance(self._draws, StoredDraws) and self._draws.bytes > KEPT_BYTES:
            theta = self._draws
        else:
            theta = self.draws.reshape(-1, self.layout.dim)
        return predictive_of(WeightDraws(self.model, theta), self.model.inputs(x, grad))

    def to_arviz(self, x: Any = None) -> Any:
        """Return the draws by tensor name, the sampler's statistics and, given x, the predictions there, for ArviZ."""
        # In float64, which is exact: numpy has no bfloat16.
        exact = self.layout.mixed or self.layout.dtype == torch.bfloat16
        network, own = self.layout.split(self.draws.double() if exact else self.draws)
        functions = None
        if x is not None:
            functions = self.predict(x).functions()
            functions = functions.reshape(*self._draws.shape[:2], *functions.shape[1:])
        from credibly.diagnostics.arviz_export import to_arviz

        return to_arviz({**network, **own}, statistics=self.statistics, functions=functions)

    def module(self, chain: int = 0, draw: int = -1) -> nn.Module:
        """Return a plain `nn.Module` with the weights of one draw, for use outside this package."""
        chains, draws, _ = self._draws.shape
        if not (-chains <= chain < chains and -draws <= draw < draws):
            found = f"must be one of {chains} chains of {draws} draws, got chain {chain}, draw {draw}"
            raise InputError("draw", found)
        return self.layout.write(self._pick(torch.tensor([chain % chains * draws + draw % draws]))[0])


class DensityPosterior(SampledPosterior):
    """Draws from a density that is not a network's."""

    kind: ClassVar[str] = "density"

    def predict(self, x: Any, *, grad: bool = False) -> Predictive:
        """Raise: a density has no network to predict with."""
        raise InputError("predict", "a density has no network", "Use posterior.draws, or fit a credibly.Problem")

    def to_arviz(self) -> Any:
        """Return the draws and the sampler's statistics for ArviZ."""
        from credibly.diagnostics.arviz_export import to_arviz

        return to_arviz({"theta": self.draws}, statistics=self.statistics)


class WeightDraws:
    """Network outputs at explicit weight vectors (S, D), in memory or on disk."""

    def __init__(self, model: Model, theta: Tensor | StoredDraws) -> None:
        self.model = model
        self.theta = theta
        self.likelihood = model.likelihood
        self.count = len(theta) if isinstance(theta, Tensor) else theta.shape[0] * theta.shape[1]

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the arranged outputs of draws start to stop, (stop - start, rows, ..., K)."""
        theta = self.theta[start:stop] if isinstance(self.theta, Tensor) else self.theta.rows(start, stop)
        with grad_for(x):
            return self.likelihood.arrange(self.model.forward(theta, x), 1)

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in those draws."""
        if isinstance(self.theta, Tensor):
            return self.model.extra(self.theta[start:stop])
        first = self.model.layout.network_dim
        own = self.theta.columns(first, self.theta.shape[2]).flatten(0, 1)[start:stop]
        return self.model.extra(torch.cat([own.new_zeros(len(own), first), own], -1))

    def row_width(self) -> int:
        """Return how many values one row takes in the network."""
        return self.model.forward.row_width

    def cpp_width(self) -> int | None:
        """Return how many values one row takes in the C++ backend, which keeps only outputs; None if it is unused."""
        forward = self.model.forward
        return forward.cpp_stack.outputs if forward.stack is not None and forward.cpp_stack is not None else None
