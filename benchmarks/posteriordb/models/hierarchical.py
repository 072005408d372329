"""Hierarchical models: eight schools (two forms), rats, surgical, seeds, radon."""

from __future__ import annotations

import numpy as np

from benchmarks.posteriordb.models.base import Array, Arrays, Builder, Data, Model, cauchy, indexed, join, normal

SCHOOLS = (*indexed("theta", 8), "mu", "tau")


def schools_noncentered(xp: Arrays, data: Data) -> Model:
    """theta = mu + tau z with z ~ N(0, 1): z (8), mu, log tau."""
    y, sigma = xp.array(data["y"]), xp.array(data["sigma"])

    def constrain(w: Array) -> Array:
        tau = xp.exp(w[..., 9:])
        return join(xp, w[..., 8:9] + tau * w[..., :8], w[..., 8:9], tau)

    def log_prob(w: Array) -> Array:
        found = constrain(w)
        fit = -0.5 * xp.square((y - found[..., :8]) / sigma).sum(-1)
        prior = -0.5 * xp.square(w[..., :8]).sum(-1) + normal(xp, w[..., 8], 0.0, 5.0)
        return fit + prior + cauchy(xp, found[..., 9], 5.0) + w[..., 9]

    return Model(10, log_prob, constrain, SCHOOLS)


def schools_centered(xp: Arrays, data: Data) -> Model:
    """theta (8), mu, log tau: the same posterior of theta, mu, tau, but a funnel."""
    y, sigma = xp.array(data["y"]), xp.array(data["sigma"])

    def log_prob(w: Array) -> Array:
        theta, mu, log_tau = w[..., :8], w[..., 8], w[..., 9]
        fit = -0.5 * xp.square((y - theta) / sigma).sum(-1)
        schools = normal(xp, theta, w[..., 8:9], xp.exp(w[..., 9:])).sum(-1)
        return fit + schools + normal(xp, mu, 0.0, 5.0) + cauchy(xp, xp.exp(log_tau), 5.0) + log_tau

    return Model(10, log_prob, lambda w: join(xp, w[..., :9], xp.exp(w[..., 9:])), SCHOOLS)


def rats(xp: Arrays, data: Data) -> Model:
    """Weights of 30 rats: a line for each. alpha (30), beta (30), their means, log sigma of y, alpha and beta."""
    count = int(data["N"])
    which = xp.array(np.eye(count)[data["rat"] - 1].T)
    day, y = xp.array(data["x"] - data["xbar"]), xp.array(data["y"])

    def log_prob(w: Array) -> Array:
        alpha, beta, sigmas = w[..., :count], w[..., count : 2 * count], xp.exp(w[..., -3:])
        line = alpha @ which + (beta @ which) * day
        means = w[..., 2 * count : 2 * count + 2]
        fit = normal(xp, y, line, sigmas[..., 0:1]).sum(-1)
        fit = fit + normal(xp, alpha, means[..., 0:1], sigmas[..., 1:2]).sum(-1)
        fit = fit + normal(xp, beta, means[..., 1:2], sigmas[..., 2:3]).sum(-1)
        return fit + normal(xp, means, 0.0, 100.0).sum(-1) + w[..., -3:].sum(-1)

    names = (*indexed("alpha", count), *indexed("beta", count), "mu_alpha", "mu_beta")
    names = (*names, "sigma_y", "sigma_alpha", "sigma_beta")
    return Model(2 * count + 5, log_prob, lambda w: join(xp, w[..., :-3], xp.exp(w[..., -3:])), names)


