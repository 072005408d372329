"""Tests behind the findings: tail probabilities, and the level that keeps all of them together at 5 %.

A fit is checked in several ways. Each check warns only at a probability below CHANCE, the Bonferroni level for
FAMILY, so that predictions which are calibrated get a warning from any of them in at most 1 of 20 fits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

# Probability that calibrated predictions get a warning from any check.
FAMILY = 0.05
# Checks of a fit that chance alone can fail: intervals at four levels, bias, outliers, noise, order of the errors.
CHECKS = 8
CHANCE = FAMILY / CHECKS
# Probability from which a check may call predictions unusable, if the effect is large as well.
SEVERE = 1e-4
# Above this variance a sum of independent 0/1 variables is approximated by a normal with an Edgeworth correction.
LARGE_VARIANCE = 100.0
# Counts around the mean for which the distribution of smaller sums is computed: 25 standard deviations either way.
WINDOW = 512


def binomial_tails(count: int, n: int, chance: float) -> tuple[float, float]:
    """Return P(K <= count) and P(K >= count) of K ~ Binomial(n, chance)."""
    from scipy.stats import binom

    return float(binom.cdf(count, n, chance)), float(binom.sf(count - 1, n, chance))


def binomial_range(chance: float, n: int, tail: float = CHANCE) -> tuple[float, float]:
    """Return the fractions (low, high) of n trials such that fewer or more have a probability of at most `tail` each.

    A count k is inside exactly if both P(K <= k) and P(K >= k) exceed `tail`.
    """
    from scipy.stats import binom

    low, high = int(binom.ppf(tail, n, chance)), int(binom.isf(tail, n, chance))
    # ppf and isf may stop one short where a tail equals the limit up to rounding.
    while binom.cdf(low, n, chance) <= tail:
        low += 1
    while high > 0 and binom.sf(high - 1, n, chance) <= tail:
        high -= 1
    return low / n, high / n


def sum_tails(count: int, chances: npt.NDArray[Any]) -> tuple[float, float]:
    """Return P(K <= count) and P(K >= count) of a sum K of independent 0/1 variables with these probabilities."""
    p = np.clip(np.asarray(chances, dtype=np.float64), 0, 1)
    mean, variance = float(p.sum()), float((p * (1 - p)).sum())
    if variance >= LARGE_VARIANCE:
        skewness = float((p * (1 - p) * (1 - 2 * p)).sum()) / variance**1.5
        std = math.sqrt(variance)
        return _edgeworth((count + 0.5 - mean) / std, skewness), _edgeworth((mean - count + 0.5) / std, -skewness)
    start = max(0, round(mean) - WINDOW // 2)
    if not start <= count < start + WINDOW:
        return (0.0, 1.0) if count < mean else (1.0, 0.0)
    # The probabilities are the inverse Fourier transform of the characteristic function, a product over the rows.
    wave = np.exp(2j * np.pi * np.arange(WINDOW) / WINDOW) - 1
    product = np.ones(WINDOW, dtype=np.complex128)
    for part in np.array_split(p, math.ceil(len(p) / 4096)):
        product *= np.prod(1 + part[:, None] * wave, axis=0)
    mass = np.fft.fft(product).real / WINDOW
    counts = start + np.arange(WINDOW)
    ordered = np.clip(mass[counts % WINDOW], 0, None)
    return min(float(ordered[counts <= count].sum()), 1.0), min(float(ordered[counts >= count].sum()), 1.0)


def _edgeworth(z: float, skewness: float) -> float:
    """Return P(Z <= z) of a standardised variable with a small skewness."""
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    value = 0.5 * math.erfc(-z / math.sqrt(2)) - skewness / 6 * (z * z - 1) * density
    return min(max(value, 0.0), 1.0)
