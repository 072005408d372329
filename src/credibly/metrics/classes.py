"""Metrics per class: recall, precision, F1, ROC AUC, average precision. They show what accuracy hides for rare classes.

With one-versus-rest counts of class k, for the most probable class as the answer,

    recall = TP / (TP + FN),   precision = TP / (TP + FP),   F1 = 2 TP / (2 TP + FP + FN).

ROC AUC and average precision use the probability of class k, so they do not depend on a threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from credibly.core.checks import check_integer
from credibly.errors import InputError
from credibly.metrics.scores import aupr, auroc


class ClassMetrics(NamedTuple):
    """Metrics per class, each (K,) in float64. NaN where undefined: a class without rows, or one never predicted.

    Attributes:
        rows: rows of the class.
        predicted: rows for which it is the most probable class.
        recall: fraction of its rows for which it is the most probable class.
        precision: fraction of the rows predicted as it that are of it.
        f1: harmonic mean of recall and precision; 0 for a class with rows of which none is found.
        roc_auc: probability that a row of the class has a higher probability of it than a row of another class.
        average_precision: area under the precision-recall curve; the frequency of the class for no skill.
    """

    rows: Tensor
    predicted: Tensor
    recall: Tensor
    precision: Tensor
    f1: Tensor
    roc_auc: Tensor
    average_precision: Tensor

    @property
    def frequency(self) -> Tensor:
        """Fraction of the rows that are of each class, (K,)."""
        return self.rows / self.rows.sum()

    @property
    def balanced_accuracy(self) -> Tensor:
        """Mean recall of the classes that have rows."""
        return self.recall[self.rows > 0].mean()


def confusion_matrix(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return how many rows of each class (first axis) have each most probable class (second axis), (K, K)."""
    p, y = _checked(probabilities, labels)
    k = p.shape[-1]
    return torch.bincount(y * k + p.argmax(-1), minlength=k * k).reshape(k, k)


def class_metrics(probabilities: Tensor, labels: Tensor) -> ClassMetrics:
    """Return the metrics of each class from probabilities (N, K) and labels (N,)."""
    p, y = _checked(probabilities, labels)
    table = confusion_matrix(p, y).double().cpu()
    found, rows, predicted = table.diagonal(), table.sum(1), table.sum(0)
    areas = torch.full((2, p.shape[-1]), torch.nan, dtype=torch.float64)
    for k in range(p.shape[-1]):
        own = y == k
        if bool(own.any()) and not bool(own.all()):
            areas[0, k], areas[1, k] = (float(area(p[~own, k], p[own, k])) for area in (auroc, aupr))
    f1 = torch.where(rows > 0, 2 * found / (rows + predicted), torch.nan)
    return ClassMetrics(rows, predicted, found / rows, found / predicted, f1, areas[0], areas[1])


def summary_of_classes(found: ClassMetrics) -> dict[str, float]:
    """Return balanced accuracy, ROC AUC and average precision: of the rarer of two classes, else the mean over classes.

    Without rows of at least two classes there are none.
    """
    present = found.rows > 0
    if int(present.sum()) < 2:
        return {}
    chosen = present
    if len(present) == 2:
        # Equally frequent: the second, the usual positive class.
        chosen = torch.arange(2) == rare_class(found)
    return {
        "balanced_accuracy": float(found.balanced_accuracy),
        "roc_auc": float(found.roc_auc[chosen].mean()),
        "average_precision": float(found.average_precision[chosen].mean()),
    }


def rare_class(found: ClassMetrics) -> int:
    """Return the class with the fewest rows; the last of equally frequent ones."""
    check_integer("classes", len(found.rows), least=2)
    return len(found.rows) - 1 - int(found.rows.flip(0).argmin())


def _checked(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(probabilities, Tensor) or probabilities.ndim != 2 or probabilities.shape[1] < 2:
        found = str(tuple(probabilities.shape)) if isinstance(probabilities, Tensor) else type(probabilities).__name__
        raise InputError("probabilities", f"must be a tensor (N, K) of at least two classes, got {found}")
    if not isinstance(labels, Tensor) or labels.shape != probabilities.shape[:1] or labels.is_floating_point():
        found = f"{tuple(labels.shape)} of {labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError("labels", f"must be an integer tensor ({len(probabilities)},), got {found}")
    y = labels.long()
    if len(y) == 0 or not 0 <= int(y.min()) <= int(y.max()) < probabilities.shape[1]:
        found = f"got {'none' if len(y) == 0 else f'values from {int(y.min())} to {int(y.max())}'}"
        raise InputError("labels", f"must be from 0 to {probabilities.shape[1] - 1}, {found}")
    return probabilities, y
