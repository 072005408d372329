"""A positive parameter of a likelihood that does not depend on x: fixed, or learned on the log scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from credibly.core.checks import check_positive
from credibly.errors import InputError
from credibly.likelihoods.base import Extra, IndependentTargets, Parameter, expand_to_output
from credibly.priors.elementwise import Normal, Prior

Positive = float | Literal["learned"]


@dataclass(frozen=True, kw_only=True)
class SharedParameter(IndependentTargets):
    """A likelihood with one positive parameter besides the network, whose field is named by `shared`.

    A learned one is the random parameter `log_<name>` with the prior `<name>_prior`.
    """

    shared: ClassVar[str]
    default_prior: ClassVar[Normal]
    per_target: bool = field(default=False, kw_only=True)
    targets: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        value = getattr(self, self.shared)
        if isinstance(value, str):
            if value != "learned":
                raise InputError(self.shared, f'must be a positive number or "learned", got {value!r}')
        else:
            check_positive(self.shared, value)

    def parameters(self) -> dict[str, Parameter]:
        """Return the logarithm of the parameter if it is learned, one value or one per target."""
        if getattr(self, self.shared) != "learned":
            return {}
        prior: Prior = getattr(self, f"{self.shared}_prior") or self.default_prior
        return {f"log_{self.shared}": Parameter((self.targets,) if self.per_target else (), prior, prior.centre)}

    def shared_value(self, output: Tensor, extra: Extra) -> Tensor:
        """Return the parameter, which broadcasts against outputs (C, N, ..., K)."""
        value = getattr(self, self.shared)
        if value == "learned":
            return expand_to_output(torch.exp(extra[f"log_{self.shared}"]), output, self.per_target)
        return torch.as_tensor(value, dtype=output.dtype, device=output.device)

    def _target_fields(self, targets: int) -> dict[str, object]:
        return {"targets": targets}


def row_average(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return the average over rows and pixels of values (N, ..., K), (K,) in float64, weighted if rows have weights."""
    flat = values.double().reshape(len(values), -1, values.shape[-1])
    v = flat.new_ones(len(flat)) if weight is None else weight.double()
    return ((v / v.sum() / flat.shape[1]).reshape(-1, 1, 1) * flat).sum((0, 1))
