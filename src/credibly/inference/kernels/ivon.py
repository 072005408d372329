"""The update of IVON on flat tensors whose rows are independent problems (Shen et al. 2024).

    sigma^2 = 1 / (N (h + delta));   h_hat = g_hat (w - m) / sigma^2 at w ~ N(m, sigma^2)
    g <- b1 g + (1 - b1) g_hat
    h <- b2 h + (1 - b2) h_hat + 1/2 (1 - b2)^2 (h - h_hat)^2 / (h + delta)
    m <- m - lr clip((g / (1 - b1^t) + delta (m - loc)) / (h + delta)),   |clip(.)| <= LIMIT (h + delta)^-1/2

g_hat is the gradient of the mean loss at w, and delta = 1 / (N s^2) for a prior N(loc, s^2). The last term of h keeps
h + delta positive: with u = (1 - b2) (h_hat - h) / (h + delta) it is multiplied by 1 + u + u^2 / 2 > 0.

Under a wide prior h can be far below the curvature that the next draws meet, and one such gradient throws the means far
away. (h + delta)^-1/2 is the standard deviation of a weight that a single row would leave, and the gradient of B rows
has a standard deviation of B^-1/2 in its units: once converged, averaged gradients of 128 rows stay five of theirs
below the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The largest Newton step of a mean, in units of (h + delta)^-1/2. The kernels in C++ and Triton have the same number.
LIMIT = 0.1


@dataclass(frozen=True, eq=False)
class VariationalNewton:
    """The update of means and curvatures, theta (M, 2 D) = (m, h), by gradients (M, 2 D) = (g_hat, h_hat).

    Attributes:
        delta, loc: curvature and mean of the prior, (D,); delta is 0 if the prior is part of the loss.
        beta1, beta2: decay of the means of gradients and of curvatures.
        clip: largest norm of g_hat, beyond which both estimates are scaled down; None for no limit.
    """

    delta: Tensor
    loc: Tensor
    beta1: float
    beta2: float
    clip: float | None = None

    def init(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Return a zero mean of the gradients, (M, D)."""
        return (torch.zeros_like(theta[:, : theta.shape[1] // 2]),)

    def corrections(self, step: int) -> tuple[float, float]:
        """Return the bias correction of the mean gradient, which starts at zero; the curvature needs none."""
        return 1 / (1 - self.beta1**step), 1.0

    def update(
        self, theta: Tensor, state: tuple[Tensor, ...], gradient: Tensor, lr: Tensor, c1: Tensor, c2: Tensor
    ) -> None:
        """Take one step, in place; lr is (), or (M, 1) with 0 for inactive rows."""
        mean, curvature = theta.chunk(2, -1)
        slope, found = gradient.chunk(2, -1)
        if self.clip is not None:
            factor = self.clip / torch.linalg.vector_norm(slope, dim=-1, keepdim=True).clamp_min(self.clip)
            slope, found = factor * slope, factor * found
        update_gaussian(mean, curvature, state[0], slope, found, self.delta, self.loc, (self.beta1, self.beta2), lr, c1)


def deviation(curvature: Tensor, delta: Tensor | float, n: float) -> Tensor:
    """Return sigma = (N (h + delta))^-1/2."""
    return torch.rsqrt(n * (curvature + delta))


def update_gaussian(
    mean: Tensor,
    curvature: Tensor,
    momentum: Tensor,
    slope: Tensor,
    found: Tensor,
    delta: Tensor | float,
    loc: Tensor | float,
    betas: tuple[float, float],
    lr: Tensor | float,
    correction: Tensor | float,
) -> None:
    """Update m, h and g in place, given g_hat (`slope`) and h_hat (`found`)."""
    beta1, beta2 = betas
    rate = 1 - beta2
    momentum.mul_(beta1).add_(slope * (1 - beta1))
    change = found - curvature
    curvature.add_(rate * change + (0.5 * rate * rate) * torch.square(change) / (curvature + delta))
    total = curvature + delta
    step, most = (momentum * correction + delta * (mean - loc)) / total, LIMIT * torch.rsqrt(total)
    mean.sub_(lr * torch.minimum(torch.maximum(step, -most), most))
