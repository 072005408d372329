"""Time series: an autoregression, ARMA(1, 1), GARCH(1, 1).

The recurrences of the last two have a constant factor and are computed by doubling, in log2 T operations on the whole
series instead of T operations on single values.
"""

from __future__ import annotations

import numpy as np

from benchmarks.posteriordb.models.base import (
    Array,
    Arrays,
    Builder,
    Data,
    Model,
    cauchy,
    fraction,
    indexed,
    join,
    log_fraction,
    normal,
)


def recurrence(xp: Arrays, inputs: Array, factor: Array) -> Array:
    """Return x_t = inputs_t + factor x_(t-1), (..., T), with x before the first input 0 and a factor (...)."""
    power, shift = factor[..., None], 1
    while shift < inputs.shape[-1]:
        later = inputs[..., shift:] + power * inputs[..., :-shift]
        inputs, power, shift = join(xp, inputs[..., :shift], later), power * power, 2 * shift
    return inputs


def autoregression(xp: Arrays, data: Data) -> Model:
    """y_t ~ N(alpha + sum_k beta_k y_(t-k), sigma^2): alpha, beta (5), log sigma."""
    order, y = int(data["K"]), data["y"]
    past = [y[order - k : len(y) - k] for k in range(1, order + 1)]
    rows, now = xp.array(np.stack([np.ones(len(y) - order), *past])), xp.array(y[order:])

    def log_prob(w: Array) -> Array:
        sigma = xp.exp(w[..., -1:])
        fit = normal(xp, now, w[..., :-1] @ rows, sigma).sum(-1)
        return fit + normal(xp, w[..., :-1], 0.0, 10.0).sum(-1) + cauchy(xp, sigma[..., 0], 2.5) + w[..., -1]

    names = ("alpha", *indexed("beta", order), "sigma")
    return Model(order + 2, log_prob, lambda w: join(xp, w[..., :-1], xp.exp(w[..., -1:])), names)


def arma11(xp: Arrays, data: Data) -> Model:
    """e_t = y_t - mu - phi y_(t-1) - theta e_(t-1) ~ N(0, sigma^2), with y_0 = mu and e_0 = 0; log sigma."""
    y = xp.array(data["y"])

    def log_prob(w: Array) -> Array:
        mu, phi, theta, log_sigma = (w[..., i : i + 1] for i in range(4))
        inputs = join(xp, y[:1] - mu - phi * mu, y[1:] - mu - phi * y[:-1])
        error = recurrence(xp, inputs, -theta[..., 0])
        fit = normal(xp, error, 0.0, xp.exp(log_sigma)).sum(-1)
        prior = normal(xp, mu, 0.0, 10.0) + normal(xp, phi, 0.0, 2.0) + normal(xp, theta, 0.0, 2.0)
        return fit + (prior + cauchy(xp, xp.exp(log_sigma), 2.5) + log_sigma).sum(-1)

    names = ("mu", "phi", "theta", "sigma")
    return Model(4, log_prob, lambda w: join(xp, w[..., :3], xp.exp(w[..., 3:])), names)


def garch11(xp: Arrays, data: Data) -> Model:
    """y_t ~ N(mu, s_t), s_t = alpha0 + alpha1 (y_(t-1) - mu)^2 + beta1 s_(t-1), flat priors.

    Unconstrained: mu, log alpha0, logit alpha1, logit of beta1 / (1 - alpha1).
    """
    y, first = xp.array(data["y"]), float(data["sigma1"]) ** 2

    def constrain(w: Array) -> Array:
        alpha1 = fraction(xp, w[..., 2:3])
        return join(xp, w[..., :1], xp.exp(w[..., 1:2]), alpha1, (1 - alpha1) * fraction(xp, w[..., 3:]))

    def log_prob(w: Array) -> Array:
        found = constrain(w)
        mu, alpha0, alpha1 = (found[..., i : i + 1] for i in range(3))
        inputs = alpha0 + alpha1 * xp.square(y[:-1] - mu)
        variance = recurrence(xp, join(xp, 0.0 * mu + first, inputs), found[..., 3])
        fit = (-0.5 * xp.square(y - mu) / variance - 0.5 * xp.log(variance)).sum(-1)
        return fit + w[..., 1] + log_fraction(xp, w[..., 2:]).sum(-1) + xp.log_sigmoid(-w[..., 2])

    return Model(4, log_prob, constrain, ("mu", "alpha0", "alpha1", "beta1"))


SERIES: dict[str, Builder] = {"arK-arK": autoregression, "arma-arma11": arma11, "garch-garch11": garch11}
