"""The probability integral transform: the predictive CDF at observed targets, uniform for calibrated predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.predictive.base import Predictive


def pit_values(predictive: Predictive, y: object, *, seed: int = 0) -> Tensor:
    """Return F(y | x, D) of every row, in the shape of y; for counts it is randomised, F(y) - v p(y) with uniform v.

    Without the randomisation the values of counts pile up at the steps of F, and no prediction would look calibrated
    (Smith 1985; Czado et al. 2009).
    """
    cdf = predictive.cdf(y)
    if predictive.likelihood.support != "count" or cdf.ndim != 1:
        return cdf
    v = torch.rand(len(cdf), generator=stream(seed, "pit"), dtype=torch.float64).to(cdf.device)
    return (cdf.double() - v * predictive.log_prob(y).double().exp()).clamp(0, 1)
