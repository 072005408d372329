"""The target of a sampler: the log density at C points, split into likelihood and prior, and its gradient.

`ProblemTarget` is the density of a `Problem`, `StreamTarget` that of a stream, `DensityTarget` that of a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from credibly.core.autodiff import grad_and_aux
from credibly.core.compilation import Compile, compiled
from credibly.core.inputs import Inputs, map_inputs
from credibly.core.rows import Rows, sum_rows
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.inference.backend import Backend, select_for_trajectories
from credibly.inference.density import Density
from credibly.inference.module_leaves import LARGE
from credibly.inference.target_base import FEATURE_ROWS, DensityTarget, Target
from credibly.priors.flat import BoundPrior
from credibly.problem import Problem

# Number of values of one evaluation that fit into the CPU caches. Beyond it chains or rows are evaluated in turn.
CACHED = 2**19
# Maximum number of strips of rows per evaluation: a compiled step has code for each.
MAX_STRIPS = 8

__all__ = ["DensityTarget", "ProblemTarget", "StreamTarget", "Target", "to_target"]


class ProblemTarget(Target):
    """The full-batch density of a problem, in micro-batches if its activations would not fit into memory.

    Attributes:
        sharded: whether other processes of the mesh have the other rows.
        local: the problem of the rows of this process.
    """

    def __init__(self, problem: Problem, mesh: Mesh | None = None) -> None:
        self.problem = self.local = problem
        self.mesh = mesh
        self.sharded = mesh is not None and mesh.shape[1] > 1
        if mesh is not None and self.sharded:
            own = mesh.rows(problem.n)
            if not own:
                raise InputError(
                    "data",
                    f"must have at least one row per process that shares the rows, got {problem.n} for {mesh.shape[1]}",
                    "Use a mesh with fewer of them",
                )
            self.local = problem.subset(torch.arange(own.start, own.stop, device=problem.device))
        self.dim, self.device, self.dtype = problem.dim, problem.device, problem.layout.dtype
        self.weights = (1 / problem.tempering.likelihood, 1 / problem.tempering.prior)
        self.looped, self.reason = problem.forward.looped, problem.forward.reason
        self._full: Problem | None = None
        self._compile = False
        self._compiled: dict[tuple[int, int], Callable[..., tuple[Tensor, Tensor]]] = {}

    def whole(self, points: int) -> bool:
        """Return whether a single block of rows is all the data, with no other rows in other processes."""
        return self.backend.fused or (not self.sharded and self.problem.block_rows(points) >= self.problem.n)

    def work(self, points: int) -> int:
        """Return rows times activations."""
        return points * self.local.n * self.problem.forward.row_width

    def chains_at_once(self, chains: int) -> int:
        """Return how many chains fit into the memory budget with all their rows, on a CPU into its caches.

        At least one.
        """
        if self.looped:
            return 1
        if self.backend.fused:
            return chains
        rows = min(self.local.n, self.problem.micro_batch or self.local.n)
        budget = self.problem.budget() if self.device.type != "cpu" else min(self.problem.budget(), CACHED)
        return max(1, min(chains, budget // (rows * self.problem.forward.row_width)))

    def select_backend(self, compile: Compile) -> Backend:
        """Select C++ or CUDA for small stacks whose rows are all in this process, torch otherwise."""
        if self.sharded:
            return super().select_backend(compile)
        self.backend = select_for_trajectories(self.problem, self.weights, compile)
        return self.backend

    def compile_parts(self, mode: Compile, calls: int, chains: int) -> bool:
        """Compile each shape separately. Triton units are not compiled: they are faster than the compiled layers."""
        if self.problem.fused:
            return False
        blocks = math.ceil(self.local.n / self.local.block_rows(chains))
        sample = compiled(self._piece, mode, calls * blocks, self.device, self.dim * chains)
        self._compile = sample != self._piece
        return self._compile

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate at once, or sum over blocks of rows and over processes and add the prior's gradient."""
        if self.backend.fused:
            return self.backend.trajectories.likelihood_and_grad(theta)
        if self.whole(len(theta)):
            return self._in_strips(theta, self.problem.rows, self.weights[1])
        prior = self.prior_gradient(theta)
        gradient = torch.zeros_like(prior) if self.sharded else prior
        log_lik = torch.zeros(len(theta), dtype=torch.float64, device=self.device)
        for block in self.local.blocks(len(theta)):
            lik, slope = self._function(len(theta), len(block.y))(theta, *block)
            log_lik, gradient = log_lik + lik, gradient + slope
        if self.mesh is not None and self.sharded:
            log_lik, gradient = self.mesh.sum_rows(log_lik), self.mesh.sum_rows(gradient.contiguous()) + prior
        return log_lik, gradient

    def minibatch_and_grad(self, theta: Tensor, rows: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (C,), rescaled to all rows, and the gradient of the log density (C, D)."""
        problem = self.problem
        x, y, weight = problem.rows if rows is None else problem.rows.at(rows)
        shared = rows is None or rows.ndim == 1
        lik, _, gradient = problem.parts_and_grad(
            theta, x, y, scale * self.weights[0], self.weights[1], shared=shared, weight=weight
        )
        return (lik * scale).double(), gradient

    def full_likelihood(self, theta: Tensor) -> Tensor | None:
        """Sum over blocks of rows and over processes, for a network that runs in a lower precision."""
        if self.local.forward.precision is None:
            return None
        if self._full is None:
            self._full = self.local.in_full_precision()
        total = torch.zeros(len(theta), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for x, y, weight in self._full.blocks(len(theta)):
                total += sum_rows(self._full.log_likelihood_rows(theta, x, y), weight, torch.float64)
        return self.mesh.sum_rows(total) if self.mesh is not None and self.sharded else total

    def _in_strips(self, theta: Tensor, rows: Rows, prior_weight: float) -> tuple[Tensor, Tensor]:
        """Evaluate these rows; stacks of layers on a CPU in strips whose activations stay in its caches."""
        n = len(rows.y)
        strips = min(MAX_STRIPS, len(theta) * n * self.problem.forward.row_width // CACHED)
        stack = self.device.type == "cpu" and self.problem.forward.stack is not None
        if not stack or not isinstance(rows.x, Tensor) or strips <= 1:
            return self._evaluate(theta, rows, prior_weight)
        size = math.ceil(n / strips)
        log_lik, gradient = self._evaluate(theta, rows.at(slice(0, size)), prior_weight)
        for start in range(size, n, size):
            lik, slope = self._evaluate(theta, rows.at(slice(start, start + size)), 0.0)
            log_lik, gradient = log_lik + lik, gradient + slope
        return log_lik, gradient

    def _function(self, points: int, rows: int) -> Callable[..., tuple[Tensor, Tensor]]:
        if not self._compile:
            return self._piece
        # A compiled function serves one set of shapes.
        key = (points, rows)
        if key not in self._compiled:
            self._compiled[key] = compiled(self._piece, True, 0, self.device)
        return self._compiled[key]

    def _piece(self, theta: Tensor, x: Inputs, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._in_strips(theta, Rows(x, y, weight), 0.0)

    def _evaluate(self, theta: Tensor, rows: Rows, prior_weight: float) -> tuple[Tensor, Tensor]:
        def total(t: Tensor) -> tuple[Tensor, Tensor]:
            lik = sum_rows(self.problem.log_likelihood_rows(t, rows.x, rows.y), rows.weight, torch.float64)
            value = lik * self.weights[0]
            return (value + self.problem.prior.log_prob(t) * prior_weight if prior_weight else value).sum(), lik

        gradient, lik = grad_and_aux(total, theta)
        return lik.detach(), gradient

    def prior_gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient (C, D) of the tempered log prior."""
        return grad_and_aux(self._prior_term, theta)[0]

    def _prior_term(self, theta: Tensor) -> tuple[Tensor, None]:
        return (self.problem.prior.log_prob(theta) * self.weights[1]).sum(), None

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the sum over coordinates in float64: what matters is the difference of two large sums."""
        return self.problem.prior.log_prob(theta.double())

    def features(self, theta: Tensor) -> Tensor:
        """Return the outputs at a few rows of the full problem, the same in all processes."""
        n = len(self.problem.y)
        rows = torch.linspace(0, n - 1, min(n, FEATURE_ROWS), device=self.device).long()
        with torch.no_grad():
            outputs = self.problem.forward(theta, map_inputs(lambda t: t[rows], self.problem.x))
        return outputs.flatten(1).double()

    @property
    def scale(self) -> Tensor:
        """Prior standard deviations; if a prior has none, the geometric mean of the others, or 1."""
        prior = self.problem.prior
        if type(prior) is BoundPrior and self.dim >= LARGE and (same := prior.same_std) is not None:
            return same.double().expand(self.dim)
        std = prior.std.double()
        known = torch.isfinite(std) & (std > 0)
        other = std[known].log().mean().exp() if bool(known.any()) else torch.ones((), dtype=torch.float64)
        return torch.where(known, std, other.to(std))

    def fingerprint(self) -> str:
        """Return the hash of data, prior, likelihood and temperatures."""
        return self.problem.fingerprint()


class StreamTarget(ProblemTarget):
    """The density of a stream, with its first rows, which are in memory, as an estimate of all of them.

    Attributes:
        streamed: the problem with the stream; `problem` is that of the rows in memory.
    """

    def __init__(self, streamed: Problem) -> None:
        super().__init__(streamed.sample)
        self.streamed = streamed

    def whole(self, points: int) -> bool:
        """Return False: the rows in memory are not all rows."""
        return False

    def select_backend(self, compile: Compile) -> Backend:
        """Select torch."""
        return Target.select_backend(self, compile)

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log likelihood and gradient as estimated from the rows in memory, scaled to N."""
        gradient = self.prior_gradient(theta)
        log_lik = torch.zeros(len(theta), dtype=torch.float64, device=self.device)
        scale = self.problem.n / len(self.problem.y)
        for block in self.problem.blocks(len(theta)):
            lik, slope = self._piece(theta, *block)
            log_lik, gradient = log_lik + scale * lik, gradient + scale * slope
        return log_lik, gradient


def to_target(problem: Problem | Density, mesh: Mesh | None = None) -> Target:
    """Return the target of a problem or a density. With a mesh, rows may be sharded over its processes."""
    if isinstance(problem, Problem):
        return ProblemTarget(problem, mesh) if problem.stream is None else StreamTarget(problem)
    if isinstance(problem, Density):
        return DensityTarget(problem)
    raise InputError("problem", f"must be a credibly.Problem or a credibly.Density, got {type(problem).__name__}")
