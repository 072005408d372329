"""SWAG: a Gaussian fitted to the iterates of stochastic gradient descent at a constant rate (Maddox et al. 2019).

    q(w) = N(mean, (diag(variance) + D D' / (K - 1)) / 2)

mean and variance are those of all T recorded points; the K columns of D are the last points minus the running mean at
the time. SGD starts at a MAP fit, or at the weights of the network. Its noise is that of minibatches.

At a given learning rate the points are iterates, as in the paper. Their stationary variance follows from learning rate,
batch size and curvature (Mandt, Hoffman & Blei 2017). It describes the region that training moves in, not the
posterior, and no single rate matches the posterior's variance in more than one direction, since for a well-specified
likelihood it is the same in all. By default the points are therefore averages over windows of m steps, stretched around
their mean, whose variance is the posterior's in every direction that relaxes within a window
(`training.gradient_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_integer, check_positive
from credibly.core.progress import Progress
from credibly.distributed.world import Mesh
from credibly.errors import InputError, TrainingError
from credibly.gaussians.families import LowRank
from credibly.inference.footprint import check_training
from credibly.inference.method import Fit, initial
from credibly.inference.training.batches import Batches
from credibly.inference.training.data import Data, split
from credibly.inference.training.gradient_noise import (
    GradientNoise,
    IndependentBatches,
    Rescaled,
    gradient_noise,
    largest_curvature,
)
from credibly.inference.training.held_out_noise import HELD_OUT, TRAINING, check_noise_from, with_held_out_noise
from credibly.inference.training.iterates import make_iterates
from credibly.inference.training.loop import make_step, train
from credibly.inference.training.method import TrainingMethod
from credibly.inference.training.module_step import ModuleStep, takes_module_steps
from credibly.inference.training.objectives import NegativeLogDensity, Objective, effective_rows
from credibly.inference.training.steps import Step
from credibly.inference.training.stream_batches import StreamBatches, make_batches
from credibly.inference.training.stream_modules import StreamModules
from credibly.inference.training.window_averages import deviations_in_place
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem

# Minibatches per epoch by default: a single one would have no noise to learn from. For averages, whose width does not
# depend on the batch size, larger batches keep the noise of the Hessian down.
LEAST_BATCHES, LEAST_BATCHES_AVERAGED = 8, 4
# Steps between two recorded iterates, by default.
LEAST_STEPS = 10
# The default learning rate times the largest curvature, over 1 - momentum: plain gradient descent is stable up to 2.
RATE_BY_CURVATURE = 1.0
# The same times the trace of the Hessian, over the batch size. The noise of minibatch Hessians, and of gradients away
# from the mode, widens SGD by about this fraction.
RATE_BY_TRACE = 0.2
# Averages per pass over a stream.
WINDOWS_PER_PASS = 4
# Number of learning rates tried if none is given.
TRIALS = 5


@dataclass(frozen=True, kw_only=True)
class SWAG(TrainingMethod[GaussianPosterior]):
    """SWAG: a Gaussian with the mean and covariance of the weights that SGD visits at a constant learning rate.

    Args:
        rank: K, the number of last points in the low-rank part; from 2 to `iterates`.
        iterates: T, the number of recorded points.
        every: steps per point. None means one epoch: with `sgd_lr` at least 10 steps, without it at least the steps of
            training divided by `iterates`.
        sgd_lr: the constant learning rate of SWAG as published, on the loss -(1/N) log p: points are iterates, and the
            rate sets their variance. None matches the posterior instead: points are averages over `every` steps of
            SGD on independent minibatches, stretched by the measured noise of the gradients. The rate then only
            decides which directions have relaxed. It is a fifth of the largest stable one, with each weight in units
            of its gradient noise; if SGD still diverges, it restarts with a quarter of that.
        noise_from: rows that the mean of learned noise comes from: "training" or "held-out" (those of `validation`,
            or else ten folds, each predicted by a MAP fit to the others).
        init: "map" (a MAP fit first, with the training settings), "network" (the weights as given: a posterior around
            an already trained network) or a (1, D) tensor.

    SGD uses the momentum and batch size of the training settings, and with `sgd_lr` their clipping; without a batch
    size, minibatches have 128 rows, or an eighth of the rows if there are few.
    """

    name: ClassVar[str] = "swag"
    rank: int = 20
    iterates: int = 40
    every: int | None = None
    sgd_lr: float | None = None
    noise_from: str = TRAINING
    init: str | Tensor = "map"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rank", 2), ("iterates", 2), ("every", 1)):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            check_integer(name, value, least)
        if self.rank > self.iterates:
            raise InputError("rank", f"must be at most the number of iterates, {self.iterates}, got {self.rank}")
        if self.sgd_lr is not None:
            check_positive("sgd_lr", self.sgd_lr)
        check_noise_from(self.noise_from)
        if isinstance(self.init, str) and self.init not in ("map", "network"):
            raise InputError("init", f'must be "map", "network" or a (1, D) tensor, got {self.init!r}')

    def check_memory(self, problem: Problem) -> None:
        """Raise if a fit would need more memory than is available: averages or deviations, then the Gaussian."""
        # For a large network the deviations are part of the Gaussian.
        recorded = 0 if self.sgd_lr is not None else self.iterates + 1
        # Running moments in float64, and the parameters of the Gaussian.
        result = (recorded + 4 + 2 + self.rank) * problem.dim
        rows = self.rows_at_once(problem)
        check_training(type(self).__name__, problem, parameters=problem.dim, copies=2, result=result, batch=rows)

    def _fit(self, fit: Fit) -> GaussianPosterior:
        """Return the Gaussian of the iterates; `record.history` holds the learning rate and the losses."""
        problem, seed, mesh, progress = fit.problem, fit.seed, fit.world.all_rows(), fit.progress
        data = split(problem, self, seed)
        batch, every = self._window(problem, data)
        begin = initial(problem, "network" if isinstance(self.init, str) else self.init, 1, seed)
        objective = NegativeLogDensity(problem, data.count)
        theta = begin.clone()
        history: dict[str, Any] = {}
        if isinstance(self.init, str) and self.init == "map":
            theta, history = self._mode(fit, objective, theta, data, mesh)
        moments = make_iterates(self.rank, problem.dim, problem.device, problem.layout.dtype)
        if self.sgd_lr is not None:
            rate = self.sgd_lr
            batches: Batches = make_batches(problem, seed, "SWAG") or Batches(
                data.rows, batch, seed=seed, members=1, first=1, device=problem.device
            )
            for point, loss in self._descend(fit, objective, theta, batches, rate, every):
                moments.add(point, loss)
        else:
            noise = gradient_noise(problem, theta, data, batch, seed)
            rate, averages, losses = self._averages(fit, objective, theta, data, batch, every, noise)
            stretch = math.sqrt(every / (effective_rows(problem, data.count) * noise.ratio))
            for point, loss in zip(self._points(averages, stretch, problem.prior.std), losses[1:]):
                moments.add(point, loss)
            history |= {"noise_ratio": noise.ratio, "stretch": stretch}
        history |= {"sgd_lr": rate, "sgd_batch": batch, "sgd_every": every}
        history |= {"iterates": self.iterates, "sgd_loss": moments.losses}
        # Averages need two more windows: SGD forgets its start in the first, and a difference takes two.
        steps = every * (self.iterates + (0 if self.sgd_lr is not None else 2))
        history["gradients"] = round(history.get("gradients", 0.0) + steps * batch / data.count, 2)
        phi = moments.phi(problem.layout.dtype)
        if self.noise_from == HELD_OUT:
            of_rows = partial(NegativeLogDensity, problem)
            found, history["held_out_noise"] = with_held_out_noise(
                problem, theta, data, of_rows, self, begin, seed=seed, progress=progress, mesh=mesh
            )
            own = slice(problem.layout.network_dim, problem.dim)
            phi[:, own] = found[:, own]
        return GaussianPosterior(Model.of(problem), LowRank(self.rank), phi, fit.record(history))

    def _window(self, problem: Problem, data: Data) -> tuple[int, int]:
        """Return the rows per minibatch of SGD, and its steps per recorded point."""
        parts = LEAST_BATCHES if self.sgd_lr is not None else LEAST_BATCHES_AVERAGED
        batch = self.batch_size or max(1, min(128, data.count // parts))
        batch = batch if problem.stream is None else problem.stream.batch
        if batch >= data.count:
            raise InputError(
                "batch_size",
                f"must be smaller than the number of training rows, {data.count}, got {batch}",
                "With all rows in a batch, SGD has no noise",
            )
        every = self.every or max(LEAST_STEPS, data.count // batch)
        if self.sgd_lr is None:
            length = -(-self.plan(data.count, problem.stream)[0] // self.iterates)
            every = self.every or max(LEAST_STEPS, data.count // batch, length)
            if problem.stream is not None:
                every = window_of_stream(self.every, every, problem.stream.batches)
        return batch, every

    def _mode(
        self, fit: Fit, objective: NegativeLogDensity, theta: Tensor, data: Data, mesh: Mesh
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the MAP fit at which SGD starts, (1, D), and its history."""
        try:
            done = train(
                fit.problem,
                objective,
                theta.clone(),
                self,
                data,
                seed=fit.seed,
                title="MAP start",
                progress=fit.progress,
                mesh=mesh,
            )
        except TrainingError as error:
            # A point estimate is not a result of this method.
            error.posterior = None
            raise
        return done.theta, done.history

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return settings that estimate the noise on held-out rows.

        The mean that SGD circles around has fitted some of the noise of the training rows.
        """
        return super().table_settings(layers, noise) | {"noise_from": HELD_OUT}

    @staticmethod
    def _points(averages: Tensor | list[Tensor], stretch: float, widest: Tensor) -> Iterable[Tensor]:
        """Return points (T, D) around the mean of all averages (T + 1, D) but the first."""
        if isinstance(averages, list):
            return deviations_in_place(averages, stretch, widest)
        # Half the variance of a difference is that of an average, free of the drift of the mean that SGD has when it
        # starts away from the mode.
        change = averages.diff(dim=0) / math.sqrt(2)
        spread = stretch * (change - change.mean(0))
        # The posterior is narrower than the prior. A weight that fluctuates more than that has not settled, and if it
        # is a noise scale it would widen every interval.
        spread = spread * (widest.double() / spread.std(0)).clamp(max=1)
        return averages[1:].mean(0) + spread

    def _averages(
        self,
        fit: Fit,
        objective: NegativeLogDensity,
        theta: Tensor,
        data: Data,
        batch: int,
        every: int,
        noise: GradientNoise,
    ) -> tuple[float, Tensor | list[Tensor], list[float]]:
        """Return the learning rate, averages (T + 1, D) in float64 of all windows but the first, and their losses.

        Those of a large network are a list of T + 1 tensors (D,) in its own dtype.
        """
        problem, scale = fit.problem, noise.scale
        large = takes_module_steps(problem, objective, self, sharded=fit.world.all_rows().shape[1] > 1)
        # The batches of a pass are disjoint. Even so, half the variance of a difference of two windows of one pass is
        # that of independent batches.
        batches = make_batches(problem, fit.seed, "SWAG") or IndependentBatches(
            data.rows, batch, seed=fit.seed, purpose="independent batches", device=problem.device
        )
        top = largest_curvature(problem, theta, data, fit.seed, scale)
        first = (1 - self.momentum) * min(RATE_BY_CURVATURE / top, RATE_BY_TRACE * batch / noise.trace)
        rates = [first / 4**trial for trial in range(TRIALS)]
        for rate in rates:
            if large:
                # Equivalently, in the units of the weights, the gradients are multiplied by scale^2.
                own = torch.square(scale[0])
                descent = self._descend(fit, objective, theta.clone(), batches, rate, every, averaged=True, scale=own)
            else:
                rescaled = Rescaled(objective, scale)
                descent = self._descend(fit, rescaled, theta / scale, batches, rate, every, averaged=True)
            points: list[Tensor] = []
            losses: list[float] = []
            try:
                for number, (point, loss) in enumerate(descent):
                    if number:
                        # SGD forgets its start in the first window.
                        points.append(point)
                        losses.append(loss)
            except TrainingError:
                # After a rate that diverges comes the next; the last one raises.
                if rate == rates[-1]:
                    raise
                continue
            return rate, points if large else torch.stack(points) * scale.double(), losses
        raise AssertionError("the last rate returns or raises")

    def _descend(
        self,
        fit: Fit,
        objective: Objective,
        theta: Tensor,
        batches: Batches,
        rate: float,
        every: int,
        *,
        averaged: bool = False,
        scale: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, float]]:
        """Run SGD at a constant rate from theta (1, D), in place, and yield a point (D,) and the loss every few steps.

        Points are iterates, or averages over each window in float64, of which there are two more. Averages are taken
        without clipping: clipped gradients would have less noise than was measured. `scale` (D,) preconditions the
        steps of a large network, whose averages are in its own dtype.
        """
        steps = every * (self.iterates + (2 if averaged else 0))
        clip = None if averaged else self.clip_norm
        options = replace(self, optimiser="sgd", schedule="constant", lr=rate, warmup=0, clip_norm=clip)
        if scale is not None and isinstance(objective, NegativeLogDensity):
            if isinstance(batches, StreamBatches):
                step: Step = StreamModules(batches, objective, options, steps, theta, scale)
            else:
                step = ModuleStep(fit.problem, objective, options, steps, theta, scale)
        else:
            world = fit.world.all_rows()
            step = make_step(fit.problem, objective, options, steps, theta, batches.batch, world, batches)
        active = torch.ones(1, dtype=theta.dtype, device=theta.device)
        total = torch.zeros_like(theta[0], dtype=torch.float64 if scale is None else theta.dtype)
        with Progress("SWAG", steps, fit.progress) as bar:
            done = 0
            while done < steps:
                limit = done + 1 if averaged and scale is None else (done // every + 1) * every
                done = step.advance_to(theta, batches, done, limit, active)
                if averaged:
                    total += theta[0]
                if done % every == 0:
                    loss = float(step.parts.double().sum())
                    if not math.isfinite(loss) or not bool(torch.isfinite(theta).all()):
                        raise TrainingError(
                            f"SWAG: the loss was not finite by step {done}. Try a smaller sgd_lr ({rate:.3g} now)",
                            step=done,
                            member=0,
                            posterior=None,
                        )
                    yield (total / every if averaged else theta[0]), loss
                    total.zero_()
                    bar.update(done, final=done == steps, loss=loss)


def window_of_stream(given: int | None, wanted: int, per_epoch: int) -> int:
    """Return the steps per average on a stream: over a full pass gradient noise cancels, so windows must be shorter."""
    most = per_epoch // WINDOWS_PER_PASS
    if most < LEAST_STEPS or (given is not None and given > most):
        raise InputError(
            "every",
            f"must be from {LEAST_STEPS} to a fourth of the {per_epoch} batches of a pass over the stream, got {given}",
            "Pass sgd_lr for SWAG as published, use smaller batches, or keep the rows in memory",
        )
    return min(wanted, most)
