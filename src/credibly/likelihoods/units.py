"""Targets in units of their own, which no network with its initial weights reaches."""

from __future__ import annotations

import logging

from torch import Tensor

from credibly.likelihoods.base import Likelihood
from credibly.likelihoods.continuous import Gaussian, HeteroscedasticGaussian, HeteroscedasticStudentT, StudentT

log = logging.getLogger("credibly")
# Targets beyond this, in mean or standard deviation, are in units of their own.
LARGE = 30.0


def scaled_to_targets(likelihood: Likelihood, output: Tensor, y: Tensor, weight: Tensor | None) -> Likelihood:
    """Return the likelihood with its defaults in the units of prepared targets y (N, ..., K).

    Log a warning if these are large and the network is far from them: `output` are its outputs for the first rows,
    before training. A trained network may have any units.
    """
    kinds = (Gaussian, StudentT, HeteroscedasticGaussian, HeteroscedasticStudentT)
    if isinstance(likelihood, kinds) and len(y) > 1:
        mean, std = float(y.double().mean()), float(y.double().std())
        found = likelihood.arrange(output.detach())[: len(y), ..., : y.shape[-1]]
        gap = float((found.double() - y[: len(found)].double()).abs().mean())
        if max(abs(mean), std) > LARGE and gap > LARGE:
            log.warning(
                "y has mean %.3g and standard deviation %.3g: the defaults of networks, learning rates and priors are "
                "for values around 1. Standardise y, or use credibly.BayesianRegressor, which does",
                mean,
                std,
            )
    return likelihood.scaled_to(y, weight)
