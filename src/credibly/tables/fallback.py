"""Whether an ensemble may replace chains that would not mix in time: only if it predicts unseen rows as well.

Both are fitted to the same folds of the table, the chains as the folds of a final fit would have them. Chains that have
not mixed are not draws from the posterior, and the report says so; but they may predict better than anything else that
there is time for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.threads import torch_threads
from credibly.inference.method import Method
from credibly.methods import DeepEnsemble
from credibly.tables.folds import fold_method
from credibly.tables.model import TableModel
from credibly.tables.prepared import Prepared
from credibly.tables.splitting import folds_of
from credibly.tables.threads import threads_for

Array = npt.NDArray[Any]

# Number of folds, out of five, whose rows are predicted by both.
FOLDS = 3
# Members of the ensembles.
MEMBERS = 5
# Standard errors of the mean difference by which an ensemble may be behind.
TIED = 2.0
# Smallest log density that counts, so that a mean exists.
LEAST = -1e4


@dataclass(frozen=True)
class Comparison:
    """Log predictive density per unseen row, ensemble minus chains.

    Attributes:
        difference: its mean.
        error: the standard error of the mean, by paired rows.
    """

    difference: float
    error: float

    @property
    def replaces(self) -> bool:
        """Whether the ensemble is at least as good within two standard errors."""
        return self.difference >= -TIED * self.error


def compare(chains: Prepared, ensemble: Prepared) -> Comparison:
    """Fit both to some folds of the table and compare how they predict the other rows."""
    gains = []
    for fitted, predicted in folds_of(chains.data.rows, chains.config.seed)[:FOLDS]:
        ours, theirs = (_densities(one, _shorter(one.method), fitted, predicted) for one in (chains, ensemble))
        gains.append(theirs - ours)
    gain = np.concatenate(gains)
    error = float(gain.std(ddof=1) / np.sqrt(len(gain))) if len(gain) > 1 else 0.0
    return Comparison(float(gain.mean()), error)


def _shorter(method: Method) -> Method:
    if isinstance(method, DeepEnsemble):
        return dataclasses.replace(method, members=min(MEMBERS, method.members))
    return fold_method(method, FOLDS)


def _densities(prepared: Prepared, method: Method, fitted: Array, predicted: Array) -> Array:
    """Return log predictive densities, in the units of the target, of rows that the fit does not see."""
    problem = prepared.problem_of(fitted)
    with torch_threads(threads_for(problem, method)):
        posterior = method.fit(problem, seed=prepared.config.seed, progress=False)
    others = prepared.data.at(predicted)
    found = TableModel(prepared.preparation, posterior).predict(others.x).log_prob(torch.from_numpy(others.y))
    values = found.double().numpy().reshape(len(predicted), -1).sum(-1)
    finite: Array = np.clip(np.nan_to_num(values, nan=LEAST), LEAST, None)
    return finite
