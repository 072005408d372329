"""What a sampler sees: the log density at C points in two parts, and its gradient. A Problem is one; so is a plain function."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from credibly.backends.cpp.density import NativeDensity
from credibly.backends.cuda.density import GpuDensity
from credibly.core.autodiff import grad_and_aux
from credibly.core.compilation import Compile, compiled
from credibly.core.inputs import Inputs, map_inputs
from credibly.core.rng import stream
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.problem import Problem

CACHED = 2**19  # values of one evaluation that caches hold: beyond, chains or rows are taken in turn
FEATURE_ROWS = 64  # at which predictions are looked at in warm-up
MOST_STRIPS = 8  # of the rows, since a compiled step has code for each


class Target(ABC):
    """A density over R^D at many points at once, likelihood and prior apart.

    `weights` are (1/T_lik, 1/T_prior): log p = weights[0] * log likelihood + weights[1] * log prior.
    """

    dim: int
    device: torch.device
    dtype: torch.dtype
    weights: tuple[float, float] = (1.0, 1.0)
    looped: bool = False  # whether the points have to be taken one at a time
    reason: str = ""
    native: NativeDensity | None = None  # compiled code that takes all chains and rows at once
    kernel: GpuDensity | None = None  # the same on a GPU

    @abstractmethod
    def whole(self, points: int) -> bool:
        """Whether so many points are evaluated in one piece, which may then stand inside a compiled step."""

    @abstractmethod
    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood (C,) in float64, and the gradient (C, D) of the whole log density."""

    @abstractmethod
    def log_prior(self, theta: Tensor) -> Tensor:
        """Log prior (C,) in float64."""

    @abstractmethod
    def features(self, theta: Tensor) -> Tensor:
        """(C, F) in float64: what the draws are for, or a part of it."""

    @property
    @abstractmethod
    def scale(self) -> Tensor:
        """The prior's standard deviation of every coordinate, (D,): the widest that the density can be."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of what the density was made of."""

    def full_likelihood(self, theta: Tensor) -> Tensor | None:
        """Log likelihood (C,) in float64 by a network in its own type of number; None where `likelihood_and_grad` has just that.

        A trajectory by gradients of any precision can be taken back and keeps volumes, so energies that are right make it exact.
        """
        return None

    def go_native(self) -> bool:
        """Has compiled code evaluate the density from here on, where there is such for it; whether it does."""
        return False

    def go_kernel(self) -> bool:
        """Has one kernel for whole trajectories evaluate the density from here on, where there is such for it; whether it does."""
        return False

    def compile_pieces(self, mode: Compile, calls: int, chains: int) -> bool:
        """Whether evaluations that are not whole will be compiled piece by piece."""
        return False

    def at_once(self, chains: int) -> int:
        """How many chains fit into memory in one evaluation."""
        return 1 if self.looped else chains

    def work(self, points: int) -> int:
        """Values that an evaluation at so many points computes, roughly."""
        return points * self.dim

    def log_density(self, theta: Tensor) -> Tensor:
        """(C,) in float64."""
        return self.weights[0] * self.likelihood_and_grad(theta)[0] + self.weights[1] * self.log_prior(theta)


