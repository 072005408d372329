"""The ordinal likelihood: ordered classes by cumulative logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from credibly.core.checks import is_integer
from credibly.errors import InputError
from credibly.likelihoods.base import Extra, Likelihood, Parameter, row_shape
from credibly.likelihoods.discrete import class_labels, entropy_of, integer_labels
from credibly.priors.elementwise import Normal, Prior


@dataclass(frozen=True, kw_only=True)
class Ordinal(Likelihood):
    """Ordered classes 0 < 1 < .. < K-1 by cumulative logits: P(y <= k) = sigmoid(c_k - f(x, w)), one output per row.

    The cut points c_0 < .. < c_(K-2) are random parameters of the model, shared by all rows: `cuts` holds the first
    one and then the logarithms of the gaps between them.

    Args:
        classes: the number of classes; None is the largest label of the training targets plus one.
        cut_prior: the prior of each element of `cuts`. None are normal distributions around the cut points of the
            training frequencies, with standard deviations of 2 for the first and 1 for the logarithms of the gaps.
    """

    support: ClassVar[str] = "class"
    ordered: ClassVar[bool] = False
    noise_sign: ClassVar[int] = 0
    classes: int | None = None
    cut_prior: tuple[Prior, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.classes is not None and not (is_integer(self.classes) and self.classes >= 2):
            raise InputError("classes", f"must be an integer of at least 2, got {self.classes!r}")
        if self.cut_prior is not None and self.classes is not None and len(self.cut_prior) != self.classes - 1:
            raise InputError("cut_prior", f"must be {self.classes - 1} priors, got {len(self.cut_prior)}")

    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Check that there is one output per label; set the number of classes if it was not given."""
        arranged = self.arrange(output)
        if arranged.shape[-1] != 1 or y.shape[1:] != arranged.shape[1:-1]:
            raise InputError(
                "net",
                f"its output has shape {row_shape(output)}, y has shape {row_shape(y)}",
                "Ordinal needs one output and one integer label per row, whatever the number of classes",
            )
        if self.classes is not None:
            return self
        labels = integer_labels(y, "Labels are integers from 0, in order; for real targets use Gaussian")
        return self._with_fields(classes=max(2, int(labels.max()) + 1))

    def prepare(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Check labels against the number of classes and return them as int64, (N, ...)."""
        return class_labels(y, self.classes or 0)

    def scaled_to(self, y: Tensor, weight: Tensor | None) -> Self:
        """Centre the default prior of the cut points at those of the frequencies of the classes."""
        if self.cut_prior is not None:
            return self
        assert self.classes is not None
        v = torch.ones(len(y), dtype=torch.float64, device=y.device) if weight is None else weight.double()
        rows = v.reshape(-1, *(1,) * (y.ndim - 1)).expand(y.shape).flatten()
        # Half a row more in every class, so that a class without rows has an interval too.
        count = torch.bincount(y.flatten(), weights=rows, minlength=self.classes) * (y.numel() / rows.sum()) + 0.5
        below = (count.cumsum(0) / count.sum())[:-1].clamp(1e-6, 1 - 1e-6)
        cuts = [round(math.log(p / (1 - p)), 2) for p in below.tolist()]
        gaps = [round(math.log(max(b - a, 0.01)), 2) for a, b in pairwise(cuts)]
        return replace(self, cut_prior=(Normal(2.0, loc=cuts[0]), *(Normal(1.0, loc=gap) for gap in gaps)))

    def parameters(self) -> dict[str, Parameter]:
        """Return `cuts`: the first cut point and the logarithms of the gaps."""
        assert self.classes is not None
        prior = self.cut_prior or tuple(Normal(2.0) for _ in range(self.classes - 1))
        return {"cuts": Parameter((self.classes - 1,), prior, tuple(p.centre for p in prior))}

    def cut_points(self, extra: Extra) -> Tensor:
        """Return the cut points in increasing order, (C, K-1)."""
        first, gaps = extra["cuts"][..., :1], extra["cuts"][..., 1:]
        return torch.cat([first, first + torch.cumsum(torch.exp(gaps), -1)], -1)

    def log_probabilities(self, output: Tensor, extra: Extra) -> Tensor:
        """Return log p(class | x, w), (C, N, ..., K).

        A difference of sigmoids is sigmoid(b) sigmoid(-a) (1 - exp(a - b)), whose last factor depends on the gap alone.
        """
        cuts = self.cut_points(extra)
        shape = cuts.shape[:-1] + (1,) * (output.ndim - cuts.ndim) + cuts.shape[-1:]
        logits = cuts.reshape(shape) - output
        gap = torch.exp(extra["cuts"][..., 1:]).reshape(*shape[:-1], -1)
        # log(1 - exp(-gap)), accurate for small and large gaps; the inner clamps keep gradients finite.
        small = torch.log(-torch.expm1(-gap.clamp(min=1e-30, max=math.log(2))))
        large = torch.log1p(-torch.exp(-gap.clamp_min(math.log(2))))
        middle = torch.where(gap < math.log(2), small, large)
        below, above = F.logsigmoid(logits), F.logsigmoid(-logits)
        inner = below[..., 1:] + above[..., :-1] + middle
        return torch.cat([below[..., :1], inner, above[..., -1:]], -1)

    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return log p of each row's label."""
        log_p = self.log_probabilities(output, extra)
        return log_p.gather(-1, y.unsqueeze(-1).expand((*log_p.shape[:-1], 1))).squeeze(-1)

    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of the one-hot label: p and p (1 - p)."""
        p = self.log_probabilities(output, extra).exp()
        return p, p * (1 - p)

    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """-sum p log p in nats, (C, N, ...)."""
        return entropy_of(self.log_probabilities(output, extra).exp())

    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw one label per row, (C, N, ...): the number of cut points below f plus logistic noise."""
        u = torch.rand(output.shape, generator=generator, dtype=torch.float64, device=output.device)
        cuts = self.cut_points(extra).double()
        shape = cuts.shape[:-1] + (1,) * (output.ndim - cuts.ndim) + cuts.shape[-1:]
        return (u > torch.sigmoid(cuts.reshape(shape) - output)).sum(-1)

    def spread(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy of y given w."""
        return self.entropy(output, extra)

    def total(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Return the entropy of the averaged probabilities."""
        return entropy_of(mean)

    def variance(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Return p (1 - p) of the averaged probabilities, per class."""
        return mean * (1 - mean)
