"""The bias of unadjusted MCLMC, measured: the predictions of its draws against those of a short adjusted run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.inference.adaptation import Welford
from credibly.inference.sampling.sampler import Sampler
from credibly.inference.target import Target

# The check takes this fraction of the iterations of a run, if that is enough of them to find a step size.
FRACTION, LEAST = 0.1, 40


def iterations(done: int) -> int:
    """Return the iterations of the check after a run of `done` iterations, half of them warm-up; 0 if too few."""
    count = int(FRACTION * done)
    return count if count >= LEAST else 0


def compare(
    draws: Welford, adjusted: Sampler, target: Target, start: Tensor, of_all: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Run the adjusted sampler from the last draws and compare predictions, chain by chain.

    Args:
        draws: moments of the features of the draws.
        adjusted: the adjusted sampler.
        target: of the run.
        start: the last positions (C, D).
        of_all: function that gathers a per-chain tensor from all processes.
    """
    exact = Welford(len(start), draws.mean.shape[1], draws.mean.device)
    adjusted.start(start)
    while adjusted.done < adjusted.total:
        adjusted.advance(lambda: False)
        if adjusted.keeps():
            exact.update(target.features(adjusted.theta))
    width = (of_all(draws.squares).mean(0) / max(1, draws.count - 1)).sqrt().clamp(min=1e-300)
    difference = (of_all(draws.mean) - of_all(exact.mean)) / width
    chains = len(difference)
    error = difference.std(0) / chains**0.5 if chains > 1 else torch.full_like(width, torch.nan)
    mean = difference.mean(0)
    return {
        "iterations": adjusted.done,
        "draws": exact.count,
        # In units of the standard deviation of a prediction within a chain.
        "difference": float(mean.square().mean().sqrt()),
        "standard_error": float(error.square().mean().sqrt()),
        "worst_difference": float(mean.abs().max()),
    }
