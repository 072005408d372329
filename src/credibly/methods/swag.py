"""SWAG: a Gaussian fitted to the iterates of stochastic gradient descent at a constant rate (Maddox et al. 2019).

    q(w) = N(mean, (diag(variance) + D D' / (K - 1)) / 2)

mean and variance are those of all T recorded iterates; the K columns of D are the last iterates minus the running mean
at their time. SGD starts at a MAP fit, or at the weights of the network. Its noise is that of minibatches, so the width
of q depends on learning rate, batch size and curvature. It describes the region that training moves in, not the
posterior.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_integer, check_positive
from credibly.core.progress import Progress
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import InputError, TrainingError
from credibly.gaussians.families import LowRank
from credibly.inference.adaptation import Welford
from credibly.inference.method import Fit, initial
from credibly.inference.training.batches import Batches
from credibly.inference.training.data import Data, split
from credibly.inference.training.loop import make_step, train
from credibly.inference.training.method import TrainingMethod
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem

# Minibatches per epoch by default: with all rows in one there would be no noise to learn from.
LEAST_BATCHES = 8
# Steps between two recorded iterates, by default.
LEAST_STEPS = 10
# So that a weight that never moved has a density.
LEAST_VARIANCE = 1e-30
# The default learning rate, as a fraction of the largest at which gradient descent is stable.
STABLE_FRACTION = 0.2
POWER_STEPS = 12
# Learning rates tried if none is given.
TRIALS = 5


@dataclass(frozen=True, kw_only=True)
class SWAG(TrainingMethod[GaussianPosterior]):
    """SWAG: a Gaussian with the mean and covariance of the weights that SGD visits at a constant learning rate.

    Args:
        rank: K, the number of last iterates in the low-rank part; from 2 to `iterates`.
        iterates: T, the number of recorded iterates.
        every: steps between two of them; None takes an epoch, but at least 10.
        sgd_lr: the constant learning rate, on the loss -(1/N) log p. None takes a fifth of the largest stable rate,
            from the largest curvature at the start and the momentum; if SGD diverges all the same, it restarts with a
            quarter of that.
        init: "map" (a MAP fit first, with the settings of training), "network" (the weights as given: a posterior
            around a network that is trained already) or a (1, D) tensor.

    SGD has the momentum, batch size and clipping of the training settings; without a batch size, minibatches have 128
    rows, or an eighth of the rows if there are few.
    """

    name: ClassVar[str] = "swag"
    rank: int = 20
    iterates: int = 40
    every: int | None = None
    sgd_lr: float | None = None
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
        if isinstance(self.init, str) and self.init not in ("map", "network"):
            raise InputError("init", f'must be "map", "network" or a (1, D) tensor, got {self.init!r}')

    def _fit(self, fit: Fit) -> GaussianPosterior:
        """Return the Gaussian of the iterates; `record.history` holds the learning rate and the losses."""
        problem, seed, mesh, progress = fit.problem, fit.seed, fit.world.all_rows(), fit.progress
        data = split(problem, self, seed)
        batch = self.batch_size or max(1, min(128, data.count // LEAST_BATCHES))
        if batch >= data.count:
            raise InputError(
                "batch_size",
                f"must be smaller than the number of training rows, {data.count}, got {batch}",
                "With all rows in a batch, SGD has no noise",
            )
        theta = initial(problem, "network" if isinstance(self.init, str) else self.init, 1, seed)
        history: dict[str, Any] = {}
        objective = NegativeLogDensity(problem, data.count)
        if isinstance(self.init, str) and self.init == "map":
            try:
                done = train(
                    problem, objective, theta, self, data, seed=seed, title="MAP start", progress=progress, mesh=mesh
                )
            except TrainingError as error:
                # A point estimate is not a result of this method.
                error.posterior = None
                raise
            theta, history = done.theta, done.history
        rates = [] if self.sgd_lr is None else [self.sgd_lr]
        if not rates:
            first = STABLE_FRACTION * 2 * (1 - self.momentum) / largest_curvature(problem, theta, data, seed)
            rates = [first / 4**trial for trial in range(TRIALS)]
        for rate in rates:
            try:
                moments = self._descend(problem, objective, theta.clone(), data, batch, rate, seed, mesh, progress)
                break
            except TrainingError:
                # A rate that diverges gives way to the next; the last one raises.
                if rate == rates[-1]:
                    raise
        history |= {"sgd_lr": rate, "sgd_batch": batch, "iterates": self.iterates, "sgd_loss": moments.losses}
        steps = self.iterates * (self.every or max(LEAST_STEPS, data.count // batch))
        history["gradients"] = round(history.get("gradients", 0.0) + steps * batch / data.count, 2)
        return GaussianPosterior(
            Model.of(problem),
            LowRank(self.rank),
            moments.phi(problem.layout.dtype),
            fit.record(history),
        )

    def _descend(
        self,
        problem: Problem,
        objective: NegativeLogDensity,
        theta: Tensor,
        data: Data,
        batch: int,
        rate: float,
        seed: int,
        mesh: Mesh,
        progress: bool | None,
    ) -> Iterates:
        """Run SGD at a constant rate from theta (1, D), in place, and record iterates."""
        every = self.every or max(LEAST_STEPS, data.count // batch)
        steps = every * self.iterates
        options = replace(self, optimiser="sgd", schedule="constant", lr=rate, warmup=0)
        batches = Batches(data.rows, batch, seed=seed, members=1, first=1, device=problem.device)
        step = make_step(problem, objective, options, steps, theta, batch, mesh)
        active = torch.ones(1, dtype=theta.dtype, device=theta.device)
        moments = Iterates(self.rank, theta.shape[-1], theta.device)
        with Progress("SWAG", steps, progress) as bar:
            done = 0
            while done < steps:
                done = step.advance_to(theta, batches, done, (done // every + 1) * every, active)
                if done % every == 0:
                    loss = float(step.parts.double().sum())
                    if not math.isfinite(loss) or not bool(torch.isfinite(theta).all()):
                        raise TrainingError(
                            f"SWAG: the loss was not finite by step {done}. Try a smaller sgd_lr ({rate:.3g} now)",
                            step=done,
                            member=0,
                            posterior=None,
                        )
                    moments.add(theta[0], loss)
                    bar.update(done, final=done == steps, loss=loss)
        return moments


class Iterates:
    """Moments of the iterates in float64, and the last deviations from the running mean."""

    def __init__(self, rank: int, dim: int, device: torch.device) -> None:
        self.running = Welford(1, dim, device)
        self.deviations: deque[Tensor] = deque(maxlen=rank)
        self.losses: list[float] = []

    def add(self, theta: Tensor, loss: float = math.nan) -> None:
        """Add an iterate (D,)."""
        self.running.update(theta.unsqueeze(0))
        self.deviations.append((theta.double() - self.running.mean[0]).to(theta.dtype))
        self.losses.append(loss)

    def phi(self, dtype: torch.dtype) -> Tensor:
        """Return the parameters of the low-rank family, (1, P)."""
        variance = self.running.squares[0] / self.running.count
        sigma = (0.5 * variance).clamp_min(LEAST_VARIANCE).sqrt()
        rho = sigma + torch.log(-torch.expm1(-sigma))
        factor = torch.stack(tuple(self.deviations), -1).double() / math.sqrt(2 * (len(self.deviations) - 1))
        return torch.cat([self.running.mean[0], rho, factor.flatten()]).to(dtype).unsqueeze(0)


def largest_curvature(problem: Problem, theta: Tensor, data: Data, seed: int, rows: int = 2048) -> float:
    """Return the largest absolute eigenvalue of the Hessian of -(1/N) log p_T at theta (1, D), by power iteration."""
    pool = torch.arange(data.count, device=problem.device) if isinstance(data.rows, int) else data.rows
    order = torch.randperm(len(pool), generator=stream(seed, "curvature rows"))[:rows].to(problem.device)
    chosen = pool[order]
    vector = torch.randn(theta.shape, generator=stream(seed, "curvature"), dtype=torch.float64).to(theta)
    vector = vector / vector.norm()
    # Of the difference quotient.
    reach = 1e-3 * (1 + float(theta.norm()))
    if theta.dtype == torch.float64:
        reach *= 1e-3
    size = 0.0
    for _ in range(POWER_STEPS):
        ahead, behind = (problem.minibatch(theta + sign * reach * vector, chosen).gradient for sign in (1, -1))
        product = (behind - ahead) / (2 * reach * problem.n)
        size = float(product.norm())
        if not math.isfinite(size) or size == 0:
            raise InputError("sgd_lr", "must be given: the curvature at the start is zero or not finite")
        vector = product / size
    return size
