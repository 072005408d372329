"""The beta likelihood: proportions between 0 and 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from credibly.core.checks import is_real
from credibly.errors import InputError
from credibly.likelihoods.base import Extra
from credibly.likelihoods.shared import Positive, SharedParameter
from credibly.likelihoods.special import incomplete_beta
from credibly.priors.elementwise import Normal, Prior


@dataclass(frozen=True)
class Beta(SharedParameter):
    """Proportions y in [0, 1] with mean m = sigmoid(f(x, w)): y ~ Beta(m precision, (1 - m) precision), per target.

    The beta density is 0 or infinite at 0 and 1. If such targets occur, the density is that of margin + (1 - 2 margin)
    y, a beta distribution stretched slightly beyond [0, 1]; quantiles, the CDF and samples are clipped to [0, 1].

    Args:
        precision: a positive number, or "learned", which makes log(precision) a random parameter of the model. The
            variance is m (1 - m) / (precision + 1).
        precision_prior: the prior of log(precision) if it is learned; None is N(2, 1.5^2).
        per_target: whether a learned precision has one value per target.
        margin: from 0 to below 1/2. None is 0 if every training target lies strictly between 0 and 1, and 1/(2N) for N
            rows otherwise (Smithson & Verkuilen 2006, but exact in the units of y).
    """

    precision: Positive = "learned"
    precision_prior: Prior | None = field(default=None, kw_only=True)
    margin: float | None = field(default=None, kw_only=True)

    support: ClassVar[str] = "real"
    limits: ClassVar[tuple[float, float]] = (0.0, 1.0)
    noise_sign: ClassVar[int] = -1
    shared: ClassVar[str] = "precision"
    default_prior: ClassVar[Normal] = Normal(scale=1.5, loc=2.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin is not None and not (is_real(self.margin) and 0 <= self.margin < 0.5):
            raise InputError("margin", f"must be a number from 0 to below 0.5, got {self.margin!r}")

    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Match the output width to y, and set the margin by whether y holds 0 or 1."""
        bound = super().bind(output, y)
        if bound.margin is not None:
            return bound
        edges = bool(((y <= 0) | (y >= 1)).any())
        return bound._with_fields(margin=0.5 / max(len(y), 2) if edges else 0.0)

    def check_values(self, y: Tensor) -> None:
        """Raise unless every target is from 0 to 1, or strictly between them without a margin."""
        outside = (y < 0) | (y > 1)
        if bool(outside.any()):
            found = f"has values outside 0 to 1, such as {float(y[outside][0]):g}"
            raise InputError("y", found, "Beta needs proportions: divide percentages by 100")
        edges = (y == 0) | (y == 1)
        if not self.margin and bool(edges.any()):
            found = f"has the value {float(y[edges][0]):g}, where the beta density is 0 or infinite"
            raise InputError("y", found, "Pass margin, such as Beta(margin=0.001)")

    def _shapes(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        phi = self.shared_value(output, extra)
        # A shape of exactly 0, where the sigmoid underflows, has no density.
        tiny = torch.finfo(output.dtype).tiny
        return (torch.sigmoid(v).clamp_min(tiny) * phi for v in (output, -output))  # type: ignore[return-value]

    @property
    def _stretch(self) -> float:
        return 1 - 2 * (self.margin or 0.0)

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """(a - 1) log u + (b - 1) log(1 - u) - log B(a, b) + log(1 - 2 margin), u the inset y, summed over targets."""
        a, b = self._shapes(output, extra)
        u = (self.margin or 0.0) + self._stretch * y
        # In float32 the difference of large log gamma functions would lose its digits.
        wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
        norm = torch.lgamma(wide_a + wide_b) - torch.lgamma(wide_a) - torch.lgamma(wide_b)
        density = (a - 1) * torch.log(u) + (b - 1) * torch.log1p(-u) + norm.to(output.dtype)
        return (density + math.log(self._stretch)).sum(-1)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """m and m (1 - m) / (precision + 1) of the inset y, in units of y."""
        m, rest = torch.sigmoid(output), torch.sigmoid(-output)
        variance = m * rest / (1 + self.shared_value(output, extra))
        mean = ((m - (self.margin or 0.0)) / self._stretch).clamp(0, 1) if self.margin else m
        return mean, variance / self._stretch**2

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """log B(a, b) - (a - 1) psi(a) - (b - 1) psi(b) + (a + b - 2) psi(a + b) - log(1 - 2 margin)."""
        a, b = (v.to(torch.float64) for v in self._shapes(output, extra))
        log_beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        slopes = (a - 1) * torch.digamma(a) + (b - 1) * torch.digamma(b) - (a + b - 2) * torch.digamma(a + b)
        return (log_beta - slopes - math.log(self._stretch)).to(output.dtype)

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """P(y <= value) = I_u(a, b), elementwise, with y clipped to [0, 1]."""
        a, b = self._shapes(output, extra)
        u = ((self.margin or 0.0) + self._stretch * value.to(torch.float64)).clamp(0, 1).expand_as(output)
        found = incomplete_beta(a, b, u, 1 - u)
        return torch.where(value < 0, 0.0, torch.where(value >= 1, 1.0, found)).to(output.dtype)

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw g_a / (g_a + g_b) from two gamma variables, in units of y."""
        draws = [
            torch._standard_gamma(v.double().contiguous(), generator=generator) for v in self._shapes(output, extra)
        ]
        total = draws[0] + draws[1]
        # With very small shapes both may underflow: then the larger shape decides.
        u = torch.where(total > 0, draws[0] / total, (output > 0).double())
        return ((u - (self.margin or 0.0)) / self._stretch).clamp(0, 1).to(output.dtype)
