"""The target of all replicas of parallel tempering: a density whose likelihood has a temperature per chain."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.compilation import Compile
from credibly.inference.backend import Backend
from credibly.inference.target import Target


class TemperedTarget(Target):
    """A target with the likelihood of row r raised to beta_r.

        grad log p_beta = beta (grad log p - grad log prior) + grad log prior

    where log prior has its own temperature. So every backend that evaluates the target, including C++ and CUDA,
    evaluates all temperatures together. A plain density has no prior, and all of it is tempered.

    Args:
        inner: the target at beta = 1.
        rows: number of points that are sampled together.

    Attributes:
        beta: inverse temperatures (rows,), in float64. Set by `set_beta`.
        row_weights: the weights of likelihood, (rows,), and prior in the tempered density.
    """

    def __init__(self, inner: Target, rows: int) -> None:
        self.inner = inner
        self.dim, self.device, self.dtype, self.weights = inner.dim, inner.device, inner.dtype, inner.weights
        self.looped, self.reason = inner.looped, inner.reason
        # Factors of the chunk to evaluate next, by the length of the chunk: a compiled step reads them in place.
        self._factors: dict[int, Tensor] = {}
        self.set_beta(torch.ones(rows, dtype=torch.float64))

    def set_beta(self, beta: Tensor) -> None:
        """Set the inverse temperature of every row."""
        self.beta = beta.to(self.device, torch.float64)
        self.row_weights = (self.inner.weights[0] * self.beta, self.inner.weights[1])

    def select_rows(self, part: slice) -> None:
        """Set which rows are evaluated from now on."""
        beta = self.beta[part].unsqueeze(1)
        if len(beta) not in self._factors:
            self._factors[len(beta)] = torch.empty_like(beta, dtype=self.dtype)
        self._factors[len(beta)].copy_(beta)

    def likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (C,), not tempered, and the gradient of the tempered log density (C, D)."""
        log_lik, gradient = self.inner.likelihood_and_grad(theta)
        prior = self.inner.prior_gradient(theta)
        return log_lik, torch.lerp(prior, gradient, self._factors[len(theta)])

    def at_other_beta(self, theta: Tensor, gradient: Tensor, ratio: Tensor) -> Tensor:
        """Return the gradient at theta (C, D) after a change of beta by the factors ratio (C,)."""
        prior = self.inner.prior_gradient(theta)
        return torch.lerp(prior, gradient, ratio.to(gradient).unsqueeze(1))

    def prior_gradient(self, theta: Tensor) -> Tensor:
        """Return the result of the inner target: the prior is not tempered."""
        return self.inner.prior_gradient(theta)

    @property
    def backend_name(self) -> str:
        """The backend of the inner target."""
        return self.inner.backend.name

    def select_backend(self, compile: Compile) -> Backend:
        """Select the backend of the inner target; the integrator around it is torch."""
        self.inner.select_backend(compile)
        self.backend = Backend("torch", False if self.inner.backend.fused else compile)
        return self.backend

    def compile_parts(self, mode: Compile, calls: int, chains: int) -> bool:
        """Let the inner target compile its parts, unless C++ or CUDA evaluates it."""
        return not self.inner.backend.fused and self.inner.compile_parts(mode, calls, chains)

    def whole(self, points: int) -> bool:
        """Return whether an evaluation may be part of a compiled step, which a call to C++ or CUDA may not."""
        return not self.inner.backend.fused and self.inner.whole(points)

    def chains_at_once(self, chains: int) -> int:
        """Return how many chains fit into memory in one evaluation."""
        return self.inner.chains_at_once(chains)

    def work(self, points: int) -> int:
        """Return roughly how many values an evaluation at `points` points computes."""
        return self.inner.work(points)

    def full_likelihood(self, theta: Tensor) -> Tensor | None:
        """Return the log likelihood in full precision, not tempered."""
        return self.inner.full_likelihood(theta)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the log prior (C,)."""
        return self.inner.log_prior(theta)

    def features(self, theta: Tensor) -> Tensor:
        """Return the features of the inner target."""
        return self.inner.features(theta)

    @property
    def scale(self) -> Tensor:
        """The prior's standard deviations."""
        return self.inner.scale

    def fingerprint(self) -> str:
        """Return the hash of the inner target."""
        return self.inner.fingerprint()
