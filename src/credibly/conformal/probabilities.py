"""Recalibrated probabilities: temperature scaling and isotonic regression, fitted to calibration rows.

    temperature     p'_c ~ p_c^(1/T), with the T that maximises the likelihood of the labels (Guo et al. 2017)
    isotonic        p' = m(p), with m the increasing function closest to the labels (Zadrozny and Elkan 2002)

For two classes m maps the probability of the second one. For more, each class has its own one-versus-rest map,
and the results are normalised. Unlike prediction sets, recalibrated probabilities carry no guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.core.checks import check_choice

MAPS = ("temperature", "isotonic")
# Log probabilities are kept above this one, so that a label of probability 0 has a finite gradient.
LEAST_LOG = -700.0
# Temperatures searched: from sharpening all probabilities to 0 and 1 to making them equal.
TEMPERATURES = (1e-3, 1e3)
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ProbabilityMap:
    """A map from the model's probabilities to recalibrated ones.

    Attributes:
        kind: "temperature" or "isotonic".
        temperature: T; above 1 the model was overconfident.
        knots: isotonic maps, one per class (a single one for two classes): increasing probabilities.
        values: the map at the knots, linear between them and constant outside.
    """

    kind: str
    temperature: float = 1.0
    knots: tuple[tuple[float, ...], ...] = ()
    values: tuple[tuple[float, ...], ...] = ()

    def __call__(self, probabilities: Tensor) -> Tensor:
        """Return recalibrated probabilities (..., K) of the same dtype."""
        p = probabilities.double()
        if self.kind == "temperature":
            result = torch.softmax(_logs(p) / self.temperature, -1)
        elif p.shape[-1] == 2:
            second = self._mapped(p[..., 1], 0)
            result = torch.stack([1 - second, second], -1)
        else:
            parts = torch.stack([self._mapped(p[..., c], c) for c in range(p.shape[-1])], -1)
            result = parts / parts.sum(-1, keepdim=True)
        return result.to(probabilities.dtype)

    def _mapped(self, p: Tensor, which: int) -> Tensor:
        found = np.interp(p.cpu().numpy(), self.knots[which], self.values[which])
        return torch.from_numpy(np.asarray(found)).to(p.device)

    def to_dict(self) -> dict[str, Any]:
        """Return the map as plain JSON values."""
        knots, values = ([list(part) for part in parts] for parts in (self.knots, self.values))
        return {"kind": self.kind, "temperature": self.temperature, "knots": knots, "values": values}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> ProbabilityMap:
        """Restore a map from the result of `to_dict`."""
        check_choice("kind", stored["kind"], MAPS)
        knots, values = (tuple(tuple(float(v) for v in part) for part in stored[key]) for key in ("knots", "values"))
        return cls(stored["kind"], float(stored["temperature"]), knots, values)


def fit_probabilities(kind: str, probabilities: Tensor, labels: Tensor) -> ProbabilityMap:
    """Fit a map to the probabilities (..., K) and labels (...) of calibration rows; one for all targets and pixels."""
    check_choice("probabilities", kind, MAPS)
    p = probabilities.double().cpu().reshape(-1, probabilities.shape[-1])
    y = labels.cpu().long().reshape(-1)
    if kind == "temperature":
        return ProbabilityMap(kind, _best_temperature(_logs(p), y))
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    fits = [isotonic(p[:, c].numpy(), (y == c).double().numpy()) for c in classes]
    return ProbabilityMap(
        kind, 1.0, tuple(tuple(k.tolist()) for k, _ in fits), tuple(tuple(v.tolist()) for _, v in fits)
    )


def isotonic(p: Array, hits: Array) -> tuple[Array, Array]:
    """Return the knots and values of the increasing function of p closest to `hits`, by pooling adjacent violators.

    Values are kept at least 1 / (n + 2) from 0 and 1 with n rows, as in Laplace's rule of succession: a label that was
    never seen at some probability is not impossible there.
    """
    points, place = np.unique(p, return_inverse=True)
    counts = np.bincount(place).astype(np.float64)
    sums = np.bincount(place, weights=hits)
    # Blocks of points that share a value: [sum, count, number of points].
    blocks: list[tuple[float, float, int]] = []
    for total, count in zip(sums.tolist(), counts.tolist()):
        block = (total, count, 1)
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    values = np.repeat([total / count for total, count, _ in blocks], [size for *_, size in blocks])
    margin = 1 / (len(p) + 2)
    # Only the ends of a block matter for interpolation.
    ends = np.cumsum([size for *_, size in blocks])
    kept = np.unique(np.concatenate([ends - 1, ends - [size for *_, size in blocks]]))
    return points[kept], np.clip(values[kept], margin, 1 - margin)


def _best_temperature(logs: Tensor, labels: Tensor) -> float:
    """Return the T of the highest likelihood. The negative log likelihood is convex in 1/T: bisect its slope."""
    own = logs.gather(1, labels.unsqueeze(1))[:, 0]

    def slope(inverse: float) -> float:
        return float(((torch.softmax(logs * inverse, 1) * logs).sum(1) - own).mean())

    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return float(1 / (low * high) ** 0.5)


def _logs(p: Tensor) -> Tensor:
    return p.log().clamp_min(LEAST_LOG)
