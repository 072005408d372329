"""Chains with known autocorrelation, for tests of diagnostics."""

import numpy as np


def autoregressive(chains, draws, k, r, seed=0):
    """x_t = r x_t-1 + sqrt(1 - r^2) e_t, stationary: standard normal, autocorrelation r^t."""
    e = np.random.default_rng(seed).standard_normal((chains, draws, k))
    x = e.copy()
    for t in range(1, draws):
        x[:, t] = r * x[:, t - 1] + np.sqrt(1 - np.square(r)) * e[:, t]
    return x


def awkward(chains, draws, seed=0):
    """20 columns from well to badly mixed, with constant, tied, NaN, infinite, binary, shifted and scaled ones."""
    x = autoregressive(chains, draws, 20, np.linspace(-0.9, 0.99, 20), seed)
    where = np.arange(chains)[:, None]
    x[..., 3] = 2.5
    x[..., 4] = np.round(x[..., 4])
    x[0, 2, 5] = np.nan
    x[..., 6] += 10 * where
    x[..., 7] *= 1 + where
    x[..., 8] = x[..., 8] > 0
    x[0, 1, 9] = np.inf
    x[..., 10] += 1000
    x[..., 11] *= 1e-9
    x[:, 1::2, 12] = x[:, : draws - draws % 2 : 2, 12]  # rejections: repeated draws
    x[..., 13] = np.arange(draws)
    x[..., 14] *= 1e-17  # below the range that arviz-stats treats as constant in an ESS of the mean
    return x
