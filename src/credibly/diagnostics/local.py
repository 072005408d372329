"""Chains that need not mix with each other: the variance of predictions within and between them.

With W the mean variance within a chain and B the variance of the chains' means, less its Monte Carlo error W / n for n
effective draws per chain, the fraction between chains is B / (B + W). Near 0 the chains sample one density as far as
predictions can tell; near 1 the draws are hardly more than an ensemble of points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from credibly.diagnostics.convergence import measure
from credibly.diagnostics.verdict import RHAT_USABLE, Mixing, mixing


@dataclass(frozen=True)
class LocalPosteriors:
    """Chains judged one by one.

    Attributes:
        within: mixing of the predictions after each chain has been shifted to mean 0 and scaled to variance 1: whether
            every chain has settled, wherever it is. Its ESS is the sum over the chains. The halves of a centred chain
            lie opposite each other, so R-hat - 1 is about half of what it would be for halves of separate chains.
        between: fraction of the variance of a prediction that lies between chains, the median over predictions.
        between_most: the largest of them.
    """

    within: Mixing
    between: float
    between_most: float


def local_posteriors(functions: Tensor | npt.NDArray[Any]) -> LocalPosteriors:
    """Return the parts of predictions (chain, draw, ...) within and between chains."""
    values = torch.as_tensor(functions).double().flatten(2)
    means, variances = values.mean(1), values.var(1)
    found = measure((values - means.unsqueeze(1)) / variances.clamp(min=1e-300).sqrt().unsqueeze(1))
    numbers = [part.cpu().numpy() for part in found]
    summary = mixing(*numbers[:4], finite=numbers[4], constant=numbers[5], total=values.shape[2])
    each = found.mean.to(values) / len(values)
    inside = variances.mean(0)
    outside = (means.var(0) - inside / each).clamp(min=0) if len(values) > 1 else torch.zeros_like(inside)
    use = torch.as_tensor(numbers[4] & ~numbers[5], device=values.device)
    part = (outside / (inside + outside))[use].cpu().numpy()
    if not len(part):
        return LocalPosteriors(summary, float("nan"), float("nan"))
    return LocalPosteriors(summary, float(np.median(part)), float(part.max()))


def judge_local(chains: int, parts: LocalPosteriors, divergences: int | None = None) -> tuple[bool, str]:
    """Return whether every chain has settled, and a verdict on a mixture of local posteriors."""
    within = parts.within
    lost = ""
    if divergences:
        lost = f" {divergences:,} path{'s' * (divergences > 1)} diverged: lower energy_variance or the step size."
    if within.nonfinite:
        return False, "Broken: NaN or infinite predictions. Lower the step size, standardise the data, and run again."
    if not within.moving:
        return False, "Nothing to judge: the predictions of every chain are constant."
    fraction = (
        f"{parts.between:.0%} of the variance of a prediction lies between the chains (median; up to"
        f" {parts.between_most:.0%}), the rest within them"
    )
    if within.rhat_most > RHAT_USABLE:
        return False, (
            f"Not settled: the chains still move away from where they started (R-hat within chains up to"
            f" {within.rhat_most:.2f}), so they do not sample the local posteriors yet. {fraction}."
            f" Run more warm-up and draws.{lost}"
        )
    return not divergences, (
        f"An ensemble of local posteriors: each of the {chains} chains has settled (R-hat within chains up to"
        f" {within.rhat_most:.3f}, ESS {within.ess_bulk_median:,.0f} in the median), and {fraction}. The chains are not"
        " expected to mix with each other: the draws are their mixture with equal weights, not draws from the"
        " posterior."
        f"{lost}"
    )
