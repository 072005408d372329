"""SWAG: a Gaussian fitted to the iterates of stochastic gradient descent at a constant rate (Maddox et al. 2019).

    q(w) = N(mean, (diag(variance) + D D' / (K - 1)) / 2)

mean and variance are those of all T iterates that were kept; the K columns of D are the last iterates less the running mean at
their time. The descent begins at a MAP fit, or at the weights that the network has. Its noise is that of minibatches, so the
width of q follows rate, batch size and curvature. It is a picture of the region that training moves in, not of the posterior.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.progress import Progress
from credibly.core.rng import stream
from credibly.distributed.world import Mesh, World
from credibly.errors import InputError, TrainingError
from credibly.gaussians.families import LowRank
from credibly.inference.adaptation import Welford
from credibly.inference.method import Method, fit_together, initial
from credibly.inference.training.loop import Data, Training, split, train
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.shared_steps import make_step
from credibly.inference.training.steps import Batches
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem

LEAST_BATCHES = 8  # minibatches in an epoch by default: with all rows in one there would be no noise to learn from
LEAST_STEPS = 10  # between two iterates that are kept, by default
LEAST_VARIANCE = 1e-30  # so that a weight that never moved has a density
SHARE = 0.2  # of the largest rate at which plain descent is stable, that the rate is by default
POWER_STEPS = 12
TURNS = 5  # rates that are tried where none was given


@dataclass(frozen=True, kw_only=True)
class SWAG(Training, Method):
    """SWAG: the mean and the spread of the weights that plain SGD wanders through, as a Gaussian.

    Args:
        rank: K, of the last iterates whose deviations make the low-rank part; from 2 to `iterates`.
        iterates: T, how many are kept.
        every: steps between two of them; None takes an epoch, but at least 10.
        sgd_lr: the constant rate of the descent that is followed, on the loss -(1/N) log p. None takes a fifth of what
            plain descent is stable at, by the largest curvature at its start and with what momentum adds; where the descent
            runs away all the same it begins anew with a quarter of that.
        init: "map" (a MAP fit first, by the settings of training), "network" (the weights as given: a posterior around a network
            that is trained already) or a (1, D) tensor.

    The descent has the momentum, the batch size and the clipping of the training settings; without a batch size its
    minibatches are 128 rows, or an eighth of them where there are few.
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
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(name, f"found {value!r}", f"Pass a whole number from {least} up")
        if self.rank > self.iterates:
            found = f"found {self.rank} for {self.iterates} iterates"
            raise InputError("rank", found, "Each column is the deviation of an iterate: pass at most their number")
        rate = self.sgd_lr
        if rate is not None and (
            isinstance(rate, bool) or not (isinstance(rate, (int, float)) and 0 < rate < math.inf)
        ):
            raise InputError("sgd_lr", f"found {rate!r}", "Pass a positive number, or None")
        if isinstance(self.init, str) and self.init not in ("map", "network"):
            raise InputError("init", f"found {self.init!r}", 'Pass "map", "network" or a (1, D) tensor')

    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> GaussianPosterior:
        """The Gaussian of the iterates; `posterior.record.history` holds the rate and the losses on the way."""

        def work(world: World, _mine: str | os.PathLike[str] | None, shown: bool | None) -> GaussianPosterior:
            return self._fit(problem, seed, world.all_rows(), shown)

        return fit_together(self, problem, seed, out, progress, work)

    def _fit(self, problem: Problem, seed: int, mesh: Mesh, progress: bool | None) -> GaussianPosterior:
        data = split(problem, self, seed)
        batch = self.batch_size or max(1, min(128, data.count // LEAST_BATCHES))
        if batch >= data.count:
            raise InputError(
                "batch_size",
                f"a batch of {batch} has all of the {data.count} training rows, so the descent has no noise",
                "Pass a smaller one",
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
                error.posterior = None  # a point is none of this method's results
                raise
            theta, history = done.theta, done.history
        rates = [] if self.sgd_lr is None else [self.sgd_lr]
        if not rates:
            first = SHARE * 2 * (1 - self.momentum) / largest_curvature(problem, theta, data, seed)
            rates = [first / 4**turn for turn in range(TURNS)]
        moments, rate = self._calmly(problem, objective, theta, data, batch, rates, seed, mesh, progress)
        history |= {"sgd_lr": rate, "sgd_batch": batch, "iterates": self.iterates, "sgd_loss": moments.losses}
        return GaussianPosterior(
            Model.of(problem),
            LowRank(self.rank),
            moments.phi(problem.layout.dtype),
            self.record(problem, seed, history),
        )

    def _calmly(
        self, problem: Problem, objective: NegativeLogDensity, theta: Tensor, data: Data, batch: int, rates: list[float], seed: int,
        mesh: Mesh, progress: bool | None,
    ) -> tuple[Iterates, float]:  # fmt: skip
        """The descent at the first of the rates that it does not run away with, and that rate."""
        for rate in rates:
            try:
                return self._descend(problem, objective, theta.clone(), data, batch, rate, seed, mesh, progress), rate
            except TrainingError:
                if rate == rates[-1]:
                    raise
        raise AssertionError("there is at least one rate")

    def _descend(
        self, problem: Problem, objective: NegativeLogDensity, theta: Tensor, data: Data, batch: int, rate: float, seed: int,
        mesh: Mesh, progress: bool | None,
    ) -> Iterates:  # fmt: skip
        """Follows SGD at a constant rate from theta (1, D), which it changes, and takes in an iterate every so many steps."""
        every = self.every or max(LEAST_STEPS, data.count // batch)
        steps = every * self.iterates
        options = replace(self, optimiser="sgd", schedule="constant", lr=rate, warmup=0)
        batches = Batches(data.rows, batch, seed=seed, members=1, first=1, device=problem.device)
        step = make_step(problem, objective, options, steps, theta, batch, mesh)
        active = torch.ones(1, dtype=theta.dtype, device=theta.device)
        moments = Iterates(self.rank, theta.shape[-1], theta.device)
        with Progress("SWAG", steps, progress) as line:
            done = 0
            while done < steps:
                done = step.advance_to(theta, batches, done, (done // every + 1) * every, active)
                if done % every == 0:
                    loss = float(step.parts.double().sum())
                    if not math.isfinite(loss) or not bool(torch.isfinite(theta).all()):
                        raise TrainingError(
                            f"SWAG: the loss was not finite by step {done} of its descent. Try a smaller sgd_lr ({rate:.3g} now)",
                            step=done, member=0, posterior=None,
                        )  # fmt: skip
                    moments.add(theta[0], loss)
                    line.update(done, final=done == steps, loss=loss)
        return moments


class Iterates:
    """First and second moments of the iterates, in float64, and the last deviations from the running mean."""

    def __init__(self, rank: int, dim: int, device: torch.device) -> None:
        self.running = Welford(1, dim, device)
        self.deviations: deque[Tensor] = deque(maxlen=rank)
        self.losses: list[float] = []

    def add(self, theta: Tensor, loss: float = math.nan) -> None:
        """Takes in an iterate (D,)."""
        self.running.update(theta.unsqueeze(0))
        self.deviations.append((theta.double() - self.running.mean[0]).to(theta.dtype))
        self.losses.append(loss)

    def phi(self, dtype: torch.dtype) -> Tensor:
        """The Gaussian in the terms of the low-rank family, (1, P)."""
        spread = self.running.squares[0] / self.running.count
        sigma = (0.5 * spread).clamp_min(LEAST_VARIANCE).sqrt()
        rho = sigma + torch.log(-torch.expm1(-sigma))
        factor = torch.stack(tuple(self.deviations), -1).double() / math.sqrt(2 * (len(self.deviations) - 1))
        return torch.cat([self.running.mean[0], rho, factor.flatten()]).to(dtype).unsqueeze(0)


def largest_curvature(problem: Problem, theta: Tensor, data: Data, seed: int, rows: int = 2048) -> float:
    """The largest eigenvalue, in size, of the Hessian of -(1/N) log p_T on some rows at theta (1, D), by power iteration."""
    pool = torch.arange(data.count, device=problem.device) if isinstance(data.rows, int) else data.rows
    order = torch.randperm(len(pool), generator=stream(seed, "curvature rows"))[:rows].to(problem.device)
    chosen = pool[order]
    vector = torch.randn(theta.shape, generator=stream(seed, "curvature"), dtype=torch.float64).to(theta)
    vector = vector / vector.norm()
    reach = 1e-3 * (1 + float(theta.norm()))  # of the difference quotient
    if theta.dtype == torch.float64:
        reach *= 1e-3
    size = 0.0
    for _ in range(POWER_STEPS):
        ahead, behind = (problem.minibatch(theta + sign * reach * vector, chosen).gradient for sign in (1, -1))
        product = (behind - ahead) / (2 * reach * problem.n)
        size = float(product.norm())
        if not math.isfinite(size) or size == 0:
            raise InputError("sgd_lr", "the curvature at the start is zero or not finite", "Pass a rate")
        vector = product / size
    return size
