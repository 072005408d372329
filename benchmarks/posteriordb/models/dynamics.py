"""Differential equations: hares and lynxes, and a drug that is absorbed and eliminated.

Both are solved by the classical Runge-Kutta method with steps of fixed size, so that density and gradient are
consistent; a test checks the size against scipy's solver.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.posteriordb.models.base import Array, Arrays, Builder, Data, Model, cauchy, indexed, normal

# Steps per year of the populations, and per interval of half a day between the measurements of the drug.
YEAR_STEPS, DRUG_STEPS = 8, 5


def runge_kutta(slope: Callable[[Array, Array], Array], state: Array, times: Array, size: float) -> Array:
    """Return the state after one step; times[i] is passed on to the slope at the start, in the middle, at the end."""
    one = slope(state, times[0])
    two = slope(state + 0.5 * size * one, times[1])
    three = slope(state + 0.5 * size * two, times[1])
    four = slope(state + size * three, times[2])
    return state + size / 6 * (one + 2 * (two + three) + four)


def lotka_volterra(xp: Arrays, data: Data) -> Model:
    """d log u / dt = alpha - beta v, d log v / dt = -gamma + delta u, lognormal errors: 8 logarithms."""
    years, steps = len(data["ts"]), YEAR_STEPS
    seen = xp.array(np.log(np.concatenate([data["y_init"][None], data["y"]])))
    # Growth of hares, decline of lynxes; effect of the other population.
    own, other = xp.array(np.array([1.0, -1.0])), xp.array(np.array([-1.0, 1.0]))
    centre, width = xp.array(np.array([1.0, 0.05, 1.0, 0.05])), xp.array(np.array([0.5, 0.05, 0.5, 0.05]))
    clock = np.zeros((years * steps, 3))

    def log_prob(w: Array) -> Array:
        theta, log_start, log_sigma = xp.exp(w[..., :4]), w[..., 4:6], w[..., 6:]
        growth, effect = own * theta[..., 0:4:2], other * theta[..., 1:4:2]

        def slope(state: Array, time: Array) -> Array:
            return growth + effect * xp.exp(xp.flip(state, (-1,)))

        def step(state: Array, times: Array) -> Array:
            return runge_kutta(slope, state, times, 1 / steps)

        path = xp.scan(step, log_start, clock)
        path = xp.stack([log_start, *(path[k] for k in range(steps - 1, years * steps, steps))], axis=-2)
        fit = normal(xp, seen, path, xp.exp(log_sigma)[..., None, :]).sum(-1).sum(-1)
        # The prior of theta has a Jacobian; those of the lognormal ones cancel.
        prior = (-0.5 * xp.square((theta - centre) / width) + w[..., :4]).sum(-1)
        prior = prior + normal(xp, log_start, float(np.log(10)), 1.0).sum(-1)
        return fit + prior + normal(xp, log_sigma, -1.0, 1.0).sum(-1)

    return Model(8, log_prob, xp.exp, (*indexed("theta", 4), *indexed("z_init", 2), *indexed("sigma", 2)))


def elimination(xp: Arrays, data: Data) -> Model:
    """dC/dt = D k_a exp(-k_a t) / V - V_m C / (V (K_m + C)), lognormal errors: log k_a, K_m, V_m, sigma.

    All four are half-Cauchy(1).
    """
    dose, volume, times = float(data["D"]), float(data["V"]), data["times"]
    gaps = np.diff(np.concatenate([[float(data["t0"])], times]))
    assert np.allclose(gaps, gaps[0]), "the measurements are equally spaced"
    size = gaps[0] / DRUG_STEPS
    # Start, middle and end of every step, (step, 3).
    clock = float(data["t0"]) + size * (np.arange(len(times) * DRUG_STEPS)[:, None] + np.array([0.0, 0.5, 1.0]))
    seen, ticks = xp.array(np.log(data["C_hat"])), xp.array(clock)

    def log_prob(w: Array) -> Array:
        found = xp.exp(w)
        k_a, half, most = found[..., 0], found[..., 1], found[..., 2] / volume
        rates = dose / volume * k_a * xp.exp(-k_a * ticks.reshape(*ticks.shape, *(1,) * k_a.ndim))

        def slope(level: Array, rate: Array) -> Array:
            return rate - most * level / (half + level)

        path = xp.scan(lambda level, rate: runge_kutta(slope, level, rate, size), 0.0 * k_a, rates)
        path = xp.stack([path[k] for k in range(DRUG_STEPS - 1, len(clock), DRUG_STEPS)], axis=-1)
        fit = normal(xp, seen, xp.log(path), found[..., 3:]).sum(-1)
        return fit + (cauchy(xp, found, 1.0) + w).sum(-1)

    return Model(4, log_prob, xp.exp, ("k_a", "K_m", "V_m", "sigma"))


DYNAMICS: dict[str, Builder] = {
    "hudson_lynx_hare-lotka_volterra": lotka_volterra,
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs": elimination,
}
