"""The scale on which real targets are fitted: transformed, then standardised, with the way back to their own units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.errors import InputError
from credibly.predictive.base import Predictive
from credibly.predictive.transformed import in_original_units
from credibly.predictive.transforms import Transform, candidate_transforms, fit_transform

Array = npt.NDArray[Any]

__all__ = ["TargetScale", "candidate_transforms"]


@dataclass(frozen=True)
class TargetScale:
    """z = (T(y) - mean) / std for every target, with an increasing T such as the logarithm.

    Attributes:
        mean, std: moments of the transformed training targets, one per target.
        transforms: T, one per target.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    transforms: tuple[Transform, ...]

    @classmethod
    def fit(cls, y: Array, kind: str = "none", names: Sequence[str] = ("y",)) -> TargetScale:
        """Fit to training targets, (N,) or (N, K). Raise if a target is constant or outside the domain of T.

        Args:
            y: training targets in their own units.
            kind: a transform for all of them: "none", "log", "log1p", "power" or "logit".
            names: of the targets, for errors.
        """
        columns = np.asarray(y, dtype=np.float64).reshape(len(y), -1).T
        transforms, means, stds = [], [], []
        for name, values in zip(names, columns):
            if values.min() == values.max():
                found = f"{name!r} is the same in all training rows"
                raise InputError("--target", found, "Pass more rows, or another column")
            try:
                transform = fit_transform(kind, values)
            except InputError as error:
                raise InputError(f"--{error.argument}", f"{error.found} ({name!r})", error.advice) from None
            with np.errstate(over="ignore", invalid="ignore"):
                moved = transform.forward(torch.from_numpy(values)).numpy()
                mean, std = float(moved.mean()), float(moved.std())
            if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
                found = f"{name!r} has values too large or too small to standardise"
                raise InputError("--target", found, "Rescale them")
            transforms.append(transform)
            means.append(mean)
            stds.append(std)
        return cls(tuple(means), tuple(stds), tuple(transforms))

    def standardise(self, y: Array) -> Array:
        """Return z for targets in their own units, in the shape of y."""
        if all(t.kind == "none" for t in self.transforms):
            values = np.asarray(y, dtype=np.float64)
            standardised: Array = (values - np.array(self.mean)) / np.array(self.std)
            return standardised
        return self._each(y, lambda t, values, mean, std: (t.forward(values) - mean) / std)

    def log_jacobian(self, y: Array) -> Array:
        """Return log |dz/dy| per row, (N,): log p(y) = log p(z) + log_jacobian(y), which compares across transforms."""
        found = self._each(y, lambda t, values, _, std: t.log_slope(values) - math.log(std))
        result: Array = found.reshape(len(found), -1).sum(1)
        return result

    def restore(self, predictive: Predictive) -> Predictive:
        """Return predictions of y from those of z."""
        return in_original_units(predictive, self.transforms, self.mean, self.std)

    def _each(self, y: Array, function: Any) -> Array:
        values = np.asarray(y, dtype=np.float64)
        columns = torch.from_numpy(np.ascontiguousarray(values.reshape(len(values), -1))).T
        parts = [function(*each) for each in zip(self.transforms, columns, self.mean, self.std)]
        found: Array = torch.stack(parts, 1).numpy().reshape(values.shape)
        return found
