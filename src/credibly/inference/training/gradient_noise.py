"""The noise of minibatch gradients relative to the curvature of the loss, which together set the width of SGD.

SGD on a quadratic loss with Hessian H, whose minibatch gradients are independent and have covariance V, fluctuates
around the minimum. Averages of m successive iterates have covariance H^-1 V H^-1 / m once m steps are many relaxation
times, for any stable learning rate, momentum and preconditioner (Polyak & Juditsky 1992). The loss is -(1/N) log p, so
the posterior has covariance H^-1 / N. If V = v H, as for a well-specified likelihood (the information identity),
averages stretched by sqrt(m / (N v)) therefore have the covariance of the posterior in every direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from credibly.core.autodiff import grad_and_aux
from credibly.core.inputs import Inputs, Tensors
from credibly.core.rng import stream
from credibly.errors import InputError
from credibly.inference.training.batches import Batches
from credibly.inference.training.data import Data
from credibly.inference.training.objectives import Objective, effective_rows
from credibly.problem import Problem

# Number of minibatches whose gradients measure the noise per weight, and along random directions.
SCALE_BATCHES, NOISE_BATCHES, PROBES = 64, 192, 16
POWER_STEPS = 12
# Number of random directions whose curvatures give the mean of a Hessian's diagonal.
TRACE_PROBES = 4
# Number of rows for products with the Hessian.
CURVATURE_ROWS = 2048
# Largest ratio of two coordinates' rates.
MOST_RATIO = 1e4
# Rows of data per row of a batch from which sampling with replacement is as good as without: 1 % of the noise.
PLENTY = 100
# Number of steps whose rows come from one stream: seeding it costs as much as a small shuffle.
BLOCK = 64


class IndependentBatches(Batches):
    """Minibatches that do not depend on one another, for one member.

    Over a shuffled epoch the noise of the gradients adds up to zero, and averages of iterates would have almost none.
    """

    def __init__(
        self,
        rows: Tensor | int,
        batch: int,
        *,
        seed: int,
        purpose: str,
        device: torch.device,
        repeats: bool = False,
    ) -> None:
        super().__init__(rows, batch, seed=seed, members=1, device=device)
        self.purpose, self.repeats = purpose, repeats

    def at(self, step: int) -> Tensor:
        """Return the indices of one step, (1, B)."""
        block, position = divmod(step, BLOCK)
        if block != self._block:
            generator, n, size = stream(self.seed, self.purpose, block), len(self.rows), self.batch
            if n > PLENTY * size or self.repeats:
                chosen = torch.randint(n, (BLOCK, size), generator=generator)
            else:
                chosen = torch.stack([torch.randperm(n, generator=generator)[:size] for _ in range(BLOCK)])
            self._order, self._block = self.rows[chosen.to(self.rows.device)].unsqueeze(1).unbind(0), block
        return self._order[position]


class Rescaled(Objective):
    """An objective in coordinates u = w / scale, in which gradient descent is preconditioned by scale^2."""

    def __init__(self, inner: Objective, scale: Tensor) -> None:
        self.inner, self.scale = inner, scale
        self.part_names, self.looped = inner.part_names, inner.looped

    def evaluate(
        self, theta: Tensor, own: Tensors, x: Inputs, y: Tensor, rows: Tensor | None, noise: Tensors, controls: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the parts of the loss, and its gradient with respect to u."""
        parts, gradient = self.inner.evaluate(theta * self.scale, own, x, y, rows, noise, controls)
        return parts, gradient * self.scale

    def score(self, theta: Tensor, held_out: Problem) -> Tensor:
        """Return the score of the weights."""
        return self.inner.score(theta * self.scale, held_out)


@dataclass(frozen=True)
class GradientNoise:
    """The noise of minibatch gradients of -(1/N) log p at a point, relative to the curvature there.

    Attributes:
        scale: (1, D) coordinates u = w / scale, in which noise and prior have about the same size for every weight.
        ratio: v of V = v H, on average over random directions in those coordinates, where V is the covariance of the
            gradients and H the Hessian of the likelihood's part of the loss.
        trace: trace of H with respect to u.
    """

    scale: Tensor
    ratio: float
    trace: float


