"""Toy problems with a known truth, on which point estimates and Bayesian predictions differ visibly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.core.checks import check_integer, check_positive
from credibly.core.rng import check_seed
from credibly.data.sets import Array, Task, float32
from credibly.errors import InputError


@dataclass(frozen=True, eq=False)
class Toy:
    """A small synthetic problem with its truth.

    Attributes:
        x: inputs, (N, P) float32.
        y: regression: (N, 1) float32. Binary: labels, (N,) int64.
        grid: inputs to plot predictions at, (G, P); it extends beyond the data on every side.
        truth: at the grid, (G, 1): the noise-free function, or the probability of label 1.
        noise: the standard deviation of homoscedastic noise, otherwise None.
        noise_grid: the standard deviation of the noise at the grid, (G, 1); None for labels.
        gap: the interval of x without data, if there is one.
        star: a far-away input, (1, P), if there is one.
        grid_shape: the shape of the grid before flattening, such as (61, 101), for contour plots.
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


def gap_regression(n: int = 80, *, noise: float = 0.1, seed: int = 0) -> Toy:
    """Return a noisy wave of one input with half of the points on each side of the gap (-0.7, 0.7)."""
    rng_x, rng_noise = _streams(seed, n, 2)
    x = np.where(np.arange(n) % 2 == 0, -1.0, 1.0) * rng_x.uniform(0.7, 2.0, n)
    about = "A wave observed on both sides of a gap. Uncertainty should widen in the gap and beyond the data."
    return _wave_toy("gap_regression", about, x, rng_noise, _check_noise(noise), gap=(-0.7, 0.7))


def sharpening_regression(n: int = 10, *, noise: float = 0.2, seed: int = 0) -> Toy:
    """Return a noisy wave of one input at the first n points of one sequence: sets of different n are nested."""
    rng_x, rng_noise = _streams(seed, n, 1)
    about = "A wave observed at more and more points. The posterior should concentrate on one function."
    return _wave_toy("sharpening_regression", about, rng_x.uniform(-2.0, 2.0, n), rng_noise, _check_noise(noise))


def heteroscedastic_regression(n: int = 200, *, seed: int = 0) -> Toy:
    """Return a wave of one input whose noise grows from a standard deviation of 0.05 at x = -2 to 0.5 at x = 2."""
    rng_x, rng_noise = _streams(seed, n, 1)
    about = "A wave whose noise grows with x. Aleatoric uncertainty should grow likewise."
    return _wave_toy("heteroscedastic_regression", about, rng_x.uniform(-2.0, 2.0, n), rng_noise, None)


def star_classification(n: int = 20, *, seed: int = 0) -> Toy:
    """Return two clusters of two inputs, left and right, and a star far above and right of the boundary.

    The left cluster mirrors the right one, so the best linear boundary is x1 = 0 for every seed, and the star lies well
    on the side of label 1. Logistic regression with prior N(0, 1) gives label 1 there a probability of about 0.97 by
    MAP and 0.65 by Bayes: few points leave the slope of the boundary uncertain, and far out a small rotation matters.
    """
    rng, _ = _streams(seed, n, 2)
    if n % 2:
        raise InputError("n", f"must be even, got {n}", "The clusters have the same size")
    centre, std = np.array([1.5, 0.0]), 0.8
    right = centre + std * rng.standard_normal((n // 2, 2))
    x = np.stack([right * [-1.0, 1.0], right], axis=1).reshape(n, 2)  # labels alternate: 0, 1, 0, 1, ...
    axes = np.meshgrid(np.linspace(-6.0, 6.0, 61), np.linspace(-5.0, 15.0, 101), indexing="ij")
    grid = np.stack([a.ravel() for a in axes], axis=1)
    truth = 1 / (1 + np.exp(-2 * centre[0] * grid[:, :1] / std**2))
    about = "Two clusters and a far-away star. A point estimate is confident there; Bayes should be near 0.6 to 0.4."
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
    """Return the wave at x (N,) with homoscedastic noise, or growing noise for None, and a grid from -3.5 to 3.5."""
    grid = np.linspace(-3.5, 3.5, 281)
    wave, wave_grid = (np.sin(2 * at) + 0.3 * at for at in (x, grid))
    scale, scale_grid = (0.05 * 10 ** ((at + 2) / 4) if noise is None else np.full_like(at, noise) for at in (x, grid))
    y = wave + scale * rng.standard_normal(len(x))
    x_, y_, grid_, truth, noise_grid = (float32(a[:, None]) for a in (x, y, grid, wave_grid, scale_grid))
    return Toy(name, "regression", x_, y_, grid_, truth, noise, about, noise_grid, gap, grid_shape=grid.shape)


def _streams(seed: int, n: int, least: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Check n. Return one random stream for inputs and one for noise."""
    check_integer("n", n, least=least)
    # Separate numpy streams: a longer draw then begins with the shorter one, which torch does not guarantee.
    return np.random.default_rng([check_seed(seed), 0]), np.random.default_rng([seed, 1])


def _check_noise(noise: float) -> float:
    check_positive("noise", noise)
    return float(noise)
