"""The density of a regression network whose output weights are integrated out.

The output layer enters the mean linearly: y = Phi w + noise, with the features Phi of the last hidden layer and rows of
precision r. Under Gaussian noise and a Normal prior N(m, Lambda^-1) the weights w are Gaussian given everything else,

    A = Phi' R Phi + Lambda,   alpha = A^-1 (Phi' R y + Lambda m),   w ~ N(alpha, A^-1),

so they need not be sampled with the rest. With e = y - Phi alpha, the log marginal likelihood of the rest is

    1/2 sum log r - 1/2 (sum r e^2 + (alpha - m)' Lambda (alpha - m)) - 1/2 log |A| + 1/2 log |Lambda| + const.

The directions in which this density is narrow are far less narrow than those of the joint density: the largest
curvature of a network on a UCI table falls by a factor of 200 to 400, and steps are up to twenty times as long.

The points of `CollapsedTarget` are parameter vectors in which standardised weights xi = A^1/2 (w - alpha) ~ N(0, I)
replace w. `decode` turns them into parameter vectors, `encode` turns those into points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from credibly.backends.cpp.density import CppDensity, OutputPrior
from credibly.backends.cpp.likelihood import noise_scales, supports
from credibly.backends.cpp.stack import Stack
from credibly.core.compilation import Compile
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.inference.backend import Backend
from credibly.inference.density import Density
from credibly.inference.target import ProblemTarget, Target, to_target
from credibly.likelihoods import Gaussian, HeteroscedasticGaussian
from credibly.problem import Problem

# Maximum number of features of the output layer: an evaluation costs rows times features squared.
MAX_FEATURES = 128
# Largest log variance, beyond which float32 would overflow.
LARGEST = 80.0
# Activations by their numbers in the C++ backend.
ACTIVATIONS = (lambda a: a, functional.relu, torch.tanh, functional.silu, torch.sigmoid)


def refusal(problem: Problem) -> str:
    """Return why the output layer of a problem cannot be integrated out, or "" if it can."""
    likelihood = problem.likelihood
    if type(likelihood) not in (Gaussian, HeteroscedasticGaussian):
        return f"the noise must be Gaussian, got {type(likelihood).__name__}"
    if problem.stream is not None or not supports(problem.x, problem.y, likelihood, problem.prior):
        return "the prior must be Normal and the inputs one table of rows"
    if problem.y.ndim == 2 and problem.y.shape[1] > 1:
        return f"there must be one target, got {problem.y.shape[1]}"
    stack = _stack(problem)
    if stack is None or len(stack.layers) < 2 or stack.layers[-1][4] or not stack.layers[-2][4]:
        return "the network must be a stack of Linear layers with activations between them, all of them random"
    if stack.layers[-1][0] >= MAX_FEATURES:
        return f"the last hidden layer must have fewer than {MAX_FEATURES} units, got {stack.layers[-1][0]}"
    return ""


def output_weights(problem: Problem) -> int:
    """Return how many weights are integrated out, those of the last layer to one unit with its bias."""
    stack = _stack(problem)
    return 0 if stack is None else stack.layers[-1][0] + 1


def _stack(problem: Problem) -> Stack | None:
    forward = problem.forward
    if forward.stack is None or forward.module is not problem.layout.module or forward.precision is not None:
        return None
    return Stack.of(forward.module, problem.layout, max_width=math.inf)


class Solution(NamedTuple):
    """The output weights of C points given the rest: mean (C, F), Cholesky factor of A (C, F, F), failures (C,)."""

    mean: Tensor
    factor: Tensor
    failed: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows at C points: features (C, n, F), log variances (C, n), precisions, and the weights of the rows."""

    features: Tensor
    log_variance: Tensor
    precision: Tensor
    weight: Tensor
    y: Tensor


