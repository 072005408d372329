"""Mixtures of two Gaussians, and hidden Markov models of two states with the states summed out.

The forward algorithm is a product of 2 x 2 matrices in logarithms. It is computed in pairs: log2 N operations on all of
them instead of N on one.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.posteriordb.models.base import (
    Array,
    Arrays,
    Builder,
    Data,
    Model,
    fraction,
    indexed,
    join,
    log_fraction,
    normal,
)


def forward(xp: Arrays, emission: Array, log_transition: Array) -> Array:
    """Return the log likelihood (...) of observations with log densities (..., N, K) by state, (..., K, K) transitions.

    As in the Stan programs, the first state has no prior.
    """
    matrices = log_transition[..., None, :, :] + emission[..., 1:, None, :]
    while (count := matrices.shape[-3]) > 1:
        even = count - count % 2
        left, right = matrices[..., 0:even:2, :, :], matrices[..., 1:even:2, :, :]
        paired = xp.log_sum_exp(left[..., :, :, None] + right[..., None, :, :], -2)
        matrices = xp.concatenate([paired, matrices[..., even:, :, :]], axis=-3) if even < count else paired
    return xp.log_sum_exp(xp.log_sum_exp(emission[..., 0, :, None] + matrices[..., 0, :, :], -1), -1)


def transition(xp: Arrays, u: Array) -> Array:
    """Return the log transition matrix (..., 2, 2) of the logits (..., 2) of going to the first state."""
    return xp.stack([xp.log_sigmoid(u), xp.log_sigmoid(-u)], axis=-1)


def _rows(xp: Arrays, u: Array) -> Array:
    """Return both rows of the transition matrix side by side, (..., 4)."""
    return join(xp, *(fraction(xp, sign * u[..., i : i + 1]) for i in (0, 1) for sign in (1, -1)))


def _pair(xp: Arrays, u: Array, positive: bool) -> Array:
    """Return an ordered pair (..., 2)."""
    low = xp.exp(u[..., :1]) if positive else u[..., :1]
    return join(xp, low, low + xp.exp(u[..., 1:]))


def hmm_example(xp: Arrays, data: Data) -> Model:
    """y ~ N(mu of the state, 1), mu positive and ordered, near 3 and 10: two logits, log mu1, log(mu2 - mu1)."""
    y = xp.array(data["y"])[:, None]

    def constrain(w: Array) -> Array:
        return join(xp, _rows(xp, w[..., :2]), _pair(xp, w[..., 2:], True))

    def log_prob(w: Array) -> Array:
        mu = _pair(xp, w[..., 2:], True)
        fit = forward(xp, -0.5 * xp.square(y - mu[..., None, :]), transition(xp, w[..., :2]))
        prior = normal(xp, mu[..., 0], 3.0, 1.0) + normal(xp, mu[..., 1], 10.0, 1.0)
        return fit + prior + log_fraction(xp, w[..., :2]).sum(-1) + w[..., 2:].sum(-1)

    names = (*indexed("theta1", 2), *indexed("theta2", 2), *indexed("mu", 2))
    return Model(4, log_prob, constrain, names)


def drive(positive: bool) -> Builder:
    """Return a player's speed and distance by whether he drives: exponential if positive, else Gaussian.

    Two logits with Dirichlet priors, then the ordered pairs phi and lambda, near 0 and 3.
    """

    def build(xp: Arrays, data: Data) -> Model:
        u, v = xp.array(data["u"])[:, None], xp.array(data["v"])[:, None]
        prior = xp.array(data["alpha"] - 1.0)

        def emission(value: Array, of: Array, scale: float) -> Array:
            of = of[..., None, :]
            return xp.log(of) - of * value if positive else -0.5 * xp.square((value - of) / scale)

        scales = (1.0, 1.0) if positive else (float(data["tau"]), float(data["rho"]))

        def constrain(w: Array) -> Array:
            return join(xp, _rows(xp, w[..., :2]), _pair(xp, w[..., 2:4], positive), _pair(xp, w[..., 4:], positive))

        def log_prob(w: Array) -> Array:
            log_theta, phi = transition(xp, w[..., :2]), _pair(xp, w[..., 2:4], positive)
            other = _pair(xp, w[..., 4:], positive)
            seen = emission(u, phi, scales[0]) + emission(v, other, scales[1])
            total = forward(xp, seen, log_theta) + (prior * log_theta).sum(-1).sum(-1)
            for pair in (phi, other):
                total = total + normal(xp, pair[..., 0], 0.0, 1.0) + normal(xp, pair[..., 1], 3.0, 1.0)
            jacobian = w[..., 2:].sum(-1) if positive else w[..., 3] + w[..., 5]
            return total + log_fraction(xp, w[..., :2]).sum(-1) + jacobian

        names = (*indexed("theta1", 2), *indexed("theta2", 2), *indexed("phi", 2), *indexed("lambda", 2))
        return Model(6, log_prob, constrain, names)

    return build


def gaussians(ordered: bool) -> Builder:
    """Return theta N(mu1, sigma1^2) + (1 - theta) N(mu2, sigma2^2); mu, sigma ~ N(0, 2^2), theta ~ Beta(5, 5).

    Unconstrained: mu (2), log sigma (2), logit theta. Without an order the posterior has two modes.
    """

    def build(xp: Arrays, data: Data) -> Model:
        y = xp.array(data["y"])[:, None]
        means: Callable[[Array], Array] = (lambda u: _pair(xp, u, False)) if ordered else (lambda u: u)

        def constrain(w: Array) -> Array:
            return join(xp, means(w[..., :2]), xp.exp(w[..., 2:4]), fraction(xp, w[..., 4:]))

        def log_prob(w: Array) -> Array:
            mu, sigma, u = means(w[..., :2]), xp.exp(w[..., 2:4]), w[..., 4:]
            weights = join(xp, xp.log_sigmoid(u), xp.log_sigmoid(-u))
            parts = weights[..., None, :] + normal(xp, y, mu[..., None, :], sigma[..., None, :])
            prior = -0.125 * (xp.square(mu) + xp.square(sigma)).sum(-1) + 5 * log_fraction(xp, u[..., 0])
            jacobian = w[..., 2:4].sum(-1) + (w[..., 1] if ordered else 0.0)
            return xp.log_sum_exp(parts, -1).sum(-1) + prior + jacobian

        return Model(5, log_prob, constrain, (*indexed("mu", 2), *indexed("sigma", 2), "theta"))

    return build


MIXTURES: dict[str, Builder] = {
    "low_dim_gauss_mix-low_dim_gauss_mix": gaussians(ordered=True),
    "low_dim_gauss_mix_collapse-low_dim_gauss_mix_collapse": gaussians(ordered=False),
    "hmm_example-hmm_example": hmm_example,
    "bball_drive_event_0-hmm_drive_0": drive(positive=True),
    "bball_drive_event_1-hmm_drive_1": drive(positive=False),
}