def surgical(xp: Arrays, data: Data) -> Model:
    """Deaths in 12 hospitals: mu, log sigma^2 ~ log InvGamma(0.001, 0.001), b (12) ~ N(mu, sigma^2)."""
    deaths, trials, count = xp.array(data["r"]), xp.array(data["n"]), int(data["N"])

    def log_prob(w: Array) -> Array:
        log_square, b = w[..., 1], w[..., 2:]
        fit = (deaths * xp.log_sigmoid(b) + (trials - deaths) * xp.log_sigmoid(-b)).sum(-1)
        hospitals = normal(xp, b, w[..., 0:1], xp.exp(0.5 * w[..., 1:2])).sum(-1)
        prior = normal(xp, w[..., 0], 0.0, 1000.0) - 0.001 * log_square - 0.001 * xp.exp(-log_square)
        return fit + hospitals + prior

    def constrain(w: Array) -> Array:
        return join(xp, w[..., :1], xp.exp(w[..., 1:2]), w[..., 2:])

    return Model(count + 2, log_prob, constrain, ("mu", "sigmasq", *indexed("b", count)))


def seeds(xp: Arrays, data: Data) -> Model:
    """Germination on 21 plates: alpha (4) ~ N(0, 1), c (21) ~ N(0, sigma^2), enters centred; log sigma."""
    grown, total, plates = xp.array(data["n"]), xp.array(data["N"]), int(data["I"])
    x1, x2 = data["x1"], data["x2"]
    rows = xp.array(np.stack([np.ones(plates), x1, x1 * x2, x2]))

    def log_prob(w: Array) -> Array:
        c = w[..., 4 : 4 + plates]
        b = c - c.mean(-1)[..., None]
        logit = w[..., :4] @ rows + b
        fit = (grown * xp.log_sigmoid(logit) + (total - grown) * xp.log_sigmoid(-logit)).sum(-1)
        sigma = xp.exp(w[..., -1:])
        prior = normal(xp, w[..., :4], 0.0, 1.0).sum(-1) + normal(xp, c, 0.0, sigma).sum(-1)
        return fit + prior + cauchy(xp, sigma[..., 0], 1.0) + w[..., -1]

    names = ("alpha0", "alpha1", "alpha12", "alpha2", *indexed("c", plates), "sigma")
    return Model(plates + 5, log_prob, lambda w: join(xp, w[..., :-1], xp.exp(w[..., -1:])), names)


def radon(xp: Arrays, data: Data) -> Model:
    """Radon in 85 counties, not centred: z (85) ~ N(0, 1), beta (2), mu, log sigma of counties and of houses."""
    count = int(data["J"])
    which = np.eye(count)[data["county_idx"] - 1].T
    which, y = xp.array(which), xp.array(data["log_radon"])
    rows = xp.array(np.stack([data["log_uppm"], data["floor_measure"]]))

    def constrain(w: Array) -> Array:
        sigmas = xp.exp(w[..., -2:])
        counties = w[..., -3:-2] + sigmas[..., :1] * w[..., :count]
        return join(xp, counties, w[..., count : count + 3], sigmas)

    def log_prob(w: Array) -> Array:
        found = constrain(w)
        mean = found[..., :count] @ which + w[..., count : count + 2] @ rows
        fit = normal(xp, y, mean, found[..., -1:]).sum(-1) - 0.5 * xp.square(w[..., :count]).sum(-1)
        prior = normal(xp, w[..., count : count + 3], 0.0, 10.0).sum(-1)
        return fit + prior - 0.5 * xp.square(found[..., -2:]).sum(-1) + w[..., -2:].sum(-1)

    names = (*indexed("alpha", count), *indexed("beta", 2), "mu_alpha", "sigma_alpha", "sigma_y")
    return Model(count + 5, log_prob, constrain, names)


HIERARCHICAL: dict[str, Builder] = {
    "eight_schools-eight_schools_noncentered": schools_noncentered,
    "eight_schools-eight_schools_centered": schools_centered,
    "rats_data-rats_model": rats,
    "surgical_data-surgical_model": surgical,
    "seeds_data-seeds_centered_model": seeds,
    "radon_mn-radon_hierarchical_intercept_noncentered": radon,
}
