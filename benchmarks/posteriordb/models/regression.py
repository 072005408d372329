"""Linear regressions with Gaussian noise: earnings, kidiq, mesquite, nes, blr, kilpisjarvi, diamonds.

    y ~ N(X beta, sigma^2),    unconstrained: beta, log sigma

Most have flat priors, so the posterior mean of beta is the least-squares solution. Columns are as published, neither
centred nor scaled unless the name says so: posteriors are narrow, correlated and far from zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.posteriordb.models.base import (
    Array,
    Arrays,
    Builder,
    Data,
    Model,
    cauchy,
    design,
    indexed,
    join,
    normal,
    student,
)

Columns = list[npt.ArrayLike]
Prior = Callable[[Arrays, Array, Array], Array]  # of beta and sigma


def flat(xp: Arrays, beta: Array, sigma: Array) -> Array:
    return 0.0 * sigma


def half_cauchy(xp: Arrays, beta: Array, sigma: Array) -> Array:
    return cauchy(xp, sigma, 2.5)


def regression(
    target: Callable[[Data], npt.NDArray[Any]], columns: Callable[[Data], Columns], prior: Prior = flat
) -> Builder:
    """Return the builder of one regression."""

    def build(xp: Arrays, data: Data) -> Model:
        matrix = design(columns(data))
        return _model(xp, matrix, target(data), len(matrix), prior, indexed("beta", matrix.shape[1]))

    return build


def _model(
    xp: Arrays, matrix: npt.NDArray[Any], y: npt.NDArray[Any], count: int, prior: Prior, names: tuple[str, ...]
) -> Model:
    """Return the model of `count` observations whose squared residuals sum to |y - matrix beta|^2."""
    rows, seen, size = xp.array(matrix.T), xp.array(y), matrix.shape[1]

    def log_prob(w: Array) -> Array:
        beta, log_sigma = w[..., :size], w[..., size]
        misfit = xp.square(seen - beta @ rows).sum(-1)
        fit = -0.5 * misfit * xp.exp(-2 * log_sigma) - count * log_sigma
        return fit + prior(xp, beta, xp.exp(log_sigma)) + log_sigma

    def constrain(w: Array) -> Array:
        return join(xp, w[..., :size], xp.exp(w[..., size:]))

    return Model(size + 1, log_prob, constrain, (*names, "sigma"))


def blr(xp: Arrays, data: Data) -> Model:
    """beta, sigma ~ N(0, 10^2)."""

    def prior(xp: Arrays, beta: Array, sigma: Array) -> Array:
        return normal(xp, beta, 0.0, 10.0).sum(-1) + normal(xp, sigma, 0.0, 10.0)

    return _model(xp, data["X"], data["y"], len(data["y"]), prior, indexed("beta", data["X"].shape[1]))


def kilpisjarvi(xp: Arrays, data: Data) -> Model:
    """Summer temperature on the year, which is not centred: the correlation of both coefficients is nearly -1."""

    def prior(xp: Arrays, beta: Array, sigma: Array) -> Array:
        alpha = normal(xp, beta[..., 0], float(data["pmualpha"]), float(data["psalpha"]))
        return alpha + normal(xp, beta[..., 1], float(data["pmubeta"]), float(data["psbeta"]))

    return _model(xp, design([1, data["x"]]), data["y"], len(data["y"]), prior, ("alpha", "beta"))


def diamonds(xp: Arrays, data: Data) -> Model:
    """Log price on 24 centred columns of brms. `rows` is the triangular factor of [X, 1, y]: the same squares."""
    rows = data["rows"]

    def prior(xp: Arrays, beta: Array, sigma: Array) -> Array:
        slopes = normal(xp, beta[..., :-1], 0.0, 1.0).sum(-1)
        return slopes + student(xp, beta[..., -1], 3, 8, 10) + student(xp, sigma, 3, 0, 10)

    names = (*indexed("b", rows.shape[1] - 2), "Intercept")
    return _model(xp, rows[:, :-1], rows[:, -1], int(data["N"]), prior, names)


def centred(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(values - values.mean())


def halved(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values centred and divided by twice their standard deviation."""
    return np.asarray(centred(values) / (2 * values.std(ddof=1)))


