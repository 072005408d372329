"""Tail probabilities against brute force, and the range within chance against their definition."""

import numpy as np
import pytest

from credibly.report.significance import CHANCE, binomial_range, binomial_tails, sum_tails


def masses(chances):
    """Return the distribution of a sum of independent 0/1 variables, by adding one after the other."""
    found = np.ones(1)
    for p in chances:
        found = np.convolve(found, [1 - p, p])
    return found


@pytest.mark.parametrize(
    "rows, low, high", [(1, 0.3, 0.3), (40, 0.0, 1.0), (900, 0.97, 1.0), (700, 0.0, 0.02), (1500, 0.1, 0.6)]
)
def test_sums_of_unequal_probabilities(rows, low, high):
    """Exact below a variance of 100, and above it to 2 % of a tail of one in 200."""
    chances = np.random.default_rng(rows).uniform(low, high, size=rows)
    exact = masses(chances)
    large = float((chances * (1 - chances)).sum()) >= 100
    for count in {0, round(chances.sum()), rows, *(int(np.searchsorted(exact.cumsum(), q)) for q in (0.005, 0.995))}:
        lower, upper = exact[: count + 1].sum(), exact[count:].sum()
        for mine, true in zip(sum_tails(count, chances), (lower, upper)):
            assert mine == pytest.approx(true, rel=0.02 if large else 1e-6, abs=1e-5 if large else 1e-10)


def test_equal_probabilities_are_binomial():
    for count in (0, 30, 33, 40):
        assert sum_tails(count, np.full(40, 0.8)) == pytest.approx(binomial_tails(count, 40, 0.8), abs=1e-12)


@pytest.mark.parametrize("n", [1, 10, 88, 154, 5000])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_the_range_within_chance(n, level):
    low, high = binomial_range(level, n)
    for count in range(n + 1):
        inside = all(tail > CHANCE for tail in binomial_tails(count, n, level))
        assert inside == (low - 1e-12 <= count / n <= high + 1e-12)


def test_coverage_of_088_on_154_rows_is_within_chance():
    low, high = binomial_range(0.9, 154)
    assert low < 0.88 < high
