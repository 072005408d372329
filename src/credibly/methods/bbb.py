"""Bayes by Backprop: a Gaussian over the weights, fitted by the free energy (Blundell et al. 2015).

    VFE = E_q[log q(w)] - (1/T_prior) E_q[log p(w)] - (1/T_lik) E_q[log p(D | w)]          (ELBO = -VFE at T = 1)

Draws are reparameterised, w = mu + sigma e, so that gradients pass through them. The entropy has a closed form, and so
has E_q[log p] for Normal priors; for others it is averaged over the draws. The loss is VFE / N. Minibatch i of the M in
an epoch carries the weight pi_i of the KL term (the first two terms): 1/M, or Blundell's 2^(M-i) / (2^M - 1). The
weights sum to one, so an epoch adds up to the free energy.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.autodiff import grad_and_aux
from credibly.core.checks import check_choice, check_integer, check_positive
from credibly.core.inputs import Inputs, Tensors, map_inputs
from credibly.core.rng import draw_noise, normal, stream
from credibly.core.rows import sum_rows
from credibly.distributed.world import Mesh
from credibly.errors import InputError, TrainingError
from credibly.gaussians.families import Family, MeanField, Parts, family
from credibly.inference.method import Fit, initial
from credibly.inference.training.data import split
from credibly.inference.training.loop import train
from credibly.inference.training.method import TrainingMethod
from credibly.inference.training.objectives import NegativeLogDensity, Objective, effective_rows
from credibly.inference.training.reparameterisation import LayerNoise, choose_estimator
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.priors.gaussian import signature
from credibly.problem import Problem
from credibly.storage.record import Record

# Draws for the ELBO that is reported at the end.
FINAL_SAMPLES = 32


@dataclass(frozen=True, kw_only=True)
class BayesByBackprop(TrainingMethod[GaussianPosterior]):
    """Bayes by Backprop: a Gaussian over the weights, fitted by the variational free energy.

    Args:
        family: "mean-field", "low-rank" (with `rank`) or "full-rank" (small networks).
        samples: draws of the weights per step.
        estimator: how a draw enters the network. "weights" (any module), "local" (local reparameterisation: noise on
            the outputs of Linear layers; for convolutions it treats positions as independent, which the posterior does
            not), "flipout" (pseudo-independent draws per row by random signs; Linear and convolutions), or "auto".
        members: Gaussians in the mixture, fitted side by side from different starting points.
        init: initial means: "network", "fresh", "prior", "map" (a MAP fit first) or an (M, D) tensor. A posterior of
            the same family and network gives the standard deviations too: a warm start, as in continual learning.
        init_scale: initial standard deviation of every weight.
        kl_weights: "uniform" or "geometric" weights of the KL term over an epoch's minibatches.
        kl_warmup: steps over which the weight of the KL term rises to 1.
        learn_prior_scale: empirical Bayes: one factor on the prior scale of each parameter group, by the same free
            energy.
    """

    name: ClassVar[str] = "bbb"
    label: ClassVar[str] = "Bayes by Backprop"
    family: str = "mean-field"
    rank: int = 10
    samples: int = 1
    estimator: str = "auto"
    members: int = 1
    init: str | Tensor | GaussianPosterior = "network"
    init_scale: float = 0.03
    kl_weights: str = "uniform"
    kl_warmup: int = 0
    learn_prior_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        family(self.family, self.rank)
        for name in ("samples", "members"):
            check_integer(name, getattr(self, name))
        check_choice("estimator", self.estimator, ("auto", "weights", "local", "flipout"))
        check_choice("kl_weights", self.kl_weights, ("uniform", "geometric"))
        check_positive("init_scale", self.init_scale)
        if not isinstance(self.learn_prior_scale, bool):
            raise InputError("learn_prior_scale", f"must be True or False, got {self.learn_prior_scale!r}")
        check_integer("kl_warmup", self.kl_warmup, least=0)

    def _fit(self, fit: Fit) -> GaussianPosterior:
        """Return the fitted Gaussian; `record.history` holds the free energy, its parts and the ELBO in nats."""
        problem, seed, mesh, progress = fit.problem, fit.seed, fit.world.all_rows(), fit.progress
        data = split(problem, self, seed)
        steps, batch, per_epoch = self.plan(data.count)
        if self.kl_warmup >= steps:
            raise InputError("kl_warmup", f"must be below the number of steps, {steps}, got {self.kl_warmup}")
        chosen = family(self.family, self.rank)
        if self.learn_prior_scale and not problem.prior.groups:
            raise InputError(
                "learn_prior_scale", "must be False if the prior is a posterior, got True", "Its scale is known"
            )
        if isinstance(self.init, GaussianPosterior):
            phi = warm_start(problem, self.init, chosen, self.members)
        else:
            phi = chosen.init(self._start(problem, self.init, seed, mesh, progress), self.init_scale)
        if self.learn_prior_scale:
            phi = torch.cat([phi, phi.new_zeros(self.members, problem.prior.groups)], -1)
        noise = choose_estimator(
            self.estimator, problem, batch, mean_field=isinstance(chosen, MeanField) and self.members == 1
        )
        objective = FreeEnergy(problem, chosen, data.count, self, noise, seed=seed, per_epoch=per_epoch)
        model, width = Model.of(problem), chosen.size(problem.dim)

        def posterior(values: Tensor, record: Record, error: TrainingError | None = None) -> GaussianPosterior:
            return GaussianPosterior(model, chosen, values[:, :width].contiguous(), record)

        with fit.keep_partial(posterior):
            done = train(
                problem,
                objective,
                phi,
                self,
                data,
                seed=seed,
                title=self.label,
                shared_batches=True,
                progress=progress,
                mesh=mesh,
            )
        history = {**done.history, "estimator": noise.name, "estimator_reason": noise.reason}
        factor = done.theta[:, width:].exp() if self.learn_prior_scale else None
        if factor is not None:
            history["prior_scale_factor"] = factor.tolist()
        fitted = posterior(done.theta, fit.record({}))
        elbo = fitted.elbo(problem, samples=FINAL_SAMPLES, seed=seed, prior_scale=factor)
        history |= {"elbo": float(elbo.value), "elbo_standard_error": float(elbo.standard_error)}
        return posterior(done.theta, fit.record(history))

    @property
    def starts_fresh(self) -> bool:
        """Several members from one point would stay together, so they start at new initial values."""
        several = isinstance(self.init, str) and self.init in ("network", "map") and self.members > 1
        return several or super().starts_fresh

    def _start(self, problem: Problem, init: str | Tensor, seed: int, mesh: Mesh, progress: bool | None) -> Tensor:
        if isinstance(init, Tensor) or init != "map":
            several = isinstance(init, str) and init == "network" and self.members > 1
            return initial(problem, "fresh" if several else init, self.members, seed)
        theta = initial(problem, "fresh" if self.members > 1 else "network", self.members, seed)
        data = split(problem, self, seed)
        objective = NegativeLogDensity(problem, data.count)
        try:
            return train(
                problem, objective, theta, self, data, seed=seed, title="MAP start", progress=progress, mesh=mesh
            ).theta
        except TrainingError as error:
            # A point estimate is not a result of this method.
            error.posterior = None
            raise

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return training that clips harder if the network predicts the variance.

        Noisy weights bring a predicted variance near zero. Elsewhere a norm of 10 would hold a precise fit back.
        """
        settings = super().table_settings(layers, noise)
        return settings | ({"clip_norm": 10.0} if noise == "heteroscedastic" else {})


