"""Inside variational inference: Bayes by Backprop on the two weights of f(x) = b tanh(a x), next to their posterior.

Two weights have a posterior that can be integrated on a grid, so both directions of the KL divergence are known:

    KL(q || p) = free energy + log evidence        minimised by Bayes by Backprop
    KL(p || q)                                     minimised by the Gaussian with the moments of p
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from credibly import likelihoods, priors
from credibly.gaussians.families import MeanField, family
from credibly.inference.training.callbacks import TrainingState
from credibly.methods import BayesByBackprop
from credibly.problem import Problem
from credibly.web.playground.bands import finite
from credibly.web.playground.densities import CELLS, LogDensity, grid, surface
from credibly.web.playground.protocol import VIRequest

# Cells per side of the grid that integrates the posterior, and how far it reaches in prior standard deviations.
FINE, REACH = 241, 4.0
# Draws of q per step: the free energy falls smoothly, and two weights cost next to nothing.
SAMPLES = 16
INIT_SCALE = 0.3
RATE = 0.03

Send = Callable[[dict[str, Any]], None]


def two_weights() -> nn.Sequential:
    """Return the network f(x) = b tanh(a x)."""
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False))


def make_problem(request: VIRequest) -> Problem:
    """Return the problem of the two weights."""
    return Problem(
        two_weights(),
        data=(torch.tensor(request.data.x), torch.tensor(request.data.y)),
        likelihood=likelihoods.Gaussian(scale=request.noise),
        prior=priors.Normal(scale=request.prior_scale),
        dtype=torch.float64,
    )


def run_variational(request: VIRequest, send: Send, cancelled: Callable[[], bool]) -> None:
    """Send the posterior, then q about 20 times during the fit and at its end, then the moments of the posterior."""
    problem = make_problem(request)
    reach = REACH * request.prior_scale
    exact = Exact(problem.log_density, reach)
    shown = surface(problem.log_density, (-reach, reach, CELLS), (-reach, reach, CELLS))
    send({"type": "surface", "id": request.id, **shown, "log_evidence": exact.log_evidence})
    chosen = family(request.family, 1)
    # A richer family is fitted twice: first as a mean field, from which it then starts.
    steps = request.steps * (1 if isinstance(chosen, MeanField) else 2)

    def show(phi: Tensor, step: int, stage: str, energy: float) -> None:
        its = chosen if phi.shape[1] == chosen.size(2) else MeanField()
        mean, covariance = its.loc(phi, 2)[0], its.covariance(phi, 2)[0]
        message = {"type": "q", "id": request.id, "stage": stage, "step": step, "steps": steps}
        message |= {"mean": mean.tolist(), "covariance": covariance.tolist(), "free_energy": finite(energy)}
        send(message | exact.divergences(mean, covariance))

    def watch(state: TrainingState) -> bool:
        phi = state.parameters.detach()
        if phi.shape[1] == MeanField().size(2) and not cancelled():
            show(phi, state.step, "running", state.loss[0] * problem.n)
        elif not cancelled():
            # Its parameters are in units of their start, not of the weights: there is no q to show before the end.
            send({"type": "progress", "id": request.id, "step": request.steps + state.step, "steps": steps})
        return cancelled()

    method = BayesByBackprop(
        family=request.family,
        samples=SAMPLES,
        estimator="weights",
        steps=request.steps,
        lr=RATE,
        init=torch.tensor([request.start], dtype=torch.float64),
        init_scale=INIT_SCALE,
        callback=watch,
    )
    posterior = method.fit(problem, seed=request.seed, progress=False)
    if cancelled():
        return
    show(posterior.phi, steps, "final", -posterior.record.history["elbo"])
    moments: dict[str, Any] = {"mean": exact.mean.tolist(), "covariance": exact.covariance.tolist()}
    moments |= exact.divergences(exact.mean, exact.covariance)
    send({"type": "finished", "id": request.id, "moments": moments})


class Exact:
    """The posterior of two weights on a grid: evidence, moments, and divergences from Gaussians."""

    def __init__(self, log_density: LogDensity, reach: float) -> None:
        self.points = grid((-reach, reach, FINE), (-reach, reach, FINE))
        self.cell = (2 * reach / (FINE - 1)) ** 2
        with torch.no_grad():
            log_joint = log_density(self.points)
        self.log_evidence = float(torch.logsumexp(log_joint, 0)) + math.log(self.cell)
        self.log_p = log_joint - self.log_evidence
        self.p = self.log_p.exp() * self.cell
        self.mean = self.p @ self.points
        centred = self.points - self.mean
        self.covariance = (centred * self.p.unsqueeze(1)).T @ centred

    def divergences(self, mean: Tensor, covariance: Tensor) -> dict[str, float | None]:
        """Return KL(q || p) and KL(p || q) of a Gaussian q, by sums over the grid."""
        q = torch.distributions.MultivariateNormal(mean.double(), covariance.double())
        log_q = q.log_prob(self.points)
        weights = log_q.exp() * self.cell
        to = (weights * (log_q - self.log_p)).sum()
        return {"kl_to_posterior": finite(to), "kl_from_posterior": finite((self.p * (self.log_p - log_q)).sum())}
