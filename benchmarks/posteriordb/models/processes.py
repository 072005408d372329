"""Gaussian processes: regression, Poisson regression, and a heteroscedastic one by basis functions."""

from __future__ import annotations

import numpy as np

from benchmarks.posteriordb.models.base import (
    Array,
    Arrays,
    Builder,
    Data,
    Model,
    indexed,
    join,
    normal,
    student,
)


def _covariance(xp: Arrays, gap: Array, rho: Array, alpha: Array) -> Array:
    """Return alpha^2 exp(-gap / (2 rho^2)), (..., N, N)."""
    rho, alpha = rho[..., None, None], alpha[..., None, None]
    return xp.square(alpha) * xp.exp(-0.5 * gap / xp.square(rho))


def _prior(xp: Arrays, w: Array, rho: Array, alpha: Array) -> Array:
    """rho ~ Gamma(25, 4), alpha ~ half-N(0, 2^2), with the Jacobian of both logarithms."""
    return 25 * w[..., 0] - 4 * rho - 0.125 * xp.square(alpha) + w[..., 1]


def gp_regr(xp: Arrays, data: Data) -> Model:
    """y ~ N(0, K + sigma I): log rho, log alpha, log sigma."""
    x, y = data["x"].astype(float), xp.array(data["y"])
    gap, eye = xp.array((x[:, None] - x) ** 2), xp.array(np.eye(len(x)))

    def log_prob(w: Array) -> Array:
        found = xp.exp(w)
        rho, alpha, sigma = (found[..., i] for i in range(3))
        factor = xp.cholesky(_covariance(xp, gap, rho, alpha) + sigma[..., None, None] * eye)
        white = xp.solve_lower(factor, 0.0 * found[..., :1] + y)
        log_det = xp.log((factor * eye).sum(-1)).sum(-1)
        fit = -0.5 * xp.square(white).sum(-1) - log_det
        return fit + _prior(xp, w, rho, alpha) - 0.5 * xp.square(sigma) + w[..., 2]

    return Model(3, log_prob, xp.exp, ("rho", "alpha", "sigma"))


def gp_pois_regr(xp: Arrays, data: Data) -> Model:
    """k ~ Poisson(exp f), f = L z with z ~ N(0, 1) and L the factor of K + 1e-10 I: log rho, log alpha, z (11)."""
    x, k = data["x"].astype(float), xp.array(data["k"])
    gap, jitter = xp.array((x[:, None] - x) ** 2), xp.array(1e-10 * np.eye(len(x)))

    def latent(w: Array) -> Array:
        factor = xp.cholesky(_covariance(xp, gap, xp.exp(w[..., 0]), xp.exp(w[..., 1])) + jitter)
        return (factor @ w[..., 2:, None])[..., 0]

    def log_prob(w: Array) -> Array:
        f = latent(w)
        fit = (k * f - xp.exp(f)).sum(-1) - 0.5 * xp.square(w[..., 2:]).sum(-1)
        return fit + _prior(xp, w, xp.exp(w[..., 0]), xp.exp(w[..., 1]))

    names = ("rho", "alpha", *indexed("f", len(x)))
    return Model(len(x) + 2, log_prob, lambda w: join(xp, xp.exp(w[..., :2]), latent(w)), names)


def accel_gp(xp: Arrays, data: Data) -> Model:
    """Head acceleration in a crash: mean and log noise are Gaussian processes of 40 and 20 basis functions (brms).

    Unconstrained, for the mean and then for the log noise: intercept, log standard deviation, log length scale, z.
    """
    y = xp.array(data["Y"])
    parts = []
    for suffix in ("", "_sigma"):
        basis, root = data[f"Xgp{suffix}_1"], data[f"slambda{suffix}_1"][:, 0]
        parts.append((xp.array(basis.T), xp.array(root**2)))
    first = 3 + len(parts[0][1])

    def line(w: Array, basis: Array, eigenvalue: Array) -> Array:
        width, scale = w[..., 1:2], w[..., 2:3]
        spectrum = xp.exp(width + 0.5 * scale - 0.25 * xp.exp(2 * scale) * eigenvalue) * (2 * np.pi) ** 0.25
        return w[..., :1] + (spectrum * w[..., 3:]) @ basis

    def prior(w: Array, intercept: tuple[float, float]) -> Array:
        width, scale = xp.exp(w[..., 1]), xp.exp(w[..., 2])
        total = student(xp, w[..., 0], 3, *intercept) + student(xp, width, 3, 0, 36) + w[..., 1]
        # The length scale is InvGamma(1.124909, 0.0177).
        total = total - 1.124909 * w[..., 2] - 0.0177 / scale
        return total - 0.5 * xp.square(w[..., 3:]).sum(-1)

    def log_prob(w: Array) -> Array:
        of_mean, of_noise = w[..., :first], w[..., first:]
        mean, log_noise = line(of_mean, *parts[0]), line(of_noise, *parts[1])
        fit = normal(xp, y, mean, xp.exp(log_noise)).sum(-1)
        return fit + prior(of_mean, (-13, 36)) + prior(of_noise, (0, 10))

    def constrain(w: Array) -> Array:
        halves = (w[..., :first], w[..., first:])
        return join(xp, *(join(xp, h[..., :1], xp.exp(h[..., 1:3]), h[..., 3:]) for h in halves))

    names = tuple(
        name
        for s, (_, values) in zip(("", "_sigma"), parts)
        for name in (f"Intercept{s}", f"sdgp{s}_1", f"lscale{s}_1", *indexed(f"zgp{s}_1", len(values)))
    )
    return Model(len(names), log_prob, constrain, names)


PROCESSES: dict[str, Builder] = {
    "gp_pois_regr-gp_regr": gp_regr,
    "gp_pois_regr-gp_pois_regr": gp_pois_regr,
    "mcycle_gp-accel_gp": accel_gp,
}
