"""Whether an ensemble may replace chains that would not mix in time: only if it predicts unseen rows as well.

Both are fitted to the same folds of the table, the chains as the folds of a final fit would have them, so that these
fits are reused there. Chains that have not mixed are not draws from the posterior, and the report says so; but they may
predict better than anything else that there is time for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.threads import torch_threads
from credibly.inference.method import Method
from credibly.methods import DeepEnsemble
from credibly.posterior.base import Posterior
from credibly.tables.choices.batches import with_smaller_batch
from credibly.tables.folds import fold_method
from credibly.tables.model import TableModel
from credibly.tables.prepared import Prepared
from credibly.tables.splitting import choice_folds
from credibly.tables.threads import threads_for
from credibly.tables.weighted_scores import standard_error, weighted_mean

Array = npt.NDArray[Any]

# Number of folds, out of five, whose rows are predicted by both.
FOLDS = 3
# Members of the ensembles.
MEMBERS = 5
# Standard errors of the mean difference by which an ensemble may be behind.
TIED = 2.0
# Standard errors behind on one fold from which no choice of an ensemble's settings would help.
HOPELESS = 3.0
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

    @property
    def hopeless(self) -> bool:
        """Whether the ensemble is so far behind that another one would not make up for it."""
        return self.difference < -HOPELESS * self.error


@dataclass(eq=False)
class FoldFits:
    """Fits of a prepared table to its folds, made when they are needed and kept.

    Attributes:
        prepared: the table.
        posteriors: the fits so far, by fold.
    """

    prepared: Prepared
    posteriors: dict[int, Posterior] = field(default_factory=dict)

    @property
    def splits(self) -> int:
        """Number of fits that there can be."""
        return len(self._splits)

    def densities(self, fold: int) -> Array:
        """Return log predictive densities, in the units of the target, of the rows that a fold leaves out."""
        prepared = self.prepared
        fitted, predicted = self._splits[fold]
        if fold not in self.posteriors:
            problem = prepared.problem_of(fitted)
            method = with_smaller_batch(_shorter(prepared.method), problem.n)
            with torch_threads(threads_for(problem, method)):
                self.posteriors[fold] = method.fit(problem, seed=prepared.config.seed, progress=False)
        others, model = prepared.data.at(predicted), TableModel(prepared.preparation, self.posteriors[fold])
        values = model.predict(others.x).log_prob(torch.from_numpy(others.y)).double().numpy()
        finite: Array = np.clip(np.nan_to_num(values.reshape(len(predicted), -1).sum(-1), nan=LEAST), LEAST, None)
        return finite

    def weight(self, folds: int) -> Array | None:
        """Return the weights of the rows that the first folds leave out; None for ones."""
        weight = self.prepared.data.weight
        return None if weight is None else weight[np.concatenate([rows for _, rows in self._splits[:folds]])]

    def for_final_fit(self) -> dict[int, Posterior]:
        """Return the fits that those to the folds of the final fit would repeat; none if rows have missing cells."""
        same = len(self.prepared.splits) > 1 and self.prepared.data.gaps is None
        return dict(self.posteriors) if same and not isinstance(self.prepared.method, DeepEnsemble) else {}

    @property
    def _splits(self) -> Sequence[tuple[Array, Array]]:
        prepared = self.prepared
        return prepared.splits if len(prepared.splits) > 1 else choice_folds(prepared.data.rows, prepared.config.seed)


def compare(chains: FoldFits, ensemble: FoldFits, folds: int = FOLDS) -> Comparison:
    """Compare how fits to some folds of the table predict the other rows, by weighted means if rows have weights.

    With times, every fold predicts later rows from all earlier ones.
    """
    folds = min(folds, chains.splits)
    gain = np.concatenate([ensemble.densities(fold) - chains.densities(fold) for fold in range(folds)])
    weight = chains.weight(folds)
    if weight is not None and weight.any():
        gain, weight = gain[weight > 0], weight[weight > 0]
    error = standard_error(gain, weight) if len(gain) > 1 else 0.0
    return Comparison(weighted_mean(gain, weight), error)


def _shorter(method: Method) -> Method:
    if isinstance(method, DeepEnsemble):
        return dataclasses.replace(method, members=min(MEMBERS, method.members))
    return fold_method(method, FOLDS)
