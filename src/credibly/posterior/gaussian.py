"""GaussianPosterior: a Gaussian over the weights, or an equally weighted mixture, as from variational inference."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from credibly.core.checks import check_integer, is_real
from credibly.core.rng import check_seed, stream
from credibly.core.rows import sum_rows
from credibly.core.specs import from_spec, kinds_of, to_spec
from credibly.errors import InputError
from credibly.gaussians.families import Family, FullRank, LowRank, MeanField
from credibly.metrics.information import Estimate
from credibly.posterior.base import Posterior
from credibly.posterior.draws import WeightDraws
from credibly.posterior.loaders import reads_loaders
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive
from credibly.predictive.heads import predictive_of
from credibly.priors.gaussian import GaussianPrior, signature
from credibly.problem import Problem
from credibly.storage.record import Record


class LayerSummary(NamedTuple):
    """Posterior of one parameter tensor: mean |mu|, mean sigma, and 10 %, 50 % and 90 % quantiles of |mu| / sigma."""

    name: str
    shape: tuple[int, ...]
    mean_abs: float
    mean_scale: float
    signal_to_noise: tuple[float, float, float]


class GaussianPosterior(Posterior):
    """q(w) = (1/M) sum_m N(mu_m, Sigma_m), with the parameters phi (M, P) of a variational family."""

    kind: ClassVar[str] = "gaussian"

    def __init__(self, model: Model, family: Family, phi: Tensor, record: Record) -> None:
        super().__init__(model, record)
        if phi.ndim != 2 or phi.shape[1] != family.size(model.layout.dim):
            expected = f"(components, {family.size(model.layout.dim)})"
            raise InputError("phi", f"must have shape {expected}, got {tuple(phi.shape)}")
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
        """Return the covariances (M, D, D); for small networks."""
        return self.family.covariance(self.phi, self.layout.dim)

    @property
    def draws(self) -> Tensor:
        """A fixed set of at least 100 draws, (component, draw, D)."""
        each = -(-100 // self.components)
        return self.sample(each * self.components).reshape(each, self.components, -1).transpose(0, 1)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw weights (count, D), alternating between components. Draw i does not depend on `count`."""
        check_seed(seed)
        check_integer("count", count)
        dim, each = self.layout.dim, -(-count // self.components)
        noise = torch.empty(
            self.components, each, self.family.noise_size(dim), dtype=self.phi.dtype, device=self.phi.device
        )
        for component in range(self.components):
            own = stream(seed, "gaussian draws", component, device=self.phi.device)
            # Draw by draw, because the numbers of a single block would depend on its length.
            for draw in noise[component].unbind(0):
                draw.normal_(generator=own)
        with torch.no_grad():
            return self.family.draw(self.phi, noise).transpose(0, 1).reshape(-1, dim)[:count]

    def module(self, draw: int | None = None, *, component: int = 0, seed: int = 0) -> nn.Module:
        """Return a plain `nn.Module` with the mean weights of a component, or with those of one draw of q.

        Args:
            draw: the index of a draw from `sample`; None uses the mean.
            component: index of the component whose mean is taken.
            seed: seed of the draws.
        """
        if draw is not None:
            check_integer("draw", draw, 0)
            return self.layout.write(self.sample(draw + 1, seed=seed)[draw])
        check_integer("component", component, 0)
        if component >= self.components:
            raise InputError("component", f"must be below {self.components}, got {component}")
        return self.layout.write(self.loc[component])

    @reads_loaders
    def predict(self, x: Any, *, draws: int = 100, seed: int = 0, grad: bool = False) -> Predictive:
        """Return the Bayesian model average at x over the given number of draws.

        With `grad`, results are differentiable in x; see `Posterior.predict`.
        """
        check_integer("draws", draws)
        return predictive_of(WeightDraws(self.model, self.sample(draws, seed=seed)), self.model.inputs(x, grad))

    # -- variational inference
    def elbo(
        self, problem: Problem, *, samples: int = 100, seed: int = 0, prior_scale: Tensor | None = None
    ) -> Estimate:
        """Estimate the evidence lower bound in nats, on all data, with its Monte Carlo standard error.

        E_q[log p(D|w)] / T_lik + E_q[log p(w)] / T_prior + H[q]: at T = 1 it is the ELBO, which equals the log evidence
        if q is exact. For a mixture it is the mean over components, a lower bound of the mixture's own ELBO.

        Args:
            problem: the posterior density that q approximates.
            samples: draws per component, at least 2.
            seed: seed of the draws.
            prior_scale: learned factors on the scales of the prior's groups, (M, groups).
        """
        check_integer("samples", samples, least=2)
        draws = self.sample(samples * self.components, seed=seed)
        loc, variance, factor = self.loc, self.family.variance(self.phi, self.layout.dim), self.family.factor(self.phi)
        terms = torch.zeros(len(draws), dtype=torch.float64, device=draws.device)
        with torch.no_grad():
            for some in torch.arange(len(draws), device=draws.device).split(16):
                for x, y, weight in problem.blocks(len(some)):
                    terms[some] += sum_rows(problem.log_likelihood_rows(draws[some], x, y), weight)
                of = some % self.components
                prior = problem.prior.expected_log_prob(
                    loc[of],
                    variance[of],
                    draws[some].unsqueeze(1),
                    None if prior_scale is None else prior_scale[of],
                    None if factor is None else factor[of],
                )
                terms[some] = terms[some] / problem.tempering.likelihood + prior / problem.tempering.prior
            entropy = self.family.entropy(self.phi).double()
        # Stratified by component: every component is sampled, so only the variance within components counts.
        variance_within = terms.reshape(samples, self.components).var(0).mean()
        return Estimate(terms.mean() + entropy.mean(), (variance_within / len(terms)).sqrt())

    def signal_to_noise(self) -> Tensor:
        """Return |mu| / sigma of every weight, (M, D): 0 for pruned weights. Those with a low ratio can be pruned."""
        return (self.loc.abs() / self.std).nan_to_num(nan=0.0, posinf=torch.inf)

    def layers(self) -> list[LayerSummary]:
        """Summarise the posterior of each parameter tensor, averaged over components."""
        rows, ratio = [], self.signal_to_noise()
        for entry in self.layout.entries:
            here = slice(entry.start, entry.stop)
            quantiles = torch.quantile(
                _thinned(ratio[:, here]), torch.tensor([0.1, 0.5, 0.9], dtype=ratio.dtype, device=ratio.device)
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
        """Return the posterior with the given fraction of weights, those of lowest signal-to-noise, fixed at zero.

        For the mean-field family only. The likelihood's own parameters are kept.
        """
        if not isinstance(self.family, MeanField):
            raise InputError("family", f"must be mean-field to prune single weights, got {type(self.family).__name__}")
        if not is_real(fraction) or not 0 <= fraction < 1:
            raise InputError("fraction", f"must be at least 0 and below 1, got {fraction!r}")
        network = self.layout.network_dim
        least = self.signal_to_noise()[:, :network].argsort(stable=True, dim=-1)[:, : round(fraction * network)]
        remove = torch.zeros_like(self.loc, dtype=torch.bool).scatter(1, least, True)
        # sigma = softplus(rho), and softplus(-inf) = 0.
        zero, no_scale = torch.zeros_like(self.loc), torch.full_like(self.loc, -torch.inf)
        mu, rho = self.phi.chunk(2, -1)
        phi = torch.cat([torch.where(remove, zero, mu), torch.where(remove, no_scale, rho)], -1)
        history = {**self.record.history, "pruned": fraction}
        return GaussianPosterior(self.model, self.family, phi, dataclasses.replace(self.record, history=history))

    def as_prior(self) -> GaussianPrior:
        """Return this Gaussian as the prior of a problem with other data and the same network.

        It must have one component.
        """
        if self.components > 1:
            raise InputError(
                "as_prior",
                f"the posterior is a mixture of {self.components} Gaussians, not one Gaussian",
                "Fit one component (members=1)",
            )
        shape = self.family.precision(self.phi)
        return GaussianPrior(self.loc[0], shape, signature(self.layout), self.record.method)

    # -- storage
    def tensors(self) -> dict[str, Tensor]:
        """Return phi."""
        return {"phi": self.phi}

    def description(self) -> Any:
        """Return the family as JSON values."""
        return to_spec(self.family)

    @classmethod
    def from_tensors(cls, model: Model, tensors: dict[str, Tensor], record: Record, description: Any) -> Self:
        """Rebuild the posterior from phi and the family's description."""
        return cls(model, from_spec(description, kinds_of(MeanField, LowRank, FullRank)), tensors["phi"], record)

    def __repr__(self) -> str:
        name = type(self.family).__name__
        return f"GaussianPosterior({self.record.method}: {self.components} x {name} over {self.layout.dim} parameters)"


def _thinned(values: Tensor, most: int = 1_000_000) -> Tensor:
    """Return at most `most` of the values, evenly spaced: torch.quantile rejects very large inputs."""
    flat = values.flatten()
    return flat if len(flat) <= most else flat[torch.linspace(0, len(flat) - 1, most).long()]