class FreeEnergy(Objective):
    """VFE / N of M Gaussians on a minibatch, with this step's weight of the KL term."""

    part_names = ("misfit", "complexity")

    def __init__(
        self,
        problem: Problem,
        chosen: Family,
        n: int,
        options: BayesByBackprop,
        layers: LayerNoise,
        *,
        seed: int,
        per_epoch: int,
    ) -> None:
        self.problem, self.family, self.n, self.options, self.layers = problem, chosen, n, options, layers
        self.seed, self.per_epoch = seed, per_epoch
        self.weights, self.effective = problem.relative_weight, effective_rows(problem, n)
        self.width = chosen.size(problem.dim)
        self._scoring = self._normal((self._draws(8, stream(seed, "scoring", device=problem.device)),))[0]

    def controls(self, step: int) -> tuple[float, ...]:
        """Return the weight of the KL term.

        That of this minibatch (times their number, for a mean loss) and the warm-up.
        """
        weight = kl_weight(self.options.kl_weights, step % self.per_epoch, self.per_epoch) * self.per_epoch
        warmup = min(1.0, (step + 1) / (self.options.kl_warmup + 1))
        return (weight * warmup,)

    def noise(self, step: int) -> tuple[Tensor, ...]:
        """Draw standard normal numbers for the weights (M, K, .), and for the layers if the estimator needs them."""
        generator = stream(self.seed, "variational noise", step, device=self.problem.device)
        samples = self.options.samples
        # With layer noise alone and a closed-form KL no weight is ever drawn.
        if self.layers.whole and self.problem.prior.closed_form:
            weights = torch.zeros(1, samples, 1, dtype=self.problem.layout.dtype, device=self.problem.device)
        else:
            weights = self._draws(samples, generator)
        return weights, *self.layers.draw(samples, generator)

    def _draws(self, samples: int, generator: torch.Generator) -> Tensor:
        shape = (self.options.members, samples, self.family.noise_size(self.problem.dim))
        return draw_noise(shape, generator, self.problem.layout.dtype)

    def _normal(self, noise: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weights = normal(noise[0], (self.family.noise_size(self.problem.dim),))
        layers = tuple(normal(drawn, shape) for drawn, (_, shape, _) in zip(noise[1:], self.layers.shapes))
        return weights, *(layers if self.shard is None else self.layers.cut(layers, self.shard))

    def evaluate(
        self, theta: Tensor, own: Tensors, x: Inputs, y: Tensor, rows: Tensor | None, noise: Tensors, controls: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return misfit and complexity, and the gradient of their sum."""
        if rows is not None:
            x, y = map_inputs(lambda t: t[rows], x), y[rows]
        count, weight = self.n if rows is None else rows.shape[-1], self.weights_of(rows)
        noise = self._normal(noise)

        def total(phi: Tensor) -> tuple[Tensor, Tensor]:
            gaussian, stretch = self._parts(phi)
            log_lik = self._log_likelihood(gaussian, x, y, noise, weight)
            misfit = -log_lik / (count * self.problem.tempering.likelihood)
            complexity = controls[0] * self._complexity(gaussian, stretch, noise[0]) / self.effective
            parts = torch.stack([misfit, complexity.to(misfit.dtype)], -1)
            return parts.sum(), parts

        gradient, parts = grad_and_aux(total, theta)
        return parts.detach(), gradient

    def _parts(self, phi: Tensor) -> tuple[Parts, Tensor | None]:
        """Return the parts of the Gaussian, and the factors on the prior scales if they are learned."""
        if not self.options.learn_prior_scale:
            return self.family.parts(phi), None
        gaussian, stretch = phi.split([self.width, phi.shape[-1] - self.width], -1)
        return self.family.parts(gaussian), stretch.exp()

    def log_likelihood(self, phi: Tensor, x: Inputs, y: Tensor, noise: tuple[Tensor, ...]) -> Tensor:
        """Return E_q log p(batch | w), (M,), averaged over the draws of the step."""
        return self._log_likelihood(self._parts(phi)[0], x, y, self._normal(noise))

    def _log_likelihood(
        self, gaussian: Parts, x: Inputs, y: Tensor, noise: tuple[Tensor, ...], weight: Tensor | None = None
    ) -> Tensor:
        if self.layers.name != "weights":
            mu, sigma = gaussian
            return self.layers.log_likelihood(self.problem, mu[0], sigma[0], noise, x, y, weight).unsqueeze(0)
        draws = self.family.draw(gaussian, noise[0])
        rows = self.problem.log_likelihood_rows(draws.flatten(0, 1), x, y)
        return sum_rows(rows, weight).reshape(draws.shape[:2]).mean(1)

    def complexity(self, phi: Tensor, noise: Tensor) -> Tensor:
        """Return E_q[log q] - E_q[log p] / T_prior, (M,): the KL divergence at T = 1."""
        return self._complexity(*self._parts(phi), self._normal((noise,))[0])

    def _complexity(self, gaussian: Parts, stretch: Tensor | None, noise: Tensor) -> Tensor:
        prior, dim = self.problem.prior, self.problem.dim
        # A closed form needs no draws.
        draws = noise if prior.closed_form else self.family.draw(gaussian, noise)
        loc, variance = self.family.loc(gaussian, dim), self.family.variance(gaussian, dim)
        expected = prior.expected_log_prob(loc, variance, draws, stretch, self.family.factor(gaussian))
        return -self.family.entropy(gaussian) - expected / self.problem.tempering.prior

    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Return the mean log predictive density per row, over a fixed set of draws."""
        draws = self.family.draw(theta[:, : self.width], self._scoring)
        members, samples, _ = draws.shape
        total = torch.zeros(members, dtype=theta.dtype, device=theta.device)
        for x, y, weight in held_out.blocks(members * samples):
            rows = held_out.log_likelihood_rows(draws.flatten(0, 1), x, y).reshape(members, samples, len(y), -1).sum(-1)
            total += sum_rows(torch.logsumexp(rows, 1) - math.log(samples), weight)
        return total / held_out.total_weight


def warm_start(problem: Problem, posterior: GaussianPosterior, chosen: Family, members: int) -> Tensor:
    """Return the parameters phi (M, P) of an earlier posterior. Raise if it is of another network or family."""
    if (posterior.family, posterior.components) != (chosen, members):
        raise InputError(
            "init",
            f"must be a posterior of {members} x {chosen}, got {posterior!r}",
            "Or pass its means: init=posterior.loc",
        )
    mine, theirs = signature(problem.layout), signature(posterior.layout)
    if mine != theirs:
        here, there = next((a, b) for a, b in itertools.zip_longest(mine, theirs) if a != b)
        raise InputError(
            "init", f"must be a posterior of this network, got one with {there}, where the problem has {here}"
        )
    return posterior.phi.detach().to(problem.device, problem.layout.dtype).clone()


def kl_weight(kind: str, index: int, batches: int) -> float:
    """Return the weight of the KL term in minibatch `index` (from 0) of an epoch.

    The weights of an epoch sum to one.
    """
    if kind == "uniform":
        return 1 / batches
    return 2.0 ** -(index + 1) / (1 - 2.0**-batches)
