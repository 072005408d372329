"""IVON, the improved variational online Newton method: a Gaussian over the weights at the cost of Adam.

    q(w) = N(m, diag(sigma^2)),   sigma^2 = 1 / (N (h + delta)),   delta = 1 / (N s^2 T_prior) for a prior N(loc, s^2)

    w ~ q;   g_hat = gradient of the mean loss at w, divided by T_lik;   h_hat = g_hat (w - m) / sigma^2
    g <- b1 g + (1 - b1) g_hat
    h <- b2 h + (1 - b2) h_hat + 1/2 (1 - b2)^2 (h - h_hat)^2 / (h + delta)
    m <- m - lr clip((g / (1 - b1^t) + delta (m - loc)) / (h + delta)),   |clip(.)| <= 0.1 (h + delta)^-1/2

This is natural-gradient descent on the free energy of Bayes by Backprop (Shen et al. 2024). E_q[h_hat] is the diagonal
of the expected Hessian, so once q has converged its precisions are those of the best Gaussian with independent weights.
A step evaluates one gradient, as a step of Adam does, and h replaces Adam's second moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_integer, check_positive, check_probability
from credibly.errors import InputError
from credibly.gaussians.families import MeanField
from credibly.inference.footprint import check_training
from credibly.inference.method import Fit, initial
from credibly.inference.training.batches import Batches
from credibly.inference.training.data import Data, split
from credibly.inference.training.expected_loss import ExpectedLoss
from credibly.inference.training.gradient_noise import largest_curvature, mean_curvature
from credibly.inference.training.ivon_step import IVONModuleStep, takes_module_step
from credibly.inference.training.loop import train
from credibly.inference.training.method import TrainingMethod
from credibly.inference.training.stream_batches import StreamBatches
from credibly.methods.bbb import warm_start
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem
from credibly.storage.record import Record

# Time constants of h in a run: at the end its initial value has a weight of e^-5 or less. A single estimate of h has a
# relative noise of about the root of the batches per epoch; in long runs averaging over more of them keeps it at 15 %.
RENEWALS, PER_EPOCH = (5.0, 15.0), 0.045
# Initial curvature over lr times the largest one: steps with a momentum of 0.9 diverge below 1/38.
STABLE = 0.1
# The largest weight of a single estimate of h, in short runs.
LARGEST_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class IVON(TrainingMethod[GaussianPosterior]):
    """IVON: a Gaussian over the weights by variational online Newton steps, at the cost of Adam.

    Args:
        lr: learning rate, a fraction of a Newton step.
        momentum: b1, the decay of the mean gradient.
        beta2: b2, the decay of the mean curvature; None uses 1 - r / steps, at least 0.9, with r from 5
            in runs of up to a hundred epochs to 15 in long ones.
        hess_init: initial curvature h, per row, of every weight: the initial variance is 1 / (N (hess_init + delta)).
            None measures the loss at the start: the mean of the Hessian's diagonal, or lr / 10 of its largest
            eigenvalue if that is more, with which the first steps are stable. The record keeps the value.
        samples: draws of the weights per step.
        members: Gaussians in the mixture, fitted side by side from different starting points.
        init: initial means: "network", "fresh", "prior" or an (M, D) tensor. A mean-field posterior of the same
            network, from IVON or Bayes by Backprop, also gives the standard deviations.
    """

    name: ClassVar[str] = "ivon"
    infers_scales: ClassVar[bool] = True
    label: ClassVar[str] = "IVON"
    lr: float = 0.1
    beta2: float | None = None
    hess_init: float | None = None
    samples: int = 1
    members: int = 1
    init: str | Tensor | GaussianPosterior = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("lr", self.lr)
        if self.optimiser != "adam":
            raise InputError("optimiser", f"must be left out, got {self.optimiser!r}", "IVON is an optimiser itself")
        if self.beta2 is not None:
            check_probability("beta2", self.beta2)
        if self.hess_init is not None:
            check_positive("hess_init", self.hess_init)
        for name in ("samples", "members"):
            check_integer(name, getattr(self, name))

    def check_memory(self, problem: Problem) -> None:
        """Raise if a fit would need more memory than is available: means, curvatures, mean gradients, and draws."""
        drawn = 2 * self.members * self.samples * problem.dim
        rows, size = self.rows_at_once(problem), 3 * self.members * problem.dim
        check_training(type(self).__name__, problem, parameters=size, copies=0, result=drawn, batch=rows)

    @property
    def starts_fresh(self) -> bool:
        """Whether members start at new initial values: several members from one point would stay together."""
        several = isinstance(self.init, str) and self.init == "network" and self.members > 1
        return several or super().starts_fresh

    def _fit(self, fit: Fit) -> GaussianPosterior:
        """Return the fitted Gaussians; `record.history` holds misfit and complexity per row, and beta2."""
        problem, seed = fit.problem, fit.seed
        data = split(problem, self, seed)
        steps, _, per_epoch = self.plan(data.count, problem.stream)
        beta2 = self.beta2 or decay_for(steps, steps / per_epoch)
        objective = ExpectedLoss(
            problem,
            data.count,
            members=self.members,
            samples=self.samples,
            betas=(self.momentum, beta2),
            clip=self.clip_norm,
            seed=seed,
        )
        theta, hess_init = self._start(fit, objective, data)
        # The update clips by the norm of the gradient alone; a generic step would include that of the curvature.
        options = replace(self, clip_norm=None)
        mesh = fit.world.all_rows()
        large = takes_module_step(problem, self, sharded=mesh.shape[1] > 1)

        def on_module(batches: Batches, steps: int) -> IVONModuleStep:
            window = batches.window if isinstance(batches, StreamBatches) else problem
            return IVONModuleStep(window, objective, options, steps, theta, graph=window is problem)

        with fit.keep_partial(lambda values, record, error: self._posterior(fit, objective, values, record)):
            done = train(
                problem,
                objective,
                theta,
                options,
                data,
                seed=seed,
                title=self.label,
                progress=fit.progress,
                mesh=mesh,
                own_step=on_module if large else None,
            )
        found = {"beta2": beta2, "hess_init": hess_init}
        return self._posterior(fit, objective, done.theta, fit.record({**done.history, **found}))

    def _start(self, fit: Fit, objective: ExpectedLoss, data: Data) -> tuple[Tensor, float | None]:
        """Return means and curvatures, (M, 2 D), and the initial curvature; None for that of a posterior."""
        problem = fit.problem
        if isinstance(self.init, GaussianPosterior):
            mean, sigma = MeanField().parts(warm_start(problem, self.init, MeanField(), self.members))
            return objective.parameters_of(mean, sigma), None
        several = isinstance(self.init, str) and self.init == "network" and self.members > 1
        mean = initial(problem, "fresh" if several else self.init, self.members, fit.seed)
        size = self.hess_init or self._measured(problem, mean, data, fit.seed)
        return torch.cat([mean, torch.full_like(mean, size)], -1), size

    def _measured(self, problem: Problem, mean: Tensor, data: Data, seed: int) -> float:
        """Return an initial curvature that suits the starting points (M, D)."""
        rows = self.plan(data.count, problem.stream)[1]
        found = []
        for one in mean.split(1):
            try:
                top = largest_curvature(problem, one, data, seed, rows=rows)
            except InputError:
                # The loss is flat at the start; steps with this curvature are those of gradient descent.
                top = 1.0
            found.append(max(STABLE * self.lr * top, mean_curvature(problem, one, data, seed, rows=rows)))
        return max(found)

    def _posterior(self, fit: Fit, objective: ExpectedLoss, theta: Tensor, record: Record) -> GaussianPosterior:
        return GaussianPosterior(Model.of(fit.problem), MeanField(), objective.gaussians(theta), record)

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return four draws per step, which cost little on a small network and halve the noise of mean and std."""
        return super().table_settings(layers, noise) | {"samples": 4}


def decay_for(steps: int, epochs: float) -> float:
    """Return the decay b2 of the mean curvature for a run of the given length."""
    renewals = min(max(PER_EPOCH * epochs, RENEWALS[0]), RENEWALS[1])
    return 1 - min(LARGEST_RATE, renewals / steps)
