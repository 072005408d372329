"""Bayes by Backprop: a Gaussian over the weights, fitted by the free energy (Blundell et al. 2015).

    VFE = E_q[log q(w)] - (1/T_prior) E_q[log p(w)] - (1/T_lik) E_q[log p(D | w)]          (ELBO = -VFE at T = 1)

Draws are reparameterised, w = mu + sigma e, so that the gradient passes through them. The entropy is in closed form; so is
E_q[log p] for Normal priors, and it is averaged over the draws for the others. What is minimised is VFE / N. A minibatch i of
the M in an epoch carries the share pi_i of the complexity (the first two terms): 1/M, or Blundell's 2^(M-i) / (2^M - 1); the
shares sum to one over an epoch, so an epoch adds up to the free energy.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.autodiff import grad_and_aux
from credibly.core.inputs import Inputs, map_inputs
from credibly.core.rng import draw_noise, normal, stream
from credibly.distributed.world import Mesh
from credibly.errors import InputError, TrainingError
from credibly.gaussians.families import Family, MeanField, Parts, family
from credibly.inference.method import Method, fit_with_rows, initial, partial_result
from credibly.inference.training.loop import Training, split, train
from credibly.inference.training.objectives import NegativeLogDensity, Objective
from credibly.inference.training.reparameterisation import LayerNoise, choose_estimator
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.priors.elementwise import positive
from credibly.priors.gaussian import signature
from credibly.problem import Problem

FINAL_SAMPLES = 32  # draws behind the ELBO that is reported at the end


@dataclass(frozen=True, kw_only=True)
class BayesByBackprop(Training, Method):
    """Bayes by Backprop: a Gaussian over the weights, fitted by the variational free energy.

    Args:
        family: "mean-field", "low-rank" (with `rank`) or "full-rank" (small networks).
        samples: draws of the weights a step.
        estimator: how a draw enters the network. "weights" (any module), "local" (local reparameterisation: noise on the
            outputs of Linear layers; for convolutions it treats positions as independent, which the posterior does not),
            "flipout" (a draw for each row from one by random signs; Linear and convolutions), or "auto".
        members: Gaussians in the mixture, fitted side by side from different starts.
        init: where the means start: "network", "fresh", "prior", "map" (a MAP fit first) or an (M, D) tensor. A posterior of the
            same family and network gives the deviations too: a warm start, as in continual learning.
        init_scale: standard deviation of every weight at the start.
        kl_weights: "uniform" or "geometric" shares of the complexity over an epoch's minibatches.
        kl_warmup: steps over which the complexity's weight rises to 1, where it stays.
        learn_prior_scale: empirical Bayes: one factor on the prior's scale for each of the network's groups, by the
            same free energy.
    """

    name: ClassVar[str] = "bbb"
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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(name, f"found {value!r}", "Pass a whole number from 1 up")
        if self.estimator not in ("auto", "weights", "local", "flipout"):
            raise InputError("estimator", f"found {self.estimator!r}", 'Pass "auto", "weights", "local" or "flipout"')
        if self.kl_weights not in ("uniform", "geometric"):
            raise InputError("kl_weights", f"found {self.kl_weights!r}", 'Pass "uniform" or "geometric"')
        positive("init_scale", self.init_scale)
        if not isinstance(self.learn_prior_scale, bool):
            raise InputError("learn_prior_scale", f"found {self.learn_prior_scale!r}", "Pass True or False")
        if isinstance(self.kl_warmup, bool) or not isinstance(self.kl_warmup, int) or self.kl_warmup < 0:
            raise InputError("kl_warmup", f"found {self.kl_warmup!r}", "Pass a number of steps from 0 up")

    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> GaussianPosterior:
        """The fitted Gaussian; `posterior.record.history` holds the free energy, its parts and the ELBO in nats."""
        return fit_with_rows(self, problem, seed, out, progress, self._fit)

    def _fit(
        self, problem: Problem, seed: int, mesh: Mesh, out: str | os.PathLike[str] | None, progress: bool | None
    ) -> GaussianPosterior:
        data = split(problem, self, seed)
        steps, batch, per_epoch = self.plan(data.count)
        if self.kl_warmup >= steps:
            raise InputError(
                "kl_warmup", f"found {self.kl_warmup} for {steps} steps", "It has to end before training does"
            )
        chosen = family(self.family, self.rank)
        if self.learn_prior_scale and not problem.prior.groups:
            raise InputError(
                "learn_prior_scale", "found with a prior that is a posterior", "Its scale is known: leave it at False"
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
        model, method = Model.of(problem), self
        width = chosen.size(problem.dim)

        def posterior(values: Tensor, history: dict[str, Any], status: str = "complete") -> GaussianPosterior:
            return GaussianPosterior(
                model, chosen, values[:, :width].contiguous(), method.record(problem, seed, history, status)
            )

        with partial_result(out, lambda values, error: posterior(values, {"error": str(error)}, "partial")):
            done = train(
                problem, objective, phi, self, data, seed=seed, title="Bayes by Backprop", shared_batches=True, progress=progress,
                mesh=mesh,
            )  # fmt: skip
        history = {**done.history, "estimator": noise.name, "estimator_reason": noise.reason}
        factor = done.theta[:, width:].exp() if self.learn_prior_scale else None
        if factor is not None:
            history["prior_scale_factor"] = factor.tolist()
        elbo = posterior(done.theta, {}).elbo(problem, samples=FINAL_SAMPLES, seed=seed, prior_scale=factor)
        history |= {"elbo": float(elbo.value), "elbo_standard_error": float(elbo.standard_error)}
        return posterior(done.theta, history)

    def _start(self, problem: Problem, init: str | Tensor, seed: int, mesh: Mesh, progress: bool | None) -> Tensor:
        if isinstance(init, Tensor) or init != "map":
            several = isinstance(init, str) and init == "network" and self.members > 1
            return initial(problem, "fresh" if several else init, self.members, seed)
        theta, data = (
            initial(problem, "fresh" if self.members > 1 else "network", self.members, seed),
            split(problem, self, seed),
        )
        objective = NegativeLogDensity(problem, data.count)
        try:
            return train(
                problem, objective, theta, self, data, seed=seed, title="MAP start", progress=progress, mesh=mesh
            ).theta
        except TrainingError as error:
            error.posterior = None  # a point is none of this method's results
            raise


class FreeEnergy(Objective):
    """VFE / N of M Gaussians on a minibatch, with the complexity's share of this step."""

    part_names = ("misfit", "complexity")

    def __init__(
        self, problem: Problem, chosen: Family, n: int, options: BayesByBackprop, layers: LayerNoise, *, seed: int, per_epoch: int
    ) -> None:  # fmt: skip
        self.problem, self.family, self.n, self.options, self.layers = problem, chosen, n, options, layers
        self.seed, self.per_epoch = seed, per_epoch
        self.width = chosen.size(problem.dim)
        self._scoring = self._normal((self._draws(8, stream(seed, "scoring", device=problem.device)),))[0]

    def figures(self, step: int) -> tuple[float, ...]:
        """The weight of the complexity: its share of this minibatch (times M, for a mean loss) and the warm-up."""
        share = kl_share(self.options.kl_weights, step % self.per_epoch, self.per_epoch) * self.per_epoch
        warmup = min(1.0, (step + 1) / (self.options.kl_warmup + 1))
        return (share * warmup,)

    def noise(self, step: int) -> tuple[Tensor, ...]:
        """Standard normal numbers of the draws (M, K, .), and of the layers where the estimator puts noise on them."""
        generator = stream(self.seed, "variational noise", step, device=self.problem.device)
        samples = self.options.samples
        if self.layers.whole and self.problem.prior.closed_form:  # then no weight is ever drawn
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
        return weights, *(layers if self.share is None else self.layers.cut(layers, self.share))

    def evaluate(
        self, theta: Tensor, own: tuple[Tensor, ...], x: Inputs, y: Tensor, rows: Tensor | None, noise: tuple[Tensor, ...], figures: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Misfit and complexity, and the gradient of their sum."""
        if rows is not None:
            x, y = map_inputs(lambda t: t[rows], x), y[rows]
        count = self.n if rows is None else rows.shape[-1]
        noise = self._normal(noise)

        def total(phi: Tensor) -> tuple[Tensor, Tensor]:
            gaussian, stretch = self._parts(phi)
            log_lik = self._log_likelihood(gaussian, x, y, noise)
            misfit = -log_lik / (count * self.problem.tempering.likelihood)
            complexity = figures[0] * self._complexity(gaussian, stretch, noise[0]) / self.n
            parts = torch.stack([misfit, complexity.to(misfit.dtype)], -1)
            return parts.sum(), parts

        gradient, parts = grad_and_aux(total, theta)
        return parts.detach(), gradient

    def _parts(self, phi: Tensor) -> tuple[Parts, Tensor | None]:
        """The Gaussian, taken apart once, and the factors on the prior's scales where they are learned."""
        if not self.options.learn_prior_scale:
            return self.family.parts(phi), None
        gaussian, stretch = phi.split([self.width, phi.shape[-1] - self.width], -1)
        return self.family.parts(gaussian), stretch.exp()

    def log_likelihood(self, phi: Tensor, x: Inputs, y: Tensor, noise: tuple[Tensor, ...]) -> Tensor:
        """E_q log p(batch | w), (M,), averaged over the draws of the step."""
        return self._log_likelihood(self._parts(phi)[0], x, y, self._normal(noise))

    def _log_likelihood(self, gaussian: Parts, x: Inputs, y: Tensor, noise: tuple[Tensor, ...]) -> Tensor:
        if self.layers.name != "weights":
            mu, sigma = gaussian
            return self.layers.log_likelihood(self.problem, mu[0], sigma[0], noise, x, y).unsqueeze(0)
        draws = self.family.draw(gaussian, noise[0])
        rows = self.problem.log_likelihood_rows(draws.flatten(0, 1), x, y)
        return rows.flatten(1).sum(1).reshape(draws.shape[:2]).mean(1)

    def complexity(self, phi: Tensor, noise: Tensor) -> Tensor:
        """E_q[log q] - E_q[log p] / T_prior, (M,): the KL divergence at T = 1."""
        return self._complexity(*self._parts(phi), self._normal((noise,))[0])

    def _complexity(self, gaussian: Parts, stretch: Tensor | None, noise: Tensor) -> Tensor:
        prior, dim = self.problem.prior, self.problem.dim
        # In closed form the draws are not looked at, and are not made.
        draws = noise if prior.closed_form else self.family.draw(gaussian, noise)
        loc, variance = self.family.loc(gaussian, dim), self.family.variance(gaussian, dim)
        expected = prior.expected_log_prob(loc, variance, draws, stretch, self.family.factor(gaussian))
        return -self.family.entropy(gaussian) - expected / self.problem.tempering.prior

    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Mean log predictive density a row, over a fixed set of draws."""
        draws = self.family.draw(theta[:, : self.width], self._scoring)
        members, samples, _ = draws.shape
        total = torch.zeros(members, dtype=theta.dtype, device=theta.device)
        for x, y in held_out.blocks(members * samples):
            rows = held_out.log_likelihood_rows(draws.flatten(0, 1), x, y).reshape(members, samples, len(y), -1).sum(-1)
            total += (torch.logsumexp(rows, 1) - math.log(samples)).sum(-1)
        return total / held_out.n


def warm_start(problem: Problem, posterior: GaussianPosterior, chosen: Family, members: int) -> Tensor:
    """The parameters phi (M, P) of an earlier posterior, to go on from; another network's or family's is refused."""
    if (posterior.family, posterior.components) != (chosen, members):
        raise InputError(
            "init",
            f"found {posterior!r} for {members} x {chosen}",
            "Pass a posterior of the same family, or its means: init=posterior.loc",
        )
    mine, theirs = signature(problem.layout), signature(posterior.layout)
    if mine != theirs:
        here, there = next((a, b) for a, b in itertools.zip_longest(mine, theirs) if a != b)
        raise InputError(
            "init", f"is of another network: it has {there}, the problem {here}", "Pass one of this network"
        )
    return posterior.phi.detach().to(problem.device, problem.layout.dtype).clone()


def kl_share(kind: str, place: int, batches: int) -> float:
    """The share of the complexity that minibatch number `place` (from 0) of an epoch carries; an epoch's sum to one."""
    if kind == "uniform":
        return 1 / batches
    return 2.0 ** -(place + 1) / (1 - 2.0**-batches)