class ProblemTarget(Target):
    """The full-batch density of a problem; in micro-batches where its activations would not fit."""

    def __init__(self, problem: Problem, mesh: Mesh | None = None) -> None:
        self.problem = self.local = problem
        self.mesh = mesh
        self.spread = mesh is not None and mesh.shape[1] > 1  # whether other processes hold the other rows
        if mesh is not None and self.spread:
            mine = mesh.rows(problem.n)
            if not mine:
                raise InputError(
                    "data", f"{problem.n} rows for {mesh.shape[1]} row places", "Use a mesh with fewer of them"
                )
            self.local = problem.subset(torch.arange(mine.start, mine.stop, device=problem.device))
        self.dim, self.device, self.dtype = problem.dim, problem.device, problem.layout.dtype
        self.weights = (1 / problem.tempering.likelihood, 1 / problem.tempering.prior)
        self.looped, self.reason = problem.forward.looped, problem.forward.reason
        self._full: Problem | None = None
        self._compile = False
        self._compiled: dict[tuple[int, int], Callable[..., tuple[Tensor, Tensor]]] = {}

    def whole(self, points: int) -> bool:
        """One block of rows holds all the data, and this process holds all the rows."""
        own = self.native is not None or self.kernel is not None
        return own or (not self.spread and self.problem.block_rows(points) >= self.problem.n)

    def work(self, points: int) -> int:
        """Rows by activations."""
        return points * self.local.n * self.problem.forward.row_width

    def at_once(self, chains: int) -> int:
        """As many chains as take all rows within the budget of activations, on a processor within its caches; at least one."""
        if self.looped:
            return 1
        if self.native is not None or self.kernel is not None:
            return chains
        rows = min(self.local.n, self.problem.micro_batch or self.local.n)
        most = self.problem.budget() if self.device.type != "cpu" else min(self.problem.budget(), CACHED)
        return max(1, min(chains, most // (rows * self.problem.forward.row_width)))

    def go_native(self) -> bool:
        """For stacks of small layers whose rows are all here, with the likelihoods and the priors that are common."""
        problem = self.problem
        if not self.spread and problem.micro_batch is None:
            self.native = NativeDensity.of(
                problem.forward.native, problem.layout, problem.x, problem.y, problem.likelihood, problem.prior, self.weights
            )  # fmt: skip
        return self.native is not None

    def go_kernel(self) -> bool:
        """For the same on a GPU, where a lane can hold what it has to."""
        problem = self.problem
        if not self.spread and problem.micro_batch is None and self.device.type == "cuda":
            self.kernel = GpuDensity.of(
                problem.forward.small, problem.layout, problem.x, problem.y, problem.likelihood, problem.prior, self.weights
            )  # fmt: skip
        return self.kernel is not None

    def compile_pieces(self, mode: Compile, calls: int, chains: int) -> bool:
        """Has the pieces of an evaluation that is not whole compiled, each shape by itself; whether they will be.

        Not where they run through kernels of our own, which are faster than what the compiler makes of the plain layers.
        """
        if self.problem.fused:
            return False
        blocks = math.ceil(self.local.n / self.local.block_rows(chains))
        sample = compiled(self._piece, mode, calls * blocks, self.device, self.dim * chains)
        self._compile = sample != self._piece
        return self._compile

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """In one piece, or summed over blocks of rows, and over processes, with the prior's gradient by itself."""
        if self.native is not None:
            return self.native.likelihood_and_grad(theta)
        if self.kernel is not None:
            return self.kernel.likelihood_and_grad(theta)
        if self.whole(len(theta)):
            return self._in_strips(theta, self.problem.x, self.problem.y, self.weights[1])
        prior, _ = grad_and_aux(self._prior_term, theta)
        gradient = torch.zeros_like(prior) if self.spread else prior
        log_lik = torch.zeros(len(theta), dtype=torch.float64, device=self.device)
        for x, y in self.local.blocks(len(theta)):
            lik, slope = self._function(len(theta), len(y))(theta, x, y)
            log_lik, gradient = log_lik + lik, gradient + slope
        if self.mesh is not None and self.spread:
            log_lik, gradient = self.mesh.sum_rows(log_lik), self.mesh.sum_rows(gradient.contiguous()) + prior
        return log_lik, gradient

    def full_likelihood(self, theta: Tensor) -> Tensor | None:
        """Summed over blocks of rows, and over processes, for a problem whose network runs in a lower precision."""
        if self.local.forward.precision is None:
            return None
        if self._full is None:
            self._full = self.local.in_full_precision()
        total = torch.zeros(len(theta), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for x, y in self._full.blocks(len(theta)):
                total += self._full.log_likelihood_rows(theta, x, y).flatten(1).sum(1, dtype=torch.float64)
        return self.mesh.sum_rows(total) if self.mesh is not None and self.spread else total

    def _in_strips(self, theta: Tensor, x: Inputs, y: Tensor, prior_weight: float) -> tuple[Tensor, Tensor]:
        """These rows; for stacks of layers on a processor in strips whose activations stay in its caches."""
        n = len(y)
        strips = min(MOST_STRIPS, len(theta) * n * self.problem.forward.row_width // CACHED)
        stack = self.device.type == "cpu" and self.problem.forward.stack is not None
        if not stack or not isinstance(x, Tensor) or strips <= 1:
            return self._evaluate(theta, x, y, prior_weight)
        rows = math.ceil(n / strips)
        log_lik, gradient = self._evaluate(theta, x[:rows], y[:rows], prior_weight)
        for start in range(rows, n, rows):
            lik, slope = self._evaluate(theta, x[start : start + rows], y[start : start + rows], 0.0)
            log_lik, gradient = log_lik + lik, gradient + slope
        return log_lik, gradient

    def _function(self, points: int, rows: int) -> Callable[..., tuple[Tensor, Tensor]]:
        if not self._compile:
            return self._piece
        key = (points, rows)  # a compiled function serves one set of shapes
        if key not in self._compiled:
            self._compiled[key] = compiled(self._piece, True, 0, self.device)
        return self._compiled[key]

    def _piece(self, theta: Tensor, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        return self._in_strips(theta, x, y, 0.0)

    def _evaluate(self, theta: Tensor, x: Inputs, y: Tensor, prior_weight: float) -> tuple[Tensor, Tensor]:
        def total(t: Tensor) -> tuple[Tensor, Tensor]:
            lik = self.problem.log_likelihood_rows(t, x, y).flatten(1).sum(1, dtype=torch.float64)
            value = lik * self.weights[0]
            return (value + self.problem.prior.log_prob(t) * prior_weight if prior_weight else value).sum(), lik

        gradient, lik = grad_and_aux(total, theta)
        return lik.detach(), gradient

    def _prior_term(self, theta: Tensor) -> tuple[Tensor, None]:
        return (self.problem.prior.log_prob(theta) * self.weights[1]).sum(), None

    def log_prior(self, theta: Tensor) -> Tensor:
        """The prior's sum over coordinates in float64: the energy difference of two large sums is what matters."""
        return self.problem.prior.log_prob(theta.double())

    def features(self, theta: Tensor) -> Tensor:
        """Outputs at a few of the rows."""
        n = self.problem.n  # of all processes alike, since they choose by it
        rows = torch.linspace(0, n - 1, min(n, FEATURE_ROWS), device=self.device).long()
        with torch.no_grad():
            outputs = self.problem.forward(theta, map_inputs(lambda t: t[rows], self.problem.x))
        return outputs.flatten(1).double()

    @property
    def scale(self) -> Tensor:
        """Of the bound prior; where a prior has no standard deviation, the geometric mean of the others, or 1."""
        std = self.problem.prior.std.double()
        known = torch.isfinite(std) & (std > 0)
        other = std[known].log().mean().exp() if bool(known.any()) else torch.ones((), dtype=torch.float64)
        return torch.where(known, std, other.to(std))

    def fingerprint(self) -> str:
        """Of data, prior, likelihood and temperatures."""
        return self.problem.fingerprint()


class DensityTarget(Target):
    """The target of a `Density`: all of it counts as likelihood."""

    def __init__(self, density: Density) -> None:
        self.density = density
        self.dim, self.device, self.dtype = density.dim, density.device, density.dtype
        self.reason = "a function of many points" if density.batched else "a function of one point, batched by vmap"

    def whole(self, points: int) -> bool:
        """There are no rows to divide."""
        return True

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The function's value and gradient."""

        def total(t: Tensor) -> tuple[Tensor, Tensor]:
            value = self.density(t).double()
            return value.sum(), value

        gradient, value = grad_and_aux(total, theta)
        return value.detach(), gradient

    def log_prior(self, theta: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros(len(theta), dtype=torch.float64, device=theta.device)

    def features(self, theta: Tensor) -> Tensor:
        """The first coordinates."""
        return theta[:, :FEATURE_ROWS].double()

    @property
    def scale(self) -> Tensor:
        """As given."""
        return self.density.scale

    def fingerprint(self) -> str:
        """Of the name, the dimension, and the values at a few fixed points."""
        points = torch.randn(4, self.dim, generator=stream(0, "fingerprint"), dtype=torch.float64)
        values = self.density((points * self.scale.cpu()).to(self.device, self.dtype)).detach()
        text = f"{self.density.name} {self.dim} {[f'{v:.9g}' for v in values.tolist()]}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def to_target(problem: Problem | Density, mesh: Mesh | None = None) -> Target:
    """The target of a problem or a density; refuses anything else. With a mesh its rows may be spread over processes."""
    if isinstance(problem, Problem):
        return ProblemTarget(problem, mesh)
    if isinstance(problem, Density):
        return DensityTarget(problem)
    raise InputError("problem", f"found {type(problem).__name__}", "Pass a credibly.Problem or a credibly.Density")
