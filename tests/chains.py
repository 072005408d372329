"""Moments of many independent chains against known ones. The tolerance comes from how far the chains differ."""

import math

import torch
from scipy import stats

LEVEL = 1e-5  # chance that a right sampler fails one call


def assert_moments(draws, mean, covariance, *, precision=0.06):
    """Mean (D,) and covariance (D, D) of draws (chain, draw, D).

    Chains are independent, so the averages of each chain give the standard error of their common average by Student's t. Draws
    are whitened by what they should be, which makes errors those of the number of effective draws alone. `precision` is the
    largest standard error with which the check still means something: in units of the standard deviation for means, of
    sqrt(2) variances for second moments.
    """
    draws = draws.double()
    factor = torch.linalg.cholesky(covariance.double())
    white = torch.linalg.solve_triangular(factor, (draws - mean).flatten(0, 1).T, upper=False).T.reshape(draws.shape)
    dim = draws.shape[-1]
    first, second = torch.tril_indices(dim, dim)
    products = white[..., first] * white[..., second] - (first == second).double()
    scale = torch.where(first == second, math.sqrt(2), 1.0).double()
    assert_zero(torch.cat([white, products / scale], -1), precision=precision)


def assert_zero(values, *, precision=None):
    """Values (chain, draw, K) have mean zero, within the error that the spread of the chains' averages gives."""
    averages = values.double().mean(1)
    chains, count = averages.shape
    error = averages.std(0) / math.sqrt(chains)
    if precision is not None:
        assert float(error.max()) < precision, (
            f"too few effective draws to tell: standard error {float(error.max()):.3f}"
        )
    score = averages.mean(0).abs() / error
    limit = float(stats.t.isf(LEVEL / (2 * count), chains - 1))
    worst = int(score.argmax())
    assert float(score[worst]) < limit, (
        f"number {worst} of {count} is off by {float(averages.mean(0)[worst]):.4f}, "
        f"{float(score[worst]):.1f} standard errors where {limit:.1f} are allowed"
    )
