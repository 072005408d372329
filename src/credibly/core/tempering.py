"""Temperatures of a density, and its value with its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from credibly.core.checks import check_positive
from credibly.core.plain_settings import PlainSettings


@dataclass(frozen=True)
class Tempering(PlainSettings):
    """Temperatures of likelihood and prior. A cold posterior has both below 1, likelihood tempering only the first."""

    likelihood: float = 1.0
    prior: float = 1.0

    def __post_init__(self) -> None:
        check_positive("temperature", self.likelihood)
        check_positive("temperature", self.prior)


class Evaluation(NamedTuple):
    """The tempered log density at C points, (C,), its gradient (C, D), and its untempered parts, (C,) each."""

    log_likelihood: Tensor
    log_prior: Tensor
    log_density: Tensor
    gradient: Tensor


def weighted_sum(a: Tensor, wa: float | Tensor, b: Tensor, wb: float | Tensor) -> Tensor:
    """Return wa * a + wb * b, skipping multiplications by the float 1, the most common weight."""
    return (wa * a if isinstance(wa, Tensor) or wa != 1 else a) + (wb * b if isinstance(wb, Tensor) or wb != 1 else b)
