"""The loss of IVON on a minibatch: the mean loss at draws from Gaussians, with their means and curvatures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, Tensors, map_inputs
from credibly.core.rng import draw_noise, normal, stream
from credibly.core.rows import sum_rows
from credibly.gaussians.families import MeanField
from credibly.inference.kernels.ivon import VariationalNewton, deviation
from credibly.inference.training.objectives import Objective, effective_rows
from credibly.problem import Problem

# Number of draws from each Gaussian for the score on held-out rows.
SCORED = 8


class ExpectedLoss(Objective):
    """E_q of the mean loss, for M Gaussians q = N(m, diag(1 / (N (h + delta)))) with theta (M, 2 D) = (m, h).

    A Normal prior enters the update through its precision, delta, without noise. Any other prior is part of the loss,
    and delta is 0.

    Args:
        problem: the density.
        n: number of training rows.
        members, samples: number of Gaussians, and of draws from each per step.
        betas: decay of the means of gradients and of curvatures.
        clip: largest norm of the gradient of a member; None for no limit.
        seed: seed of the draws.
        first: index of the first member, whose draws do not depend on the others.
    """

    part_names = ("misfit", "complexity")
    rule: VariationalNewton

    def __init__(
        self,
        problem: Problem,
        n: int,
        *,
        members: int,
        samples: int,
        betas: tuple[float, float],
        clip: float | None,
        seed: int,
        first: int = 0,
    ) -> None:
        self.problem, self.n, self.members, self.samples = problem, n, members, samples
        self.seed, self.first, self.looped = seed, first, problem.forward.looped
        self.weights, self.effective = problem.relative_weight, effective_rows(problem, n)
        prior = problem.prior
        self.prior_weight = 1 / problem.tempering.prior / self.effective
        zero = torch.zeros((), dtype=problem.layout.dtype, device=problem.device)
        exact = prior.is_normal
        delta = (self.prior_weight / torch.square(prior.std)).expand(problem.dim).contiguous() if exact else zero
        self.rule = VariationalNewton(delta, prior.loc if exact else zero, *betas, clip)

    @property
    def delta(self) -> Tensor:
        """Curvature of the prior, (D,), or () where it is 0 for all."""
        return self.rule.delta

    def parameters_of(self, loc: Tensor, sigma: Tensor) -> Tensor:
        """Return theta (M, 2 D) of Gaussians with these means and standard deviations."""
        return torch.cat([loc, 1 / (self.effective * torch.square(sigma)) - self.delta], -1)

    def gaussians(self, theta: Tensor) -> Tensor:
        """Return the phi (M, 2 D) of the mean-field family."""
        mean, curvature = theta.chunk(2, -1)
        return MeanField().phi((mean, deviation(curvature, self.delta, self.effective)))

    def noise(self, step: int) -> tuple[Tensor, ...]:
        """Draw standard normal numbers, (M, K, D), each member's from its own stream."""
        return (self._draws("variational Newton", self.samples, step),)

    def _draws(self, purpose: str, count: int, *step: int) -> Tensor:
        dim, dtype, device = self.problem.dim, self.problem.layout.dtype, self.problem.device
        members = range(self.first, self.first + self.members)
        streams = [stream(self.seed, purpose, m, *step, device=device) for m in members]
        return torch.cat([draw_noise((1, count, dim), own, dtype) for own in streams])

    def evaluate(
        self, theta: Tensor, own: Tensors, x: Inputs, y: Tensor, rows: Tensor | None, noise: Tensors, controls: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return misfit and complexity, and the estimates (g_hat, h_hat), (M, 2 D)."""
        problem, members, samples = self.problem, len(theta), self.samples
        mean, curvature = theta.chunk(2, -1)
        sigma, drawn = deviation(curvature, self.delta, self.effective), normal(noise[0], (problem.dim,))
        points = (mean.unsqueeze(1) + sigma.unsqueeze(1) * drawn).flatten(0, 1)
        shared = rows is None or rows.ndim == 1
        if rows is not None:
            of = rows if shared else rows.repeat_interleave(samples, 0)
            x, y = map_inputs(lambda t: t[of], x), y[of]
        count, weight = self.n if rows is None else rows.shape[-1], self.weights_of(rows)
        if weight is not None and not shared:
            weight = weight.repeat_interleave(samples, 0)
        inside = 0.0 if problem.prior.is_normal else self.prior_weight
        scale = 1 / (count * problem.tempering.likelihood)
        log_lik, _, gradient = problem.parts_and_grad(points, x, y, scale, inside, shared=shared, weight=weight)
        slope = -gradient.reshape(members, samples, -1)
        found = (slope * drawn).mean(1) / sigma
        misfit = -scale * log_lik.reshape(members, samples).mean(1)
        parts = torch.stack([misfit, self._complexity(mean, sigma, points).to(misfit.dtype)], -1)
        return parts, torch.cat([slope.mean(1), found], -1)

    def _complexity(self, mean: Tensor, sigma: Tensor, points: Tensor) -> Tensor:
        """Return (E_q[log q] - E_q[log p] / T_prior) / N, (M,): the KL divergence per row at T = 1."""
        draws = points.reshape(len(mean), -1, mean.shape[-1])
        expected = self.problem.prior.expected_log_prob(mean, torch.square(sigma), draws)
        return (-MeanField().entropy((mean, sigma)) - expected / self.problem.tempering.prior) / self.effective

    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Return the mean log predictive density per row, over a fixed set of draws."""
        mean, curvature = theta.chunk(2, -1)
        sigma = deviation(curvature, self.delta, self.effective)
        noise = normal(self._draws("scoring", SCORED), (self.problem.dim,))[: len(theta)]
        points = (mean.unsqueeze(1) + sigma.unsqueeze(1) * noise).flatten(0, 1)
        total = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        for x, y, weight in held_out.blocks(len(points)):
            rows = held_out.log_likelihood_rows(points, x, y).reshape(len(theta), SCORED, len(y), -1).sum(-1)
            total += sum_rows(torch.logsumexp(rows, 1) - math.log(SCORED), weight)
        return total / held_out.total_weight
