"""The free energy of variational inference: the loss of Bayes by Backprop on a minibatch."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from credibly.core.autodiff import grad_and_aux
from credibly.core.inputs import Inputs, Tensors, map_inputs
from credibly.core.rng import draw_noise, normal, stream
from credibly.core.rows import sum_rows
from credibly.gaussians.families import Family, Parts
from credibly.inference.training.objectives import Objective, effective_rows
from credibly.inference.training.reparameterisation import LayerNoise, OnLayers
from credibly.problem import Problem


class VariationalSettings(Protocol):
    """The settings of a variational fit that determine its loss."""

    @property
    def samples(self) -> int:
        """Draws per step."""

    @property
    def members(self) -> int:
        """Gaussians fitted side by side."""

    @property
    def kl_weights(self) -> str:
        """Weights of the KL term over an epoch: "uniform" or "geometric"."""

    @property
    def kl_warmup(self) -> int:
        """Steps over which the weight of the KL term rises to 1."""

    @property
    def learn_prior_scale(self) -> bool:
        """Whether factors on the prior scales follow the Gaussian in phi."""


class FreeEnergy(Objective):
    """VFE / N of M Gaussians on a minibatch, with this step's weight of the KL term."""

    part_names = ("misfit", "complexity")

    def __init__(
        self,
        problem: Problem,
        chosen: Family,
        n: int,
        options: VariationalSettings,
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
        if isinstance(self.layers, OnLayers):
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


def kl_weight(kind: str, index: int, batches: int) -> float:
    """Return the weight of the KL term in minibatch `index` (from 0) of an epoch.

    The weights of an epoch sum to one.
    """
    if kind == "uniform":
        return 1 / batches
    return 2.0 ** -(index + 1) / (1 - 2.0**-batches)
