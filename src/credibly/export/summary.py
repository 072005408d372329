"""The numbers that an exported graph returns, from the outputs of the network under every draw.

They are those of `Predictive`, by the same names: mean, variance, aleatoric and epistemic part and quantiles, or for
labels probabilities and the entropies total, aleatoric and epistemic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from credibly.export.quantiles import graph_quantiles
from credibly.export.tails import graph_normal
from credibly.likelihoods import Likelihood
from credibly.predictive.transformed import Transformed

LABELS = ("probabilities", "total", "aleatoric", "epistemic")
NUMBERS = ("mean", "variance", "aleatoric", "epistemic")


def output_names(likelihood: Likelihood, levels: Sequence[float]) -> tuple[str, ...]:
    """Return the names of the outputs, in order."""
    names = LABELS if likelihood.support in ("class", "binary") else NUMBERS
    return (*names, *(quantile_name(level) for level in levels))


def quantile_name(level: float) -> str:
    """Return the name of the output of a quantile: "quantile_0.05"."""
    return f"quantile_{level:.10g}"


def summarise(
    likelihood: Likelihood, output: Tensor, extra: Mapping[str, Tensor], levels: Sequence[float]
) -> tuple[Tensor, ...]:
    """Return the tensors of `output_names` for outputs (S, rows, ..., K), in the network's dtype.

    Sums over draws are in float64, as in `Predictive`.
    """
    # As in Predictive: moments in the units of the network, then converted.
    inner, location, scale = likelihood.standardised() or (likelihood, None, None)
    if isinstance(inner, Transformed):
        means, variances = inner.moments_by(graph_normal(), output, extra)
    else:
        means, variances = inner.moments(output, extra)
    plain = type(inner).spread is Likelihood.spread
    aleatoric = (variances if plain else inner.spread(output, extra)).double().mean(0)
    wide = means.double()
    mean = wide.mean(0)
    variance_of_means = (wide - mean).square().mean(0)
    total = inner.total(mean, variance_of_means, aleatoric)
    epistemic = (total - aleatoric).clamp_min(0) if len(output) > 1 else torch.zeros_like(total)
    if inner.support in ("real", "time"):
        epistemic = torch.where(aleatoric.abs() < torch.inf, epistemic, variance_of_means)
    variance = inner.variance(mean, variance_of_means, aleatoric)
    if location is not None and scale is not None:
        mean = mean * scale + location
        variance, aleatoric, epistemic = (part * scale**2 for part in (variance, aleatoric, epistemic))

    def restored(value: Tensor) -> Tensor:
        # Entropies of classes have no class axis.
        return value if value.ndim < mean.ndim else likelihood.restore(value)

    if likelihood.support in ("class", "binary"):
        found = [mean if likelihood.support == "class" else _two_classes(restored(mean)), restored(total)]
    else:
        found = [restored(mean), restored(variance)]
    found += [restored(aleatoric), restored(epistemic)]
    if levels:
        found += [likelihood.restore(q) for q in graph_quantiles(likelihood, [(output, extra)], levels)[:, 0]]
    dtype = torch.float64 if likelihood.wide else output.dtype
    return tuple(value.to(dtype) for value in found)


def _two_classes(p: Tensor) -> Tensor:
    return torch.stack([1 - p, p], -1)
