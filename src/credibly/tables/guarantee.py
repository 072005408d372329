"""Intervals and prediction sets of a table with a coverage guarantee, from the rows of its folds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from credibly.conformal.calibration import Calibration, calibrate, cross_calibrate, has_labels, label_indices
from credibly.conformal.counts import covered, randomised_threshold, steps_of
from credibly.conformal.predictive import CalibratedPredictive
from credibly.conformal.ranks import rank, rows_needed
from credibly.errors import InputError
from credibly.predictive.base import Predictive
from credibly.predictive.joined import JoinedPredictive
from credibly.tables.model import LEVEL, Array, TableModel

# Fewest rows that a guarantee is made from: with fewer its intervals would be very wide.
FEWEST = 50


def calibration_of(predictive: Predictive, y: Array, fold: Array) -> Calibration | None:
    """Return the scores of rows under the fits that have not seen them; None if there are too few rows for them.

    Args:
        predictive: predictions of the rows by those fits.
        y: their targets.
        fold: the fold of each row.
    """
    if len(y) < FEWEST:
        return None
    if not isinstance(predictive, JoinedPredictive):
        return calibrate(predictive, torch.from_numpy(y))
    rows = [np.flatnonzero(fold == k) for k in range(int(fold.max()) + 1)]
    parts = [(predictive.subset(torch.from_numpy(own)), torch.from_numpy(y[own])) for own in rows]
    return cross_calibrate(parts)


def guaranteed(
    model: TableModel, inputs: Array, predictive: Predictive, *, allow_empty: bool = False
) -> CalibratedPredictive | None:
    """Return predictions at prepared inputs whose intervals and sets carry a guarantee; None if there is none.

    With one held-out part, those are of the fit without it; otherwise of all folds together. `allow_empty` is that of
    `Settings`.
    """
    if model.calibration is None:
        return None
    settings = dataclasses.replace(model.calibration.settings, allow_empty=allow_empty)
    calibration = dataclasses.replace(model.calibration, settings=settings)
    parts = [dataclasses.replace(model, posterior=posterior).predict(inputs) for posterior in model.folds]
    if calibration.folds:
        return CalibratedPredictive(predictive, calibration, folds=parts)
    return CalibratedPredictive(parts[0] if parts else predictive, calibration)


def check_promise(argument: str, level: float, rows: int) -> None:
    """Raise unless a run has enough calibration rows for a level."""
    if rows < rows_needed(level):
        found = f"a guarantee of {level:g} needs {rows_needed(level):,} calibration rows, this run has {rows:,}"
        advice = f"Pass a level of at most {rows / (rows + 1):.3g}, or fit with --no-conformal for posterior intervals"
        raise InputError(argument, found, advice)


def measured_coverage(calibration: Calibration, level: float = LEVEL, *, joint: bool = False) -> float | None:
    """Return the fraction of rows inside intervals whose width the rows of other folds determine.

    Without folds the two halves of the rows take their place. Several targets are averaged, or with `joint` counted if
    all of them are inside their joint intervals. A time is inside if it exceeds its lower bound. None if a fold leaves
    too few rows to determine a width, as a large group does.
    """
    if not _measurable(calibration, level):
        return None
    return float(_inside(calibration, level, joint).double().mean())


def _inside(calibration: Calibration, level: float, joint: bool = False) -> torch.Tensor:
    """Return whether each row is inside, (rows, targets)."""
    scores = calibration.scores_at(level).reshape(calibration.rows, -1)
    scores = scores.amax(1, keepdim=True) if joint else scores
    inside = torch.empty_like(scores, dtype=torch.bool)
    for own, others in _parts(calibration):
        limit = scores[others].sort(0).values[rank(int(others.sum()), level) - 1]
        inside[own] = scores[own] <= limit
    return inside


def _measurable(calibration: Calibration, level: float) -> bool:
    """Return whether the rows outside every fold are enough for the level."""
    return all(int(others.sum()) >= rows_needed(level) for _, others in _parts(calibration))


def _parts(calibration: Calibration) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the rows of each fold, or of each half, and the others, as masks."""
    fold = calibration.fold if calibration.fold is not None else torch.arange(calibration.rows) % 2
    yield from ((fold == k, fold != k) for k in fold.unique())


def guarantee_facts(
    calibration: Calibration | None, predictive: Predictive, y: Array, fold: Array, level: float = LEVEL
) -> dict[str, Any] | None:
    """Return the values that a report shows on the guarantee; None if there is none.

    Classes and counts have two values. `measured` is of sets and intervals that are randomised, which can cover exactly
    what is promised. `measured_given` is of those that `predict` writes: sets with at least one class, intervals with
    both ends. They cover at least as much, by construction. If coverage cannot be measured, `measured` is None.

    Args:
        calibration: scores of the rows, fold by fold.
        predictive: predictions of the rows by the fits that have not seen them, in the order of the table.
        y: their targets.
        fold: the fold of each row.
        level: the coverage promised.
    """
    if calibration is None:
        return None
    kind = "cross-conformal" if calibration.folds else "split conformal"
    if not _measurable(calibration, level):
        return {"level": level, "measured": None, "rows": calibration.rows, "kind": kind}
    several = calibration.settings.score == "pit" and calibration.scores.ndim > 1
    found = {
        "level": level,
        "measured": measured_coverage(calibration, level),
        "rows": calibration.rows,
        "kind": kind,
        **({"measured_jointly": measured_coverage(calibration, level, joint=True)} if several else {}),
    }
    order = torch.from_numpy(np.argsort(fold, kind="stable"))
    if has_labels(predictive):
        right = label_indices(predictive, predictive.prepared(y)) == predictive.probabilities.argmax(-1).cpu()
        # An empty set is given the most probable class.
        given = _inside(calibration, level) | right[order].reshape(calibration.rows, -1)
        found["measured_given"] = float(given.double().mean())
    elif predictive.likelihood.support == "count" and not several:
        steps = steps_of(predictive, y)[:, order]
        parts = [
            covered(steps[:, own], randomised_threshold(steps[:, rest], level)) for own, rest in _parts(calibration)
        ]
        found |= {"measured_given": found["measured"], "measured": float(torch.cat(parts).mean())}
    return found
