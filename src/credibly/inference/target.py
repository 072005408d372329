"""What a sampler sees: the log density at C points, split into likelihood and prior, and its gradient.

`ProblemTarget` is the density of a `Problem`, `DensityTarget` that of a plain function.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from credibly.core.autodiff import grad_and_aux
from credibly.core.compilation import Compile, compiled
from credibly.core.inputs import Inputs, map_inputs
from credibly.core.rng import stream
from credibly.core.rows import Rows, sum_rows
from credibly.distributed.world import Mesh
from credibly.errors import InputError
from credibly.inference.backend import TORCH, Backend, select_for_trajectories
from credibly.inference.density import Density
from credibly.problem import Problem

# Values of one evaluation that stay in the CPU caches: beyond, chains or rows are evaluated in turn.
CACHED = 2**19
# Rows whose predictions are the features of a network's target.
FEATURE_ROWS = 64
# Most strips of rows per evaluation: a compiled step has code for each.
MAX_STRIPS = 8


class Target(ABC):
    """A density over R^D, evaluated at many points at once, with likelihood and prior apart.

    Attributes:
        dim, device, dtype: of the points.
        weights: (1/T_lik, 1/T_prior): log p = weights[0] * log likelihood + weights[1] * log prior.
        looped: whether points must be evaluated one at a time, and `reason` why.
        backend: what evaluates it.
    """

    dim: int
    device: torch.device
    dtype: torch.dtype
    weights: tuple[float, float] = (1.0, 1.0)
    looped: bool = False
    reason: str = ""
    backend: Backend = TORCH

    @abstractmethod
    def whole(self, points: int) -> bool:
        """Return whether `points` points are evaluated in one piece, which may then be part of a compiled step."""

    @abstractmethod
    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (C,) in float64 and the gradient (C, D) of the whole log density."""

    @abstractmethod
    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the log prior (C,) in float64."""

    @abstractmethod
    def features(self, theta: Tensor) -> Tensor:
        """Return the quantities (C, F) in float64 that mixing is judged by: predictions, or coordinates."""

    @property
    @abstractmethod
    def scale(self) -> Tensor:
        """The prior's standard deviation of every coordinate, (D,): the widest that the density can be."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short hash of everything that the density depends on."""

    def minibatch_and_grad(self, theta: Tensor, rows: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return log likelihood (C,) and gradient (C, D) as estimated by some rows; a plain density has no rows.

        Args:
            theta: the points (C, D).
            rows: indices (B,) or (C, B); None for all rows.
            scale: N / B, by which the likelihood of the rows is multiplied.
        """
        return self.likelihood_and_grad(theta)

    def in_turn(self, theta: Tensor, function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Apply a function to all points at once, or to one at a time if the target is looped."""
        if not self.looped:
            return function(theta)
        parts = [function(theta[c : c + 1]) for c in range(len(theta))]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def full_likelihood(self, theta: Tensor) -> Tensor | None:
        """Return the log likelihood in the network's native dtype, shape (C,), accumulated in float64.

        None if `likelihood_and_grad` already computes that. A trajectory by gradients of any precision is reversible
        and preserves volume, so exact energies make the sampler exact.
        """
        return None

    def select_backend(self, compile: Compile) -> Backend:
        """Select the backend of full-batch evaluations; it is used from here on."""
        self.backend = Backend("torch", compile)
        return self.backend

    def compile_pieces(self, mode: Compile, calls: int, chains: int) -> bool:
        """Compile the pieces of an evaluation that is not whole. Return whether they will be compiled."""
        return False

    def at_once(self, chains: int) -> int:
        """Return how many chains fit into memory in one evaluation."""
        return 1 if self.looped else chains

    def work(self, points: int) -> int:
        """Return roughly how many values an evaluation at `points` points computes."""
        return points * self.dim

    def log_density(self, theta: Tensor) -> Tensor:
        """Return the log density (C,) in float64."""
        return self.weights[0] * self.likelihood_and_grad(theta)[0] + self.weights[1] * self.log_prior(theta)


class ProblemTarget(Target):
    """The full-batch density of a problem, in micro-batches where its activations would not fit into memory.

    Attributes:
        sharded: whether other processes of the mesh hold the other rows.
        local: the problem of the rows that this process holds.
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
        """Return whether one block of rows holds all the data, and this process holds all the rows."""
        return self.backend.fused or (not self.sharded and self.problem.block_rows(points) >= self.problem.n)

    def work(self, points: int) -> int:
        """Return rows times activations."""
        return points * self.local.n * self.problem.forward.row_width

    def at_once(self, chains: int) -> int:
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
        """Select C++ or CUDA for small stacks whose rows are all here, torch otherwise."""
        if self.sharded:
            return super().select_backend(compile)
        self.backend = select_for_trajectories(self.problem, self.weights, compile)
        return self.backend

    def compile_pieces(self, mode: Compile, calls: int, chains: int) -> bool:
        """Compile each shape by itself. Triton units stay as they are.

        They beat what the compiler makes of the layers.
        """
        if self.problem.fused:
            return False
        blocks = math.ceil(self.local.n / self.local.block_rows(chains))
        sample = compiled(self._piece, mode, calls * blocks, self.device, self.dim * chains)
        self._compile = sample != self._piece
        return self._compile

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate in one piece, or sum over blocks of rows and over processes, with the prior's gradient apart."""
        if self.backend.fused:
            return self.backend.trajectories.likelihood_and_grad(theta)
        if self.whole(len(theta)):
            return self._in_strips(theta, self.problem.rows, self.weights[1])
        prior, _ = grad_and_aux(self._prior_term, theta)
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

    def _prior_term(self, theta: Tensor) -> tuple[Tensor, None]:
        return (self.problem.prior.log_prob(theta) * self.weights[1]).sum(), None

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the sum over coordinates in float64: what matters is the difference of two large sums."""
        return self.problem.prior.log_prob(theta.double())

    def features(self, theta: Tensor) -> Tensor:
        """Return the outputs at a few rows of the whole problem, the same in all processes."""
        n = self.problem.n
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
        """Return the hash of data, prior, likelihood and temperatures."""
        return self.problem.fingerprint()


class DensityTarget(Target):
    """The target of a `Density`: all of it counts as likelihood."""

    def __init__(self, density: Density) -> None:
        self.density = density
        self.dim, self.device, self.dtype = density.dim, density.device, density.dtype
        self.reason = "a function of many points" if density.batched else "a function of one point, batched by vmap"

    def whole(self, points: int) -> bool:
        """Return True: there are no rows to divide."""
        return True

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the function's value and gradient."""

        def total(t: Tensor) -> tuple[Tensor, Tensor]:
            value = self.density(t).double()
            return value.sum(), value

        gradient, value = grad_and_aux(total, theta)
        return value.detach(), gradient

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(len(theta), dtype=torch.float64, device=theta.device)

    def features(self, theta: Tensor) -> Tensor:
        """Return the first coordinates."""
        return theta[:, :FEATURE_ROWS].double()

    @property
    def scale(self) -> Tensor:
        """As given by the user."""
        return self.density.scale

    def fingerprint(self) -> str:
        """Return the hash of the name, the dimension, and the values at a few fixed points."""
        points = torch.randn(4, self.dim, generator=stream(0, "fingerprint"), dtype=torch.float64)
        values = self.density((points * self.scale.cpu()).to(self.device, self.dtype)).detach()
        text = f"{self.density.name} {self.dim} {[f'{v:.9g}' for v in values.tolist()]}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def to_target(problem: Problem | Density, mesh: Mesh | None = None) -> Target:
    """Return the target of a problem or a density. With a mesh, rows may be sharded over its processes."""
    if isinstance(problem, Problem):
        return ProblemTarget(problem, mesh)
    if isinstance(problem, Density):
        return DensityTarget(problem)
    raise InputError("problem", f"must be a credibly.Problem or a credibly.Density, got {type(problem).__name__}")
