"""The reject option of a run: which rows not to predict, so that few predictions of the others are wrong.

The thresholds come from the rows that the fits of the folds have not seen: see `credibly.decide.selective`. What is
wrong is a class other than the most probable one, or a number farther from the mean than a tolerance.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from credibly.decide.rejection import Selection, selective_threshold
from credibly.errors import InputError
from credibly.predictive.transformed import near_limits
from credibly.tables.model import Array
from credibly.tables.prediction_columns import prediction_columns
from credibly.tables.preparation import Preparation
from credibly.tables.run import TableRun

# Thresholds that are kept: requests may ask for any risk.
KEPT = 64


class RejectOption:
    """Thresholds on the uncertainty of a run, from its held-out rows.

    Args:
        uncertainty: of each held-out row, as `uncertainty_of` returns it.
        errors: whether the class is wrong, or the absolute error of the number.
        classes: which of the two.
    """

    def __init__(self, uncertainty: Array, errors: Array, *, classes: bool) -> None:
        self.uncertainty = uncertainty
        self.errors = errors
        self.classes = classes
        self._kept: OrderedDict[tuple[float, float, float | None], Selection] = OrderedDict()

    @classmethod
    def of(cls, run: TableRun) -> RejectOption | None:
        """Return the reject option of a run; None without held-out rows, for several targets and censored times."""
        known = run.model.preparation
        rows, on = run.rows()
        if on == "training" or len(known.targets) > 1 or known.task == "survival":
            return None
        columns = prediction_columns(run.predict_rows(run.model.inputs(rows)[0]), known)
        y = known.target_values(rows)
        if known.classes is not None:
            wrong = columns["prediction"] != np.asarray(known.classes, dtype=object)[y]
            return cls(uncertainty_of(columns, known), wrong.astype(bool), classes=True)
        return cls(uncertainty_of(columns, known), np.abs(columns["mean"] - y), classes=False)

    def select(self, risk: float, confidence: float, tolerance: float | None) -> Selection:
        """Return the threshold that guarantees a risk."""
        if self.classes and tolerance is not None:
            raise InputError("tolerance", "is for numeric targets, but the run predicts classes", "Leave it out")
        if not self.classes and tolerance is None:
            found = "needs a tolerance, as the run predicts numbers"
            raise InputError("risk", found, "Pass tolerance, the error from which on a prediction is wrong")
        asked = risk, confidence, tolerance
        if asked not in self._kept:
            wrong = self.errors if tolerance is None else self.errors > tolerance
            self._kept[asked] = selective_threshold(
                torch.from_numpy(self.uncertainty),
                torch.from_numpy(np.asarray(wrong)),
                risk=risk,
                confidence=confidence,
                score="max_probability" if self.classes else "total",
            )
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[asked]


def uncertainty_of(columns: dict[str, Any], known: Preparation) -> Array:
    """Return the uncertainty of rows from their predictions: one minus the highest probability, or the std.

    It is infinite where the mean is close to a limit of the target's transform, where the std is clipped to 0.
    """
    if known.classes is None:
        far = near_limits(torch.from_numpy(np.asarray(columns["mean"], dtype=np.float64)), known.transforms).numpy()
        return np.where(far, np.inf, np.asarray(columns["std"], dtype=np.float64))
    found: Array = 1 - np.max([np.asarray(columns[f"p_{name}"], dtype=np.float64) for name in known.classes], axis=0)
    return found


def abstention_facts(selection: Selection) -> dict[str, Any]:
    """Return the values in a response that describe the guarantee, as plain JSON."""
    return {
        "risk": selection.risk,
        "confidence": selection.confidence,
        "accepted_fraction": selection.coverage,
        "wrong_among_accepted": selection.mistakes,
        "held_out_rows": selection.rows,
        "risk_bound": None if math.isnan(selection.bound) else selection.bound,
    }
