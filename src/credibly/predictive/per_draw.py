"""Predictions of each draw of the weights, for diagnostics that compare draws: means, variances and log densities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from credibly.predictive.base import Predictive


class PerDraw(NamedTuple):
    """Functions of each draw at the rows of a predictive.

    Attributes:
        means: E(y | x, w_s), (S, N, ...).
        variances: Var(y | x, w_s) of a real target, (S, n, ...), at the n rows where it is never infinite; None without
            such rows or if all have the same. A noise that is the same in every row is a parameter of the likelihood.
        log_densities: log p(y_i | x_i, w_s), (S, n), at the same rows if there are any, else (S, N); None without y.
    """

    means: Tensor
    variances: Tensor | None
    log_densities: Tensor | None


def per_draw(predictive: Predictive, y: object = None) -> PerDraw:
    """Return the predictions of each draw, in one pass over the network's outputs."""
    likelihood = predictive.likelihood
    real = likelihood.support == "real"
    target = None if y is None else predictive.prepared(y)

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, ...]:
        mean, variance = likelihood.moments(output, extra)
        parts = [mean, variance if real else mean[:, :0]]
        if target is not None:
            part = likelihood.log_prob(output, target[start : start + output.shape[1]], extra)
            parts.append(part.reshape(*part.shape[:2], -1).sum(2, dtype=torch.float64))
        return tuple(parts)

    means, variances, *rest = (torch.cat(c, 1) for c in zip(*predictive.map_blocks(block)))
    # Far from the training rows exp(v) overflows under some draws, which is no failure of the chains.
    finite = ~variances.isposinf().flatten(2).any(-1).any(0)
    densities = rest[0] if rest else None
    if real and densities is not None and bool(finite.any()):
        densities = densities[:, finite]
    variances = variances[:, finite]
    varies = real and bool((variances != variances[:, :1]).any())
    return PerDraw(likelihood.restore(means, 1), variances if varies else None, densities)
