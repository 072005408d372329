"""Toys with a known truth: the pictures in which point estimates and Bayes part ways."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.core.rng import check_seed
from credibly.data.sets import Array, Task, float32
from credibly.errors import InputError


@dataclass(frozen=True, eq=False)
class Toy:
    """A small made-up problem with its truth.

    Attributes:
        x: inputs, (N, P) float32.
        y: regression: (N, 1) float32. Binary: labels, (N,) int64.
        grid: inputs to draw predictions at, (G, P); it reaches beyond the data on every side.
        truth: at the grid, (G, 1): the noise-free function, or the probability of label 1.
        noise: the deviation of the noise where it is the same everywhere, otherwise None.
        noise_grid: the deviation of the noise at the grid, (G, 1); None for labels.
        gap: the interval of x without data, where there is one.
        star: a far-away input, (1, P), where there is one.
        grid_shape: the shape of the grid before it was flattened, such as (61, 101); for contour plots.
    """

    name: str
    task: Task
    x: Tensor
    y: Tensor
    grid: Tensor
    truth: Tensor
    noise: float | None
    description: str
    noise_grid: Tensor | None = None
    gap: tuple[float, float] | None = None
    star: Tensor | None = None
    grid_shape: tuple[int, ...] = ()


# Real data inside scikit-learn


def gap_regression(n: int = 80, *, noise: float = 0.1, seed: int = 0) -> Toy:
    """One input, a wave, and no data in the middle: half of the points on each side of the gap (-0.7, 0.7)."""
    rng_x, rng_noise = _streams(seed, n, 2)
    x = np.where(np.arange(n) % 2 == 0, -1.0, 1.0) * rng_x.uniform(0.7, 2.0, n)
    about = "A wave seen on both sides of a gap. A band of uncertainty should widen in the gap and beyond the data."
    return _wave_toy("gap_regression", about, x, rng_noise, _check_noise(noise), gap=(-0.7, 0.7))


def sharpening_regression(n: int = 10, *, noise: float = 0.2, seed: int = 0) -> Toy:
    """One input, a wave; the first n points of one sequence, so that the sets for n = 2, 10, 100, 1000 are nested."""
    rng_x, rng_noise = _streams(seed, n, 1)
    about = "A wave seen at more and more points. The posterior should sharpen towards one function."
    return _wave_toy("sharpening_regression", about, rng_x.uniform(-2.0, 2.0, n), rng_noise, _check_noise(noise))


def heteroscedastic_regression(n: int = 200, *, seed: int = 0) -> Toy:
    """One input, a wave; the noise grows with x, from a deviation of 0.05 at x = -2 to one of 0.5 at x = 2."""
    rng_x, rng_noise = _streams(seed, n, 1)
    about = "A wave whose noise grows with x. Aleatoric uncertainty should grow alike."
    return _wave_toy("heteroscedastic_regression", about, rng_x.uniform(-2.0, 2.0, n), rng_noise, None)


def star_classification(n: int = 20, *, seed: int = 0) -> Toy:
    """Two inputs, two clusters left and right, and a star far above, on the right of the line between them.

    The left cluster is the mirror image of the right one, so the best straight boundary is the line x1 = 0 whatever the
    seed, and the star lies well on the side of label 1. Logistic regression with prior N(0, 1) gives label 1 about 0.97
    there by MAP and 0.65 by Bayes: few points leave the slope of the boundary open, and far out a small turn matters.
    """
    rng, _ = _streams(seed, n, 2)
    if n % 2:
        raise InputError("n", f"found {n}, which is odd", "Pass an even number: the clusters have the same size")
    centre, spread = np.array([1.5, 0.0]), 0.8
    right = centre + spread * rng.standard_normal((n // 2, 2))
    x = np.stack([right * [-1.0, 1.0], right], axis=1).reshape(n, 2)  # labels alternate: 0, 1, 0, 1, ...
    axes = np.meshgrid(np.linspace(-6.0, 6.0, 61), np.linspace(-5.0, 15.0, 101), indexing="ij")
    grid = np.stack([a.ravel() for a in axes], axis=1)
    truth = 1 / (1 + np.exp(-2 * centre[0] * grid[:, :1] / spread**2))
    about = "Two clusters and a far-away star. A point estimate is certain there; Bayes should be near 0.6 to 0.4."
    extra: dict[str, Any] = {"star": torch.tensor([[2.0, 12.0]]), "grid_shape": axes[0].shape}
    x_, grid_, truth_ = (float32(a) for a in (x, grid, truth))
    return Toy("star_classification", "binary", x_, torch.arange(n) % 2, grid_, truth_, None, about, **extra)


def _wave_toy(
    name: str,
    about: str,
    x: Array,
    rng: np.random.Generator,
    noise: float | None,
    gap: tuple[float, float] | None = None,
) -> Toy:
    """The wave at x (N,) with noise of one deviation, or with growing noise for None, and a grid from -3.5 to 3.5."""
    grid = np.linspace(-3.5, 3.5, 281)
    wave, wave_grid = (np.sin(2 * at) + 0.3 * at for at in (x, grid))
    scale, scale_grid = (0.05 * 10 ** ((at + 2) / 4) if noise is None else np.full_like(at, noise) for at in (x, grid))
    y = wave + scale * rng.standard_normal(len(x))
    x_, y_, grid_, truth, deviation = (float32(a[:, None]) for a in (x, y, grid, wave_grid, scale_grid))
    return Toy(name, "regression", x_, y_, grid_, truth, noise, about, deviation, gap, grid_shape=grid.shape)


def _streams(seed: int, n: int, least: int) -> tuple[np.random.Generator, np.random.Generator]:
    """A stream for places and one for noise, after a look at n."""
    if isinstance(n, bool) or not isinstance(n, int) or n < least:
        raise InputError("n", f"found {n!r}", f"Pass an integer from {least} up")
    # Numpy's streams and one each: then a longer draw begins with the shorter one, which torch does not promise.
    return np.random.default_rng([check_seed(seed), 0]), np.random.default_rng([seed, 1])


def _check_noise(noise: float) -> float:
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not (math.isfinite(noise) and noise > 0):
        raise InputError("noise", f"found {noise!r}", "Pass the deviation of the noise, a positive number")
    return float(noise)


# The UCI benchmark, from a folder
