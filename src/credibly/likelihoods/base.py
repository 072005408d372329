"""Likelihood: everything that depends on the task, in one object.

Shapes. A network maps rows to outputs (C, N, ..., K) for C parameter vectors. The last axis (or `axis`, moved there)
holds targets or classes, and other axes are elementwise: (N, K) for a table, (N, H, W, K) for pixels. Targets of
regression-like tasks are (N, ..., K). If the caller's y has no target axis, `bind` sets squeeze=True and results lose
that axis again, so they always have the shape of the caller's y.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from credibly.core.inputs import check_finite
from credibly.core.placement import exact_dtype
from credibly.core.plain_settings import PlainSettings
from credibly.core.specs import kind_name
from credibly.errors import InputError
from credibly.priors.parameter import Parameter as Parameter

Extra = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Likelihood(PlainSettings, ABC):
    """p(y | f(x, w)) with its moments, entropy, CDF and sampler.

    Args:
        axis: the axis of the network's output that holds targets or classes, where 0 is the rows: -1, or 1 for
            convolutional networks with channels first.
        squeeze: set by `bind` if y has no target axis.
    """

    axis: int = -1
    squeeze: bool = False

    support: ClassVar[str]  # "real", "time", "count", "binary" or "class"
    limits: ClassVar[tuple[float, float]] = (-math.inf, math.inf)  # smallest and largest possible y
    ordered: ClassVar[bool] = True  # whether outcomes have quantiles
    # How noise depends on the own parameters: 1 if it grows with them, -1 if it falls, 0 if they are not noise levels.
    noise_sign: ClassVar[int] = 1
    predicts_scale: ClassVar[bool] = False  # whether the network's outputs contain the scale of the noise
    wide: ClassVar[bool] = False  # whether results need float64 whatever the network's dtype

    # -- binding to data ---------------------------------------------------------------------------------------------
    @abstractmethod
    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Return the likelihood configured for a trial output (rows, ...) and the caller's y. Raise on a mismatch."""

    @abstractmethod
    def prepare(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Check targets and return them in the layout of `log_prob`: (N, ..., K), or (N, ...) for classes."""

    def scaled_to(self, y: Tensor, weight: Tensor | None) -> Self:
        """Return the likelihood with the defaults that depend on the units of y set for these prepared targets.

        `weight` are the weights (N,) of the rows, None for ones.
        """
        return self

    def counted(self, y: Tensor) -> Tensor | None:
        """Return which elements of prepared targets count, as booleans in their shape; None for all of them."""
        return None

    def parameters(self) -> dict[str, Parameter]:
        """Return the likelihood's own random parameters, by name."""
        return {}

    def with_scale_factor(self, output: Tensor, log_factor: float) -> Tensor:
        """Return arranged outputs whose predicted scale is larger by exp(log_factor)."""
        raise NotImplementedError

    # -- the density and what follows from it; `output` is arranged, (C, N, ..., K) ------------------------------------
    @abstractmethod
    def log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the log density per row (and pixel), summed over independent targets: (C, N, ...)."""

    @abstractmethod
    def moments(self, output: Tensor, extra: Extra) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of y given x and w, each (C, N, ..., K)."""

    @abstractmethod
    def entropy(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the entropy in nats of y given x and w: (C, N, ..., K) per target, (C, N, ...) for classes."""

    @abstractmethod
    def sample(self, output: Tensor, extra: Extra, generator: torch.Generator) -> Tensor:
        """Draw one y per element of `output`, in the layout of prepared targets."""

    def cdf(self, output: Tensor, value: Tensor, extra: Extra) -> Tensor:
        """Return P(y <= value) given x and w, elementwise (C, N, ..., K)."""
        found = f"{type(self).__name__} outcomes have no order, so no quantiles or intervals"
        raise InputError("likelihood", found, "Use prediction_set(level) for classes")

    # -- total, aleatoric and epistemic uncertainty, from averages over draws -----------------------------------------
    def spread(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the uncertainty of y given w; its average over draws is the aleatoric uncertainty."""
        return self.moments(output, extra)[1]

    def total(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Return the total uncertainty, given the mean, the variance of means over draws and the aleatoric part."""
        return aleatoric + variance_of_means

    def variance(self, mean: Tensor, variance_of_means: Tensor, aleatoric: Tensor) -> Tensor:
        """Return the variance of y under the model average, in the shape of the mean."""
        return aleatoric + variance_of_means

    def standardised(self) -> tuple[Likelihood, Tensor, Tensor] | None:
        """Return (inner likelihood, location, scale) if y is an affine transform of another target, else None."""
        return None

    def increasing(self) -> tuple[Likelihood, Callable[[Tensor], Tensor]] | None:
        """Return (inner likelihood, g) if y = g(z) for an increasing g of another target z, else None."""
        return None

    def predictive_log_prob(self, output: Tensor, y: Tensor, extra: Extra) -> Tensor:
        """Return the log density of y that predictions report, in the shape of `log_prob`, which it is by default.

        The two differ for a working likelihood, whose `log_prob` is a loss and not a density of y.
        """
        return self.log_prob(output, y, extra)

    # -- overrides of the general code ---------------------------------------------------------------------------------
    def fisher_root(self, output: Tensor, extra: Extra) -> Tensor | None:
        """Return S (N, ..., W, R) with S S' the Fisher information of outputs (N, ..., W); None derives it elsewhere.

        `extra` is (1, ...), as for one draw.
        """
        return None

    def mixture_quantiles(self, output: Tensor, extra: Extra, levels: Sequence[float]) -> Tensor | None:
        """Return quantiles (levels, N, ..., K) of the average over draws; None finds them from the CDF."""
        return None

    def restored(self, spec: Mapping[str, Any]) -> Self:
        """Return the likelihood as it was bound in a stored run, given that run's description of it."""
        same = spec.get("kind") == kind_name(type(self))
        return self._with_fields(squeeze=bool(spec.get("squeeze", self.squeeze))) if same else self

    # -- layout ------------------------------------------------------------------------------------------------------
    def arrange(self, output: Tensor, lead: int = 0) -> Tensor:
        """Move the target axis of a network output, which has `lead` axes before the rows, to the end."""
        if output.ndim - lead == 1:  # the network returns (N,): a single target
            return output.unsqueeze(-1)
        if self.axis in (-1, output.ndim - lead - 1):
            return output
        return output.movedim(self.axis + lead if self.axis >= 0 else self.axis, -1)

    def rearranged(self, output: Tensor, lead: int = 0) -> Tensor:
        """Invert `arrange` for outputs with a target axis."""
        if self.axis in (-1, output.ndim - lead - 1):
            return output
        return output.movedim(-1, self.axis + lead if self.axis >= 0 else self.axis)

    def restore(self, value: Tensor, lead: int = 0) -> Tensor:
        """Return a result (lead, N, ..., K) in the caller's layout: squeezed, or with the target axis moved back."""
        if self.squeeze:
            return value.squeeze(-1)
        if self.axis in (-1, value.ndim - lead - 1):
            return value
        return value.movedim(-1, self.axis + lead if self.axis >= 0 else self.axis)

    def _with_fields(self, **fields: object) -> Self:
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class IndependentTargets(Likelihood):
    """Likelihood of K real, binary or count targets that are independent given the weights."""

    outputs_per_target: ClassVar[int] = 1

    def bind(self, output: Tensor, y: Tensor) -> Self:
        """Match the output width to y: targets (N, ..., K), or a single target without a target axis."""
        arranged = self.arrange(output)
        width, per = arranged.shape[-1], self.outputs_per_target
        elementwise = arranged.shape[1:-1]
        name = type(self).__name__
        if width % per:
            raise InputError("net", f"its output has {width} values per row", f"{name} needs {per} per target")
        if y.ndim > 1 and output.ndim > 1:
            with_axis = self._target_axis_last(y)
            if with_axis.shape[1:] == (*elementwise, width // per):
                return self._with_fields(squeeze=False, **self._target_fields(width // per))
        if y.shape[1:] == elementwise and width == per:
            return self._with_fields(squeeze=True, **self._target_fields(1))
        raise InputError(
            "net",
            f"its output has shape {row_shape(output)}, y has shape {row_shape(y)}",
            channels_first(self, output, y)
            or f"{name} needs {per} output{'s' if per > 1 else ''} per target of y, on axis {self.axis}",
        )

    def prepare(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Check targets and return them as (N, ..., K) in the network's dtype."""
        y = y.unsqueeze(-1) if self.squeeze else self._target_axis_last(y)
        y = y.to(exact_dtype(dtype) if self.support == "count" else dtype)
        check_finite("y", y)
        self.check_values(y)
        return y

    def check_values(self, y: Tensor) -> None:
        """Raise if a target lies outside the support."""

    def _target_axis_last(self, y: Tensor) -> Tensor:
        return y if self.axis in (-1, y.ndim - 1) or y.ndim <= self.axis else y.movedim(self.axis, -1)

    def _target_fields(self, targets: int) -> dict[str, object]:
        return {}


def row_shape(values: Tensor) -> str:
    """Return a tensor's shape for an error message, with "rows" for the first axis."""
    return f"({', '.join(['rows', *map(str, values.shape[1:])])})"


def channels_first(likelihood: Likelihood, output: Tensor, y: Tensor) -> str:
    """Return advice for outputs (rows, K, H, W) with targets (rows, H, W) or (rows, K, H, W), or an empty string."""
    fits = tuple(y.shape[1:]) in (tuple(output.shape[2:]), tuple(output.shape[1:]))
    if output.ndim > 2 and likelihood.axis == -1 and fits:
        return "Pass axis=1 to the likelihood: the network returns classes or targets on axis 1, before the pixels"
    return ""


def expand_to_output(value: Tensor, output: Tensor, per_target: bool) -> Tensor:
    """Reshape a likelihood parameter (C,) or (C, K) to broadcast against outputs (C, N, ..., K)."""
    lead = value.shape[:-1] if per_target else value.shape
    last = value.shape[-1:] if per_target else torch.Size([1])
    return value.reshape(lead + (1,) * (output.ndim - len(lead) - 1) + last)