def gradient_noise(problem: Problem, theta: Tensor, data: Data, batch: int, seed: int) -> GradientNoise:
    """Measure the noise of independent minibatches at theta (1, D). Raise if there is none."""
    # Rows in memory stand in for those of a stream: drawn with replacement, their batches have the same noise.
    problem, data, streamed = rows_in_memory(problem, data)
    batches = IndependentBatches(
        data.rows, batch, seed=seed, purpose="noise batches", device=problem.device, repeats=streamed
    )

    def gradient(step: int) -> Tensor:
        return problem.minibatch(theta, batches.at(step)).gradient.double() / problem.total_weight

    total, squares = torch.zeros_like(theta, dtype=torch.float64), torch.zeros_like(theta, dtype=torch.float64)
    for step in range(SCALE_BATCHES):
        found = gradient(step)
        total += found
        squares += torch.square(found)
    variance = (squares - torch.square(total) / SCALE_BATCHES).clamp_min(0) / (SCALE_BATCHES - 1)
    if not bool(torch.isfinite(variance).all()) or float(variance.max()) == 0:
        raise InputError("sgd_lr", "must be given: the gradients at the start have no noise or are not finite")
    # The noise of one row, plus one row's part of the prior.
    rows = effective_rows(problem, problem.n if streamed else data.count)
    prior = 1 / (torch.square(problem.prior.std.double()) * problem.tempering.prior * rows)
    size = batch * variance + prior
    scale = size.clamp_min(float(size.max()) / MOST_RATIO).rsqrt()

    # The same directions for noise and curvature: if V = v H, their random lengths cancel in the ratio.
    signs = torch.randint(2, (PROBES, theta.shape[-1]), generator=stream(seed, "curvature probes")) * 2.0 - 1
    directions = signs.to(scale) * scale
    along = torch.cat([gradient(SCALE_BATCHES + step) @ directions.T for step in range(NOISE_BATCHES)])
    chosen = curvature_rows(problem, data, seed)
    products = [_likelihood_product(problem, theta, chosen, d.to(theta.dtype).unsqueeze(0)) for d in directions]
    curvature = (torch.cat(products).double() * directions).sum(-1)
    noise, trace = float(along.var(0).mean()), float(curvature.mean())
    if not (math.isfinite(trace) and trace > 0):
        # Away from a mode. For a well-specified likelihood the noise of one row would be the curvature.
        trace = batch * noise
    return GradientNoise(scale.to(theta.dtype), noise / trace, trace)


def largest_curvature(
    problem: Problem, theta: Tensor, data: Data, seed: int, scale: Tensor | None = None, rows: int = CURVATURE_ROWS
) -> float:
    """Return the largest absolute eigenvalue of the Hessian of -(1/N) log p_T at theta (1, D), by power iteration.

    With a scale, that of the Hessian with respect to w / scale.
    """
    problem, data, _ = rows_in_memory(problem, data)
    chosen = curvature_rows(problem, data, seed, rows)
    vector = torch.randn(theta.shape, generator=stream(seed, "curvature"), dtype=torch.float64).to(theta)
    vector = vector / vector.norm()
    size = 0.0
    for _ in range(POWER_STEPS):
        product = hessian_product(problem, theta, chosen, vector if scale is None else scale * vector)
        product = product if scale is None else scale * product
        size = float(product.norm())
        if not math.isfinite(size) or size == 0:
            raise InputError("sgd_lr", "must be given: the curvature at the start is zero or not finite")
        vector = product / size
    return size


def mean_curvature(problem: Problem, theta: Tensor, data: Data, seed: int, rows: int = CURVATURE_ROWS) -> float:
    """Return the mean of the diagonal of the Hessian of -(1/N) log p_T at theta (1, D), by random signs."""
    problem, data, _ = rows_in_memory(problem, data)
    chosen = curvature_rows(problem, data, seed, rows)
    found = []
    for probe in range(TRACE_PROBES):
        generator = stream(seed, "trace probes", probe)
        signs = torch.randint(2, theta.shape, generator=generator, dtype=torch.int8).to(theta) * 2 - 1
        found.append(float((signs * hessian_product(problem, theta, chosen, signs)).mean()))
    return sum(found) / len(found)


def hessian_product(problem: Problem, theta: Tensor, rows: Tensor, direction: Tensor) -> Tensor:
    """Return the Hessian of -(1/N) log p_T, by these rows, times a direction, (1, D): a difference of gradients."""
    reach = difference_reach(theta) / float(direction.norm())
    ahead, behind = (problem.minibatch(theta + sign * reach * direction, rows).gradient for sign in (1, -1))
    return (behind - ahead) / (2 * reach * problem.total_weight)


def rows_in_memory(problem: Problem, data: Data) -> tuple[Problem, Data, bool]:
    """Return problem and training rows, for a stream those of its first rows in memory, and whether it is a stream."""
    if problem.stream is None:
        return problem, data, False
    return problem.sample, Data(len(problem.sample.y), None), True


def difference_reach(theta: Tensor) -> float:
    """Return the step of a finite difference of gradients."""
    return (1e-6 if theta.dtype == torch.float64 else 1e-3) * (1 + float(theta.norm()))


def curvature_rows(problem: Problem, data: Data, seed: int, most: int = CURVATURE_ROWS) -> Tensor:
    """Return random training rows for products with the Hessian."""
    pool = torch.arange(data.count, device=problem.device) if isinstance(data.rows, int) else data.rows
    order = torch.randperm(len(pool), generator=stream(seed, "curvature rows"))[:most].to(problem.device)
    return pool[order]


def _likelihood_product(problem: Problem, theta: Tensor, rows: Tensor, direction: Tensor) -> Tensor:
    """Return the Hessian of the mean tempered negative log likelihood times a direction, (1, D)."""
    reach = difference_reach(theta) / float(direction.norm())

    def gradient(point: Tensor) -> Tensor:
        prior, _ = grad_and_aux(lambda t: (problem.prior.log_prob(t).sum(), ()), point)
        return problem.minibatch(point, rows).gradient - prior / problem.tempering.prior

    ahead, behind = (gradient(theta + sign * reach * direction) for sign in (1, -1))
    return (behind - ahead) / (2 * reach * problem.total_weight)
