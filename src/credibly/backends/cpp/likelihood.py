"""Likelihoods in the form that the C++ and CUDA backends take."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from credibly.backends.cpp import api
from credibly.backends.cpp.stack import Stack
from credibly.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from credibly.networks.layout import Layout
from credibly.priors.flat import BoundPrior

LIKELIHOODS: dict[type[Likelihood], int] = {Gaussian: 0, HeteroscedasticGaussian: 1, Categorical: 2, Bernoulli: 3}


def supports(x: Any, y: Tensor, likelihood: Likelihood, prior: Any) -> bool:
    """Return whether the C++ and CUDA backends support the likelihood, the prior and the shape of the data."""
    if type(likelihood) not in LIKELIHOODS or not isinstance(prior, BoundPrior) or not prior.is_normal:
        return False
    if likelihood.counted(y) is not None:
        return False
    return isinstance(x, Tensor) and x.ndim == 2 and y.ndim <= 2 and likelihood.axis in (-1, 1)


def likelihood_struct(likelihood: Likelihood, layout: Layout, stack: Stack, columns: int, weight: float) -> api.Data:
    """Return the struct of a likelihood on targets with the given number of columns, without the rows."""
    targets = stack.outputs if isinstance(likelihood, Categorical) else columns
    scales, offset, per_target = noise_scales(likelihood, layout, targets)
    return api.Data(
        kind=LIKELIHOODS[type(likelihood)],
        targets=targets,
        scale=(ctypes.c_double * targets)(*scales),
        log_scale=offset,
        per_target=per_target,
        weight=weight,
    )


def noise_scales(likelihood: Likelihood, layout: Layout, targets: int) -> tuple[list[float], int, int]:
    """Return the fixed scales, the offset of a learned log scale or -1, and whether there is one per target.

    The scales of heteroscedastic noise are its floor.
    """
    if isinstance(likelihood, HeteroscedasticGaussian):
        return [float(likelihood.floor)] * targets, -1, 0
    if not isinstance(likelihood, Gaussian):
        return [1.0] * targets, -1, 0
    given = likelihood.scale
    if isinstance(given, str):
        offset = next(e.start for e in layout.entries if e.name == "likelihood.log_scale")
        return [1.0] * targets, offset, int(likelihood.per_target)
    return ([float(v) for v in given] if isinstance(given, (tuple, list)) else [float(given)] * targets), -1, 0