def _inter(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Columns:
    return [1, a, b, a * b]


def _log_earn(d: Data) -> npt.NDArray[Any]:
    return np.log(d["earn"])


def _score(d: Data) -> npt.NDArray[Any]:
    return np.asarray(d["kid_score"])


def _log_weight(d: Data) -> npt.NDArray[Any]:
    return np.log(d["weight"])


def _height_z(d: Data) -> npt.NDArray[Any]:
    return np.asarray(centred(d["height"]) / d["height"].std(ddof=1))


def _area(d: Data) -> npt.NDArray[Any]:
    return np.asarray(np.log(d["diam1"] * d["diam2"]))


def _volume(d: Data) -> npt.NDArray[Any]:
    return np.asarray(np.log(d["diam1"] * d["diam2"] * d["canopy_height"]))


def _shape(d: Data) -> npt.NDArray[Any]:
    return np.log(d["diam1"] / d["diam2"])


_MESQUITE = ("diam1", "diam2", "canopy_height", "total_height", "density")

REGRESSIONS: dict[str, Builder] = {
    "earnings-earn_height": regression(lambda d: d["earn"], lambda d: [1, d["height"]]),
    "earnings-log10earn_height": regression(lambda d: np.log10(d["earn"]), lambda d: [1, d["height"]]),
    "earnings-logearn_height": regression(_log_earn, lambda d: [1, d["height"]]),
    "earnings-logearn_height_male": regression(_log_earn, lambda d: [1, d["height"], d["male"]]),
    "earnings-logearn_interaction": regression(_log_earn, lambda d: _inter(d["height"], d["male"])),
    "earnings-logearn_interaction_z": regression(_log_earn, lambda d: _inter(_height_z(d), d["male"])),
    "earnings-logearn_logheight_male": regression(_log_earn, lambda d: [1, np.log(d["height"]), d["male"]]),
    "kidiq-kidscore_momhs": regression(_score, lambda d: [1, d["mom_hs"]], half_cauchy),
    "kidiq-kidscore_momiq": regression(_score, lambda d: [1, d["mom_iq"]], half_cauchy),
    "kidiq-kidscore_momhsiq": regression(_score, lambda d: [1, d["mom_hs"], d["mom_iq"]], half_cauchy),
    "kidiq-kidscore_interaction": regression(_score, lambda d: _inter(d["mom_hs"], d["mom_iq"]), half_cauchy),
    "kidiq_with_mom_work-kidscore_interaction_c": regression(
        _score, lambda d: _inter(centred(d["mom_hs"]), centred(d["mom_iq"]))
    ),
    "kidiq_with_mom_work-kidscore_interaction_c2": regression(
        _score, lambda d: _inter(d["mom_hs"] - 0.5, d["mom_iq"] - 100)
    ),
    "kidiq_with_mom_work-kidscore_interaction_z": regression(
        _score, lambda d: _inter(halved(d["mom_hs"]), halved(d["mom_iq"]))
    ),
    "kidiq_with_mom_work-kidscore_mom_work": regression(
        _score, lambda d: [1, *((d["mom_work"] == k) for k in (2, 3, 4))]
    ),
    "mesquite-mesquite": regression(lambda d: d["weight"], lambda d: [1, *(d[k] for k in _MESQUITE), d["group"]]),
    "mesquite-logmesquite": regression(_log_weight, lambda d: [1, *(np.log(d[k]) for k in _MESQUITE), d["group"]]),
    "mesquite-logmesquite_logvolume": regression(_log_weight, lambda d: [1, _volume(d)]),
    "mesquite-logmesquite_logva": regression(_log_weight, lambda d: [1, _volume(d), _area(d), d["group"]]),
    "mesquite-logmesquite_logvas": regression(
        _log_weight,
        lambda d: [1, _volume(d), _area(d), _shape(d), np.log(d["total_height"]), np.log(d["density"]), d["group"]],
    ),
    "mesquite-logmesquite_logvash": regression(
        _log_weight, lambda d: [1, _volume(d), _area(d), _shape(d), np.log(d["total_height"]), d["group"]]
    ),
    **{
        f"nes{year}-nes": regression(
            lambda d: d["partyid7"],
            lambda d: [
                *(1, d["real_ideo"], d["race_adj"]),
                *(d["age_discrete"] == k for k in (2, 3, 4)),
                *(d["educ1"], d["gender"], d["income"]),
            ],
        )
        for year in (1972, 1976, 1980, 1984, 1988, 1992, 1996, 2000)
    },
    "sblrc-blr": blr,
    "sblri-blr": blr,
    "kilpisjarvi_mod-kilpisjarvi": kilpisjarvi,
    "diamonds-diamonds": diamonds,
}
