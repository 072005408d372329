"""Data and reference summaries of the posteriors, as files beside this one, and how draws are compared with them.

A comparison is of expectations of four functions of every parameter x, with m and s the reference's mean and standard
deviation and a, b its 5 % and 95 % quantiles:

    (x - m)/s,    (x - m)^2/s^2,    1[x <= a],    1[x <= b]

    z = (mean over the draws - reference) / sqrt(MCSE^2 + MCSE of the reference^2)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from credibly.diagnostics.convergence import mcse

FOLDER = Path(__file__).parent
DATA, SUMMARIES = FOLDER / "data.npz", FOLDER / "references.json"
FUNCTIONS = ("mean", "square", "lower tail", "upper tail")
# Probability that a comparison of one posterior fails although the draws are correct: the limit of the largest |z|.
LEVEL = 1e-3


@dataclass(frozen=True)
class Reference:
    """Summary of reference draws of P parameters.

    Attributes:
        names: of the parameters.
        source: where the draws come from.
        mean, sd, low, high: mean, standard deviation, 5 % and 95 % quantiles, (P,).
        errors: Monte Carlo standard errors of the expectations of the four functions, (4, P).
    """

    names: tuple[str, ...]
    source: str
    mean: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor
    errors: Tensor

    def functions(self, draws: Tensor) -> Tensor:
        """Return the four functions of draws (chain, draw, P): (chain, draw, 4, P)."""
        scaled = (draws - self.mean) / self.sd
        return torch.stack([scaled, scaled.square(), (draws <= self.low).to(draws), (draws <= self.high).to(draws)], -2)

    def expectations(self) -> Tensor:
        """Return the reference's own expectations of the four functions, (4, 1): they follow from its definition."""
        return torch.tensor([0.0, 1.0, 0.05, 0.95], dtype=torch.float64).unsqueeze(1)

    def scores(self, draws: Tensor) -> Tensor:
        """Return z (4, P) of draws (chain, draw, P); infinite where a function is constant over all draws."""
        values = self.functions(draws.double())
        error = torch.hypot(torch.nan_to_num(mcse(values)), self.errors)
        z = (values.mean((0, 1)) - self.expectations()) / error
        constant = values.flatten(0, 1).amin(0) == values.flatten(0, 1).amax(0)
        return torch.where(constant, torch.inf, z)

    @property
    def limit(self) -> float:
        """The largest |z| of correct draws, with probability 1 - LEVEL by Bonferroni's inequality."""
        return float(stats.norm.isf(LEVEL / 2 / (len(FUNCTIONS) * len(self.names))))


def summarise(draws: Tensor, names: tuple[str, ...], source: str) -> Reference:
    """Return the summary of reference draws (chain, draw, P)."""
    flat = draws.double().flatten(0, 1)
    low, high = torch.quantile(flat, torch.tensor([0.05, 0.95], dtype=torch.float64), 0)
    blank = Reference(names, source, flat.mean(0), flat.std(0), low, high, torch.zeros(4, len(names)))
    return Reference(names, source, blank.mean, blank.sd, low, high, mcse(blank.functions(draws.double())))


def to_json(reference: Reference) -> dict[str, Any]:
    """Return the summary as lists, with seven digits."""

    def numbers(values: Tensor) -> list[Any]:
        if values.ndim > 1:
            return [numbers(row) for row in values]
        return [float(f"{v:.7g}") for v in values.tolist()]

    fields = {k: numbers(getattr(reference, k)) for k in ("mean", "sd", "low", "high", "errors")}
    return {"source": reference.source, "names": list(reference.names), **fields}


@cache
def _summaries() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SUMMARIES.read_text())
    return found


def referenced() -> list[str]:
    """Return the posteriors that have a summary of reference draws."""
    return list(_summaries())


def read_reference(posterior: str) -> Reference:
    """Return the stored summary of a posterior."""
    found = dict(_summaries()[posterior])
    values = {k: torch.tensor(found[k], dtype=torch.float64) for k in ("mean", "sd", "low", "high", "errors")}
    return Reference(tuple(found["names"]), found["source"], **values)


@cache
def read_data(posterior: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the data of a posterior, whose name begins with that of its data set."""
    prefix = posterior.rsplit("-", 1)[0] + "/"
    with np.load(DATA, allow_pickle=False) as file:
        return {k.removeprefix(prefix): file[k] for k in file if k.startswith(prefix)}
