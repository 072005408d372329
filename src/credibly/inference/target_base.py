"""The interface of samplers to a density: its log at C points, split into likelihood and prior, and its gradient.

`ProblemTarget` (in `target`) is the density of a `Problem`, `DensityTarget` that of a plain function.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from credibly.core.autodiff import grad_and_aux
from credibly.core.compilation import Compile
from credibly.core.rng import stream
from credibly.inference.backend import TORCH, Backend
from credibly.inference.density import Density

# Number of rows whose predictions are the features of a network's target.
FEATURE_ROWS = 64


class Target(ABC):
    """A density over R^D, evaluated at many points at once, with likelihood and prior apart.

    Attributes:
        dim, device, dtype: of the points.
        weights: (1/T_lik, 1/T_prior): log p = weights[0] * log likelihood + weights[1] * log prior.
        looped: whether points must be evaluated one at a time, and `reason` why.
        backend: the backend that evaluates it.
        collapsed: whether points are not parameter vectors themselves, because some parameters are integrated out.
    """

    dim: int
    device: torch.device
    dtype: torch.dtype
    weights: tuple[float, float] = (1.0, 1.0)
    looped: bool = False
    reason: str = ""
    backend: Backend = TORCH
    collapsed: ClassVar[bool] = False

    @abstractmethod
    def whole(self, points: int) -> bool:
        """Return whether `points` points are evaluated at once, so that this may be part of a compiled step."""

    @abstractmethod
    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (C,) in float64 and the gradient (C, D) of the full log density."""

    @abstractmethod
    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the log prior (C,) in float64."""

    def prior_gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient (C, D) of weights[1] * log prior; zeros where all of the density is likelihood."""
        return torch.zeros_like(theta)

    def select_rows(self, part: slice) -> None:
        """Prepare to evaluate the chains in `part`; only targets that differ between chains have something to do."""
        return None

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

    @property
    def plain(self) -> Target:
        """The target whose points are parameter vectors: this one, unless it is collapsed."""
        return self

    def decode(self, points: Tensor) -> Tensor:
        """Return the parameter vectors (C, D) of points."""
        return points

    def encode(self, theta: Tensor) -> Tensor:
        """Return the points (C, D) of parameter vectors."""
        return theta

    def recorded(self, theta: Tensor, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the statistics of a draw, parameter vectors (C, D), from those of its points."""
        return statistics

    def minibatch_and_grad(self, theta: Tensor, rows: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return log likelihood (C,) and gradient (C, D) as estimated from some rows; a plain density has no rows.

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

    @property
    def backend_name(self) -> str:
        """The backend of its evaluations."""
        return self.backend.name

    def select_backend(self, compile: Compile) -> Backend:
        """Select the backend of full-batch evaluations from now on."""
        self.backend = Backend("torch", compile)
        return self.backend

    def compile_parts(self, mode: Compile, calls: int, chains: int) -> bool:
        """Compile the parts of an evaluation that takes several blocks. Return whether they will be compiled."""
        return False

    def chains_at_once(self, chains: int) -> int:
        """Return how many chains fit into memory in one evaluation."""
        return 1 if self.looped else chains

    def work(self, points: int) -> int:
        """Return roughly how many values an evaluation at `points` points computes."""
        return points * self.dim

    def log_density(self, theta: Tensor) -> Tensor:
        """Return the log density (C,) in float64."""
        return self.weights[0] * self.likelihood_and_grad(theta)[0] + self.weights[1] * self.log_prior(theta)


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
        """The scale, as given by the user."""
        return self.density.scale

    def fingerprint(self) -> str:
        """Return the hash of the name, the dimension, and the values at a few fixed points."""
        points = torch.randn(4, self.dim, generator=stream(0, "fingerprint"), dtype=torch.float64)
        values = self.density((points * self.scale.cpu()).to(self.device, self.dtype)).detach()
        text = f"{self.density.name} {self.dim} {[f'{v:.9g}' for v in values.tolist()]}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]
