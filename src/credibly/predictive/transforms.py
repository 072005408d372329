"""Increasing transforms of a target: logarithms, powers and the logit, with their inverses and Jacobians.

The fit sees u = T(y). A density of u becomes one of y by the change of variables, log p(y) = log p(u) + log |du/dy|.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.core.checks import check_choice, is_real
from credibly.errors import InputError

Array = npt.NDArray[Any]

# The kinds that a caller may request; "power" becomes Box-Cox for positive targets and Yeo-Johnson for others.
CHOICES = ("none", "log", "log1p", "power", "logit")
KINDS = ("none", "log", "shifted_log", "box_cox", "yeo_johnson", "logit")
LARGEST = 300.0  # exponents are clipped here: squares of exp(300) still fit a float64
# Skewness from which a transform is worth a trial: an exponential variable has 2, a normal one 0.
SKEWED = 0.75
# A fitted power up to this is treated as 0, the logarithm.
SMALLEST_POWER = 0.05
# Limits of a fitted transform: this many ranges of the training targets beyond them.
FAR = 10.0


@dataclass(frozen=True)
class Transform:
    """An increasing function u = T(y).

    Attributes:
        kind: one of
            "none": y;
            "log": log y, for y > 0;
            "shifted_log": log(y + shift), for y >= 0; predictions below 0 are clipped to 0;
            "box_cox": (v^power - 1) / power with v = y / unit, for y > 0; predictions below 0 are clipped to 0;
            "yeo_johnson": its extension to v = (y - shift) / unit of either sign (Yeo & Johnson 2000);
            "logit": log(y / (1 - y)), for 0 < y < 1.
        power: from 0 to 2, for the two power transforms.
        shift, unit: as above.
        limits: values of y beyond these are clipped to the nearer one in means and variances. Otherwise a single draw
            that is far out on a logarithmic scale would determine the mean over all of them. None for no limits.
    """

    kind: str = "none"
    power: float = 1.0
    shift: float = 0.0
    unit: float = 1.0
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        if self.limits is not None:
            object.__setattr__(self, "limits", tuple(self.limits))
            if not (len(self.limits) == 2 and all(map(is_real, self.limits)) and self.limits[0] < self.limits[1]):
                raise InputError("limits", f"must be two increasing numbers, got {self.limits!r}")
        if not all(is_real(v) and math.isfinite(v) for v in (self.power, self.shift, self.unit)) or self.unit <= 0:
            raise InputError("transform", f"must have finite numbers and a positive unit, got {self}")
        least = SMALLEST_POWER if self.kind == "box_cox" else 0.0
        if not least <= self.power <= 2:
            raise InputError("power", f"must be from {least:g} to 2, got {self.power!r}")

    @property
    def growth(self) -> float:
        """The power of u with which |y| grows at most: infinite for exponentials, 0 for a bounded y."""
        if self.kind in ("log", "shifted_log"):
            return math.inf
        if self.kind == "box_cox":
            return 1 / self.power
        if self.kind == "yeo_johnson":
            return math.inf if self.power in (0, 2) else max(1 / self.power, 1 / (2 - self.power))
        return 0.0 if self.kind == "logit" else 1.0

    def forward(self, y: Tensor) -> Tensor:
        """Return u; -inf below the domain of T, inf above it."""
        if self.kind in ("log", "shifted_log"):
            inside = y > 0 if self.kind == "log" else y >= 0
            return torch.where(inside, torch.log(torch.where(inside, y + self.shift, 1.0)), -math.inf)
        if self.kind == "box_cox":
            v = (y / self.unit).clamp_min(0)
            return torch.where(y >= 0, (v**self.power - 1) / self.power, -math.inf)
        if self.kind == "yeo_johnson":
            v = (y - self.shift) / self.unit
            above = _power(torch.log1p(v.clamp_min(0)), self.power)
            return torch.where(v >= 0, above, -_power(torch.log1p(-v.clamp_max(0)), 2 - self.power))
        if self.kind == "logit":
            return torch.logit(y.clamp(0, 1))
        return y

    def inverse(self, u: Tensor) -> Tensor:
        """Return y."""
        if self.kind in ("log", "shifted_log"):
            y = torch.exp(u.clamp_max(LARGEST)) - self.shift
            return y.clamp_min(0) if self.kind == "shifted_log" else y
        if self.kind == "box_cox":
            return self.unit * (self.power * u + 1).clamp_min(0) ** (1 / self.power)
        if self.kind == "yeo_johnson":
            above = torch.expm1(_inverse_power(u.clamp_min(0), self.power).clamp_max(LARGEST))
            below = torch.expm1(_inverse_power(-u.clamp_max(0), 2 - self.power).clamp_max(LARGEST))
            return self.shift + self.unit * torch.where(u >= 0, above, -below)
        return torch.sigmoid(u) if self.kind == "logit" else u

    def within(self, y: Tensor) -> Tensor:
        """Return y, or the nearer limit beyond the limits."""
        return y if self.limits is None else y.clamp(*self.limits)

    def log_slope(self, y: Tensor) -> Tensor:
        """Return log |du/dy|; -inf outside the domain, where the density is 0."""
        if self.kind in ("log", "shifted_log"):
            inside = y > 0 if self.kind == "log" else y >= 0
            return torch.where(inside, -torch.log(torch.where(inside, y + self.shift, 1.0)), -math.inf)
        if self.kind == "box_cox":
            slope = (self.power - 1) * torch.log(torch.where(y > 0, y / self.unit, 1.0)) - math.log(self.unit)
            return torch.where(y > 0, slope, -math.inf)
        if self.kind == "yeo_johnson":
            v = (y - self.shift) / self.unit
            return (self.power - 1) * torch.sign(v) * torch.log1p(v.abs()) - math.log(self.unit)
        if self.kind == "logit":
            inside = (y > 0) & (y < 1)
            p = torch.where(inside, y, 0.5)
            return torch.where(inside, -torch.log(p) - torch.log1p(-p), -math.inf)
        return torch.zeros_like(y)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def fit_transform(kind: str, y: Array) -> Transform:
    """Return a transform fitted to the training targets (N,). Raise if they lie outside its domain.

    Its limits are ten times the range of the targets beyond the smallest and the largest of them.

    Args:
        kind: "none"; "log"; "log1p", a logarithm shifted by the 5 % quantile of the positive targets; "power", which
            maximises the likelihood of normal noise over the powers from 0 to 2; or "logit".
        y: training targets.
    """
    check_choice("transform", kind, CHOICES)
    y = np.asarray(y, dtype=np.float64)
    made = _fitted(kind, y)
    low, high = float(y.min()), float(y.max())
    if made.kind == "none" or not low < high:
        return made
    return replace(made, limits=(low - FAR * (high - low), high + FAR * (high - low)))


def _fitted(kind: str, y: Array) -> Transform:
    low, high = float(y.min()), float(y.max())
    if kind == "log":
        if low <= 0:
            raise InputError(
                "transform", f'"log" needs positive targets, the smallest is {low:g}', "Use log1p or power"
            )
        return Transform("log")
    if kind == "log1p":
        if low < 0 or high <= 0:
            raise InputError("transform", f'"log1p" needs targets of at least 0, the smallest is {low:g}', "Use power")
        return Transform("shifted_log", shift=float(np.quantile(y[y > 0], 0.05)))
    if kind == "logit":
        if low <= 0 or high >= 1:
            found = f'"logit" needs targets strictly between 0 and 1, they are from {low:g} to {high:g}'
            raise InputError("transform", found, "Use the task proportion, which allows 0 and 1")
        return Transform("logit")
    return _fit_power(y) if kind == "power" else Transform()


def candidate_transforms(y: Array) -> tuple[str, ...]:
    """Return the transforms worth a trial for training targets (N,), "none" first.

    Skewed targets: "power", and "log" if all are positive or "log1p" if some are 0. Proportions strictly between 0 and
    1: "logit".
    """
    y = np.asarray(y, dtype=np.float64)
    low, high, std = float(y.min()), float(y.max()), float(y.std())
    found = ["none"]
    if len(y) < 3 or not std > 0 or not math.isfinite(std):
        return tuple(found)
    skewness = float(np.mean(((y - y.mean()) / std) ** 3))
    if skewness > SKEWED and low >= 0:
        found.append("log" if low > 0 else "log1p")
    if abs(skewness) > SKEWED:
        found.append("power")
    if low > 0 and high < 1:
        found.append("logit")
    return tuple(found)


def _fit_power(y: Array) -> Transform:
    from scipy.stats import boxcox_llf, yeojohnson_llf

    powers = np.linspace(0, 2, 41)
    if float(y.min()) > 0:
        unit = float(np.exp(np.log(y).mean()))
        best = float(powers[int(np.argmax([boxcox_llf(p, y / unit) for p in powers]))])
        return Transform("log") if best <= SMALLEST_POWER else Transform("box_cox", power=best, unit=unit)
    shift, unit = float(np.median(y)), float(y.std()) or 1.0
    best = float(powers[int(np.argmax([yeojohnson_llf(p, (y - shift) / unit) for p in powers]))])
    return Transform("yeo_johnson", power=best, shift=shift, unit=unit)


def _power(log: Tensor, power: float) -> Tensor:
    """Return (exp(log)^power - 1) / power, or its limit at power 0."""
    return torch.expm1(power * log) / power if power > 0 else log


def _inverse_power(u: Tensor, power: float) -> Tensor:
    return torch.log1p(power * u) / power if power > 0 else u
