"""GaussianPosterior: a Gaussian over the weights, or an even mixture of several, as variational inference gives."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from credibly.core.rng import check_seed, stream
from credibly.core.specs import from_spec, kinds_of, to_spec
from credibly.errors import InputError
from credibly.gaussians.families import Family, FullRank, LowRank, MeanField
from credibly.metrics.information import Estimate
from credibly.posterior.base import Model, Posterior, WeightDraws
from credibly.predictive.base import Predictive
from credibly.priors.gaussian import GaussianPrior, signature
from credibly.problem import Problem
from credibly.storage.record import Record


class LayerSummary(NamedTuple):
    """One parameter tensor of the posterior: sizes of its means, its deviations and their ratio |mu| / sigma."""

    name: str
    shape: tuple[int, ...]
    mean_abs: float
    mean_scale: float
    signal_to_noise: tuple[float, float, float]  # 10 %, 50 % and 90 % quantiles


class GaussianPosterior(Posterior):
    """q(w) = (1/M) sum_m N(mu_m, Sigma_m), with phi (M, P) in the terms of a variational family."""

    kind: ClassVar[str] = "gaussian"

    def __init__(self, model: Model, family: Family, phi: Tensor, record: Record) -> None:
        super().__init__(model, record)
        if phi.ndim != 2 or phi.shape[1] != family.size(model.layout.dim):
            raise InputError(
                "phi", f"has shape {tuple(phi.shape)}", f"Pass (components, {family.size(model.layout.dim)})"
            )
        self.family = family
        self.phi = phi

    @property
    def components(self) -> int:
        """Number of Gaussians in the mixture."""
        return len(self.phi)

    @property
    def loc(self) -> Tensor:
        """Means, (M, D)."""
        return self.family.loc(self.phi, self.layout.dim)

    @property
    def std(self) -> Tensor:
        """Standard deviation of every weight, (M, D)."""
        return self.family.variance(self.phi, self.layout.dim).sqrt()

    def covariance(self) -> Tensor:
        """Covariances (M, D, D); for small networks."""
        return self.family.covariance(self.phi, self.layout.dim)

    @property
    def draws(self) -> Tensor:
        """A fixed set of 100 draws as (component, draw, D), always the same ones."""
        each = -(-100 // self.components)
        return self.sample(each * self.components).reshape(each, self.components, -1).transpose(0, 1)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draws (count, D); the components take turns, and draw number i is the same however many are asked for."""
        check_seed(seed)
        _check_count("count", count, 1)
        dim, each = self.layout.dim, -(-count // self.components)
        noise = torch.empty(
            self.components, each, self.family.noise_size(dim), dtype=self.phi.dtype, device=self.phi.device
        )
        for component in range(self.components):
            own = stream(seed, "gaussian draws", component, device=self.phi.device)
            for draw in noise[component].unbind(0):  # filled as one block, the numbers would depend on its length
                draw.normal_(generator=own)
        with torch.no_grad():
            return self.family.draw(self.phi, noise).transpose(0, 1).reshape(-1, dim)[:count]

    def predict(self, x: Any, *, draws: int = 100, seed: int = 0) -> Predictive:
        """The Bayesian model average at x over so many draws of the weights; the same seed gives the same result."""
        _check_count("draws", draws, 1)
        return Predictive(WeightDraws(self.model, self.sample(draws, seed=seed)), self.model.inputs(x))

    # -- what a variational posterior can tell -------------------------------------------------------------------------
    def elbo(
        self, problem: Problem, *, samples: int = 100, seed: int = 0, prior_scale: Tensor | None = None
    ) -> Estimate:
        """The evidence lower bound in nats, on all data, with its Monte Carlo standard error.

        E_q[log p(D|w)] / T_lik + E_q[log p(w)] / T_prior + H[q]: at T = 1 it is the ELBO, the log evidence where q is
        exact. For a mixture it is the mean over components, itself a lower bound of the mixture's.

        Args:
            problem: the density.
            samples: draws of each component, at least 2.
            seed: of the draws.
            prior_scale: (M, groups) factors on the scale of the prior's groups, where they were learned.
        """
        _check_count("samples", samples, 2)
        draws = self.sample(samples * self.components, seed=seed)
        loc, variance, factor = self.loc, self.family.variance(self.phi, self.layout.dim), self.family.factor(self.phi)
        terms = torch.zeros(len(draws), dtype=torch.float64, device=draws.device)
        with torch.no_grad():
            for some in torch.arange(len(draws), device=draws.device).split(16):
                for x, y in problem.blocks(len(some)):
                    terms[some] += problem.log_likelihood_rows(draws[some], x, y).flatten(1).sum(1)
                of = some % self.components
                prior = problem.prior.expected_log_prob(
                    loc[of], variance[of], draws[some].unsqueeze(1), None if prior_scale is None else prior_scale[of],
                    None if factor is None else factor[of],
                )  # fmt: skip
                terms[some] = terms[some] / problem.tempering.likelihood + prior / problem.tempering.prior
            entropy = self.family.entropy(self.phi).double()
        spread = (
            terms.reshape(samples, self.components).var(0).mean()
        )  # the components are all there: no error of theirs
        return Estimate(terms.mean() + entropy.mean(), (spread / len(terms)).sqrt())

    def signal_to_noise(self) -> Tensor:
        """|mu| / sigma of every weight, (M, D): weights with little of it can be removed. 0 for those that were."""
        return (self.loc.abs() / self.std).nan_to_num(nan=0.0, posinf=torch.inf)

    def layers(self) -> list[LayerSummary]:
        """The posterior of each parameter tensor, averaged over components."""
        rows, ratio = [], self.signal_to_noise()
        for entry in self.layout.entries:
            here = slice(entry.start, entry.stop)
            quantiles = torch.quantile(
                _some(ratio[:, here]), torch.tensor([0.1, 0.5, 0.9], dtype=ratio.dtype, device=ratio.device)
            )
            low, middle, high = (float(q) for q in quantiles)
            rows.append(
                LayerSummary(
                    entry.name,
                    entry.shape,
                    float(self.loc[:, here].abs().mean()),
                    float(self.std[:, here].mean()),
                    (low, middle, high),
                )
            )
        return rows

    def prune(self, fraction: float) -> GaussianPosterior:
        """The posterior with that fraction of the network's weights, those with least signal-to-noise, fixed at zero.

        Of the mean-field family only. The likelihood's own parameters stay.
        """
        if not isinstance(self.family, MeanField):
            raise InputError(
                "family",
                f"found {type(self.family).__name__}",
                "Only mean-field posteriors can be pruned weight by weight",
            )
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise InputError("fraction", f"found {fraction!r}", "Pass a number from 0 to below 1")
        network = self.layout.network_dim
        least = self.signal_to_noise()[:, :network].argsort(stable=True, dim=-1)[:, : round(fraction * network)]
        remove = torch.zeros_like(self.loc, dtype=torch.bool).scatter(1, least, True)
        zero, never = torch.zeros_like(self.loc), torch.full_like(self.loc, -torch.inf)  # softplus(-inf) = 0
        mu, rho = self.phi.chunk(2, -1)
        phi = torch.cat([torch.where(remove, zero, mu), torch.where(remove, never, rho)], -1)
        history = {**self.record.history, "pruned": fraction}
        return GaussianPosterior(self.model, self.family, phi, dataclasses.replace(self.record, history=history))

    def as_prior(self) -> GaussianPrior:
        """This Gaussian as the prior of a problem with other data and the same network; exact, of one component."""
        if self.components > 1:
            raise InputError(
                "as_prior",
                f"the posterior is a mixture of {self.components} Gaussians, which no Gaussian prior is",
                "Fit one component (members=1)",
            )
        shape = self.family.precision(self.phi)
        return GaussianPrior(self.loc[0], shape, signature(self.layout), self.record.method)

    # -- storage -------------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """phi."""
        return {"phi": self.phi}

    def description(self) -> Any:
        """The family."""
        return to_spec(self.family)

    @classmethod
    def from_tensors(cls, model: Model, tensors: dict[str, Tensor], record: Record, description: Any) -> Self:
        """From a stored phi and the family's description."""
        return cls(model, from_spec(description, kinds_of(MeanField, LowRank, FullRank)), tensors["phi"], record)

    def __repr__(self) -> str:
        name = type(self.family).__name__
        return f"GaussianPosterior({self.record.method}: {self.components} x {name} over {self.layout.dim} parameters)"


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(name, f"found {value!r}", f"Pass a whole number from {least} up")


def _some(values: Tensor, most: int = 1_000_000) -> Tensor:
    """At most so many of the values, evenly spaced: torch.quantile refuses very large inputs."""
    flat = values.flatten()
    return flat if len(flat) <= most else flat[torch.linspace(0, len(flat) - 1, most).long()]
