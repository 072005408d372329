"""Likelihood: everything that depends on the task, in one object.

Shapes. A network maps rows to outputs (C, N, ..., K) for C parameter vectors; the last axis (or `axis`, moved there) holds
the targets or the classes and every other axis rides along: (N, K) for a table, (N, H, W, K) for pixels. Targets of
regression-like tasks are (N, ..., K); when the caller's y has no target axis the likelihood is `bound` with squeeze=True
and results lose that axis again, so that they always compare with the caller's y element by element.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from credibly.core.inputs import check_finite
from credibly.errors import InputError
from credibly.priors.elementwise import Prior

Extra = Mapping[str, Tensor]


@dataclass(frozen=True)
class Parameter:
    """A random parameter that the likelihood adds to the flat vector."""

    shape: tuple[int, ...]
    prior: Prior
    init: float


@dataclass(frozen=True, kw_only=True)
class Likelihood(ABC):
    """p(y | f(x, w)) with its moments, entropies, distribution function and sampling.

    Args:
        axis: the axis of the network's output that holds targets or classes, counted with the rows at 0: -1, or 1 for
            convolutional networks with channels first.
        squeeze: set by `bind` when y has no target axis.
    """

    axis: int = -1
    squeeze: bool = False

    support: ClassVar[str]  # "real", "count", "binary" or "class"
    ordered: ClassVar[bool] = True  # whether quantiles mean anything
    wide: ClassVar[bool] = False  # whether results need float64, whatever the network has

    # -- binding to data ---------------------------------------------------------------------------------------------
    @abstractmethod
    def bind(self, output: Tensor, y: Tensor) -> Self:
        """The likelihood fitted to a trial output (rows, ...) and targets of the caller's shape; refuses what does not fit."""

    @abstractmethod
    def prepare(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Checked targets in the layout that `log_prob` takes: (N, ..., K), or (N, ...) for classes."""

    def parameters(self) -> dict[str, Parameter]:
        """Random parameters of its own, by name."""
        return {}

    # -- the density and what follows from it; `output` is arranged, (C, N, ..., K) ------------------------------------
    @abstractmethod
    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Log density of each row (and each riding element), summed over independent targets: (C, N, ...)."""

    @abstractmethod
    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Mean and variance of y given x and w, each (C, N, ..., K)."""

    @abstractmethod
    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Entropy in nats of y given x and w: (C, N, ..., K) for independent targets, (C, N, ...) for classes."""

    @abstractmethod
    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """One draw of y for each element of `output`, in the layout of prepared targets."""

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """P(y <= value) given x and w, elementwise (C, N, ..., K)."""
        raise InputError(
            "likelihood",
            f"{type(self).__name__} has no order on its outcomes",
            "Quantiles and intervals need one; use prediction_set(level) for classes",
        )

    # -- the three kinds of uncertainty, from averages over draws -----------------------------------------------------
    def spread(self, output: Tensor, extra: Extra) -> Tensor:
        """The aleatoric part of one draw; averaged over draws it is the aleatoric uncertainty."""
        return self.moments(output, extra)[1]

    def total(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Total uncertainty from the averaged mean, the variance of means over draws and the averaged spread."""
        return aleatoric + variance_of_means

    def variance(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Variance of y under the model average, of the shape of the mean."""
        return aleatoric + variance_of_means

    def standardised(self) -> tuple[Likelihood, Tensor, Tensor] | None:
        """For one that stretches and moves the outcomes of another: that one, the location and the scale of each target."""
        return None

    # -- layout ------------------------------------------------------------------------------------------------------
    def arrange(self, output: Tensor, lead: int = 0) -> Tensor:
        """A raw network output with `lead` axes before the rows, its target axis moved to the end."""
        if output.ndim - lead == 1:  # a network that returns (N,): one target
            return output.unsqueeze(-1)
        if self.axis in (-1, output.ndim - lead - 1):
            return output
        return output.movedim(self.axis + lead if self.axis >= 0 else self.axis, -1)

    def restore(self, value: Tensor, lead: int = 0) -> Tensor:
        """A result (lead, N, ..., K) in the caller's layout: squeezed, or its last axis back where the network has it."""
        if self.squeeze:
            return value.squeeze(-1)
        if self.axis in (-1, value.ndim - lead - 1):
            return value
        return value.movedim(-1, self.axis + lead if self.axis >= 0 else self.axis)

    def _bound(self, **fields: object) -> Self:
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class IndependentTargets(Likelihood):
    """Likelihoods of K real, binary or count targets that are independent given the weights."""

    outputs_per_target: ClassVar[int] = 1

    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Fits the output width to y: (N, ..., K) targets, or one target without an axis of its own."""
        arranged = self.arrange(output)
        width, per = arranged.shape[-1], self.outputs_per_target
        ride = arranged.shape[1:-1]
        name = type(self).__name__
        if width % per:
            raise InputError("net", f"its output has {width} values a row", f"{name} needs {per} for each target")
        if y.ndim > 1 and output.ndim > 1:
            with_axis = self._last(y)
            if with_axis.shape[1:] == (*ride, width // per):
                return self._bound(squeeze=False, **self._target_fields(width // per))
        if y.shape[1:] == ride and width == per:
            return self._bound(squeeze=True, **self._target_fields(1))
        raise InputError(
            "net",
            f"its output has shape (rows, {', '.join(map(str, output.shape[1:]))}), y (rows, {', '.join(map(str, y.shape[1:]))})",
            f"{name} needs {per} output{'s' if per > 1 else ''} for each target of y, on axis {self.axis}",
        )

    def prepare(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """(N, ..., K) in the network's dtype, with values checked."""
        y = y.unsqueeze(-1) if self.squeeze else self._last(y)
        y = y.to(dtype)
        check_finite("y", y)
        self.check_values(y)
        return y

    def check_values(self, y: Tensor) -> None:
        """Refuses targets outside the support."""

    def _last(self, y: Tensor) -> Tensor:
        return y if self.axis in (-1, y.ndim - 1) or y.ndim <= self.axis else y.movedim(self.axis, -1)

    def _target_fields(self, targets: int) -> dict[str, object]:
        return {}


def ride_along(value: Tensor, output: Tensor, per_target: bool) -> Tensor:
    """An extra parameter (C,) or (C, K) shaped to broadcast against outputs (C, N, ..., K)."""
    lead = value.shape[:-1] if per_target else value.shape
    last = value.shape[-1:] if per_target else torch.Size([1])
    return value.reshape(lead + (1,) * (output.ndim - len(lead) - 1) + last)
