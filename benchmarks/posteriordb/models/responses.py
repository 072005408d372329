"""Regressions of binary outcomes and counts: wells, nes_logit, dogs, a Poisson trend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.posteriordb.models.base import (
    Array,
    Arrays,
    Builder,
    Data,
    Model,
    design,
    fraction,
    indexed,
    log_fraction,
    normal,
)
from benchmarks.posteriordb.models.regression import Columns


def logistic(target: str, columns: Callable[[Data], Columns]) -> Builder:
    """y ~ Bernoulli(1 / (1 + exp(-X beta))) with flat priors; the intercept is called alpha."""

    def build(xp: Arrays, data: Data) -> Model:
        matrix = design(columns(data))
        signed = xp.array((2 * data[target] - 1)[:, None] * matrix).T
        names = ("alpha", *indexed("beta", matrix.shape[1] - 1))
        return Model(matrix.shape[1], lambda w: xp.log_sigmoid(w @ signed).sum(-1), lambda w: w, names)

    return build


def dogs(xp: Arrays, data: Data) -> Model:
    """Whether a dog is shocked in a trial, given how often it avoided the shock before; beta ~ N(0, 100^2)."""
    y = data["y"]
    shocks = np.cumsum(y, 1) - y
    avoided = np.arange(y.shape[1]) - shocks
    matrix = design([1, avoided.ravel(), shocks.ravel()])
    signed = xp.array((2 * y.ravel() - 1)[:, None] * matrix).T

    def log_prob(w: Array) -> Array:
        return xp.log_sigmoid(w @ signed).sum(-1) + normal(xp, w, 0.0, 100.0).sum(-1)

    return Model(3, log_prob, lambda w: w, indexed("beta", 3))


def poisson_trend(xp: Arrays, data: Data) -> Model:
    """Counts by a cubic in the year; the intercept is uniform on (-20, 20), the slopes on (-10, 10)."""
    year = data["year"]
    rows, counts = xp.array(design([1, year, year**2, year**3]).T), xp.array(data["C"])
    width = xp.array(np.array([20.0, 10.0, 10.0, 10.0]))

    def constrain(w: Array) -> Array:
        return width * (2 * fraction(xp, w) - 1)

    def log_prob(w: Array) -> Array:
        rate = constrain(w) @ rows
        return (counts * rate - xp.exp(rate)).sum(-1) + log_fraction(xp, w).sum(-1)

    return Model(4, log_prob, constrain, ("alpha", "beta1", "beta2", "beta3"))


RESPONSES: dict[str, Builder] = {
    "wells_data-wells_dist100ars_model": logistic("switched", lambda d: [1, d["dist"] / 100, d["arsenic"]]),
    "nes_logit_data-nes_logit_model": logistic("vote", lambda d: [1, d["income"]]),
    "dogs-dogs": dogs,
    "GLM_Poisson_Data-GLM_Poisson_model": poisson_trend,
}