class CollapsedTarget(ProblemTarget):
    """The full-batch density of a problem without its output weights.

    Attributes:
        output: coordinates of the output weights of the mean, (F,).
    """

    collapsed = True

    def __init__(self, problem: Problem, mesh: Mesh | None = None) -> None:
        reason = refusal(problem)
        if reason:
            raise InputError("collapse", f"cannot integrate out the output layer: {reason}", "Pass collapse=False")
        super().__init__(problem, mesh)
        self._plain = ProblemTarget(problem, mesh)
        stack = _stack(problem)
        assert stack is not None
        self.stack, self.heteroscedastic = stack, isinstance(problem.likelihood, HeteroscedasticGaussian)
        scales, self.offset, _ = noise_scales(problem.likelihood, problem.layout, 1)
        self.floor, self.log_scale = (scales[0] ** 2, 0.0) if self.heteroscedastic else (0.0, math.log(scales[0]))
        width, _, weight, bias, _ = stack.layers[-1]
        places = [*range(weight, weight + width), *([] if bias < 0 else [bias])]
        self.output = torch.tensor(places, device=self.device)
        # The temperature of the likelihood is part of the marginal likelihood.
        self.row_weight, self.weights = self.weights[0], (1.0, self.weights[1])
        loc, std = (value.double() for value in (problem.prior.loc, problem.prior.std))
        self.output_loc, self.output_precision = loc[self.output], self.weights[1] / std[self.output].square()
        self.loc = loc.index_fill(0, self.output, 0.0)
        self.std = std.index_fill(0, self.output, math.sqrt(self.weights[1]))

    # -- the density ---------------------------------------------------------------------------------------------------
    def select_backend(self, compile: Compile) -> Backend:
        """Select C++ on a CPU if all rows are in this process, torch otherwise."""
        self.backend = Backend("torch", False)
        self._plain.select_backend(compile)
        problem, stack = self.problem, self.problem.forward.cpp_stack
        if compile is not False and not self.sharded and stack is not None and problem.micro_batch is None:
            output = OutputPrior(self.output_loc.contiguous(), self.output_precision.contiguous())
            assert isinstance(problem.x, Tensor)
            rows, weights = (problem.x, problem.y), (self.row_weight, self.weights[1])
            density = CppDensity(
                stack, problem.layout, *rows, problem.likelihood, self, weights, problem.sample_weight, output
            )
            self.backend = Backend("cpp", compile, density)
        return self.backend

    def work(self, points: int) -> int:
        """Return rows times products of features."""
        return points * self.local.n * (self.problem.forward.row_width + len(self.output) ** 2)

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log marginal likelihood (C,) and the gradient (C, D) of the full log density."""
        if self.backend.fused:
            return self.backend.trajectories.likelihood_and_grad(theta)
        point = theta.detach()
        blocks = list(self._blocks(point)) if self.whole(len(point)) else None
        solution, value = self._solve(point, blocks)
        gradient = torch.zeros_like(point)
        for block in blocks or self._blocks(point):
            part, slope = self._differentiate(point, block, solution)
            value, gradient = value + part, gradient + slope
        if self.mesh is not None and self.sharded:
            value, gradient = self.mesh.sum_rows(value), self.mesh.sum_rows(gradient.contiguous())
        value = value + self._normaliser(solution)
        prior = ((theta.detach().double() - self.loc) / self.std.square()).to(theta.dtype) * self.weights[1]
        return torch.where(solution.failed, torch.nan, value), gradient - prior

    def _blocks(self, point: Tensor) -> Iterator[Block]:
        """Yield features and precisions of the rows of this process, as functions of the points."""
        point = point.requires_grad_()
        for x, y, weight in self.local.blocks(len(point)):
            assert isinstance(x, Tensor)
            with torch.enable_grad():
                features, log_variance = self._forward(point, x)
            variance = log_variance.detach().double().clamp(max=LARGEST).exp() + self.floor
            ones = torch.ones(len(y), dtype=torch.float64, device=self.device)
            rows = self.row_weight * (ones if weight is None else weight.double())
            yield Block(features, log_variance, rows / variance, rows, y.reshape(len(y)).double())

    def _forward(self, point: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (C, n, F) and the log variance (C, n) that does not come from a floor."""
        values = x.to(point.dtype).expand(len(point), *x.shape)
        for inputs, outputs, weight, bias, activation in self.stack.layers[:-1]:
            matrix = point[:, weight : weight + outputs * inputs].reshape(-1, outputs, inputs).mT
            sums = values @ matrix if bias < 0 else point[:, None, bias : bias + outputs] + values @ matrix
            values = ACTIVATIONS[activation](sums)
        width, _, weight, bias, _ = self.stack.layers[-1]
        features = values if bias < 0 else functional.pad(values, (0, 1), value=1.0)
        if self.heteroscedastic:
            own = (values @ point[:, weight + width : weight + 2 * width, None]).squeeze(-1)
            return features, own if bias < 0 else own + point[:, bias + 1 : bias + 2]
        log_scale = torch.full((len(point), 1), self.log_scale, dtype=point.dtype, device=self.device)
        if self.offset >= 0:
            log_scale = point[:, self.offset : self.offset + 1]
        return features, (2 * log_scale).expand(features.shape[:2])

    def _solve(self, point: Tensor, blocks: list[Block] | None) -> tuple[Solution, Tensor]:
        """Return the output weights given the rest, and zeros (C,)."""
        size = len(self.output)
        gram = torch.zeros(len(point), size, size, dtype=torch.float64, device=self.device)
        moment = torch.zeros(len(point), size, dtype=torch.float64, device=self.device)
        for block in blocks or self._blocks(point):
            features = block.features.detach().double()
            weighted = features * block.precision.unsqueeze(-1)
            gram, moment = gram + weighted.mT @ features, moment + (weighted.mT @ block.y.unsqueeze(-1)).squeeze(-1)
        if self.mesh is not None and self.sharded:
            gram, moment = self.mesh.sum_rows(gram), self.mesh.sum_rows(moment)
        moment = moment + self.output_precision * self.output_loc
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag(self.output_precision))
        mean = torch.cholesky_solve(moment.unsqueeze(-1), factor).squeeze(-1)
        return Solution(mean, factor, info != 0), moment.new_zeros(len(point))

    def _normaliser(self, solution: Solution) -> Tensor:
        """Return the part of the log marginal likelihood (C,) that is not a sum over rows."""
        shift = ((solution.mean - self.output_loc).square() * self.output_precision).sum(-1)
        logs = self.output_precision.log().sum() / 2 - solution.factor.diagonal(dim1=1, dim2=2).log().sum(-1)
        return logs - shift / 2

    def _differentiate(self, point: Tensor, block: Block, solution: Solution) -> tuple[Tensor, Tensor]:
        """Return the sum (C,) over the rows of a block, and its gradient (C, D)."""
        features = block.features.detach().double()
        error = block.y - (features @ solution.mean.unsqueeze(-1)).squeeze(-1)
        white = torch.linalg.solve_triangular(solution.factor, features.mT, upper=False)
        solved = torch.linalg.solve_triangular(solution.factor.mT, white, upper=True).mT
        precision = block.precision
        slope = precision.unsqueeze(-1) * (error.unsqueeze(-1) * solution.mean.unsqueeze(1) - solved)
        # The fraction of the variance that is not its floor, of which the log variance is the logarithm.
        own = 1 - self.floor * precision / block.weight
        noise = own * (precision * (error.square() + white.square().sum(1)) - block.weight) / 2
        logs = math.log(2 * math.pi) - torch.log(precision / block.weight)
        value = -0.5 * (precision * error.square() + block.weight * logs)
        outputs, slopes = [block.features], [slope.to(point.dtype)]
        if block.log_variance.requires_grad:
            outputs, slopes = [*outputs, block.log_variance], [*slopes, noise.to(point.dtype)]
        (gradient,) = torch.autograd.grad(outputs, point, slopes)
        return value.sum(-1), gradient

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the log prior of the points, with standardised output weights, in float64."""
        gaps = (theta.double() - self.loc) / self.std
        return -0.5 * gaps.square().sum(-1) - self.std.log().sum() - 0.5 * self.dim * math.log(2 * math.pi)

    # -- points and parameter vectors ----------------------------------------------------------------------------------
    @property
    def plain(self) -> ProblemTarget:
        """The target whose points are parameter vectors."""
        return self._plain

    def decode(self, points: Tensor) -> Tensor:
        """Return the parameter vectors (C, D) of points."""
        if self.backend.fused:
            theta: Tensor = self.backend.density.decode(points)
            return theta
        with torch.no_grad():
            mean, factor, _ = self._solve(points.detach(), None)[0]
            standardised = points[:, self.output].double().unsqueeze(-1)
            shift = torch.linalg.solve_triangular(factor.mT, standardised, upper=True).squeeze(-1)
            return points.detach().index_copy(1, self.output, (mean + shift).to(points.dtype))

    def encode(self, theta: Tensor) -> Tensor:
        """Return the points (C, D) of parameter vectors."""
        with torch.no_grad():
            mean, factor, _ = self._solve(theta.detach(), None)[0]
            gap = (theta[:, self.output].double() - mean).unsqueeze(-1)
            return theta.detach().index_copy(1, self.output, (factor.mT @ gap).squeeze(-1).to(theta.dtype))

    def recorded(self, theta: Tensor, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the statistics with likelihood and prior of the parameter vectors instead of the marginal ones."""
        with torch.no_grad():
            likelihood, _ = self._plain.likelihood_and_grad(theta)
            return {**statistics, "log_likelihood": likelihood, "log_prior": self._plain.log_prior(theta)}

    def features(self, theta: Tensor) -> Tensor:
        """Return the outputs at a few rows of the parameter vectors of the points."""
        return super().features(self.decode(theta))

    @property
    def scale(self) -> Tensor:
        """The prior's standard deviations; 1 for standardised output weights."""
        return super().scale.index_fill(0, self.output, 1.0)


def to_sampled_target(problem: Problem | Density, mesh: Mesh | None, collapse: bool | str, plain: bool) -> Target:
    """Return the target of a sampler: collapsed if requested, or if `collapse` is "auto" and it pays off.

    It pays off on a CPU; the CUDA kernel of small stacks takes a hundredth of the time of a collapsed gradient on a
    GPU. The choice does not depend on whether there is a C++ library. `plain` rules it out. Raise if it is requested
    and not possible.
    """
    if not isinstance(problem, Problem):
        if collapse is True:
            raise InputError("collapse", "must be False or 'auto' for a density that is not a network's, got True")
        return to_target(problem, mesh)
    pays = collapse == "auto" and not plain and problem.device.type == "cpu" and not refusal(problem)
    return CollapsedTarget(problem, mesh) if collapse is True or pays else to_target(problem, mesh)
