"""The columns of a prediction file: their names and values, and which columns of the input are carried over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from credibly.core.levels import LEVELS, percent
from credibly.errors import InputError
from credibly.tables.targets import check_column

if TYPE_CHECKING:
    from torch import Tensor

    from credibly.predictive.base import Predictive

Array: TypeAlias = npt.NDArray[Any]
# Maps predictions and a level to the lower and upper ends of an interval, as `Predictive.interval` does.
IntervalFunction: TypeAlias = "Callable[[Predictive, float], tuple[Tensor, Tensor]]"

NOTES = "notes"
ALL = "all"


def prediction_columns(
    predictive: Predictive,
    classes: Sequence[str] | None,
    ood: Array | None,
    levels: Sequence[float] = LEVELS,
    interval: IntervalFunction | None = None,
) -> dict[str, Any]:
    """Return the columns of predictions, without the notes.

    Regression: `mean`, `std`, its parts `std_aleatoric` and `std_epistemic` (their squares sum to that of `std`), and
    intervals. Classes: `prediction`, `p_<class>`, and `entropy_total`, `entropy_aleatoric` and `entropy_epistemic` in
    nats, of which the first is the sum of the other two. Both end with `ood`.

    Args:
        predictive: the predictions.
        classes: the labels in the order of the probabilities; None for regression.
        ood: score of each row; None if the method has none.
        levels: levels of the intervals, ignored for classes.
        interval: what `lower_90` and `upper_90` come from. The Bayesian ends are then written beside them as
            `bayes_lower_90` and `bayes_upper_90`. None writes the Bayesian ones alone.
    """
    found: dict[str, Any] = {}
    if classes is not None:
        probabilities = predictive.probabilities.double().numpy()
        found["prediction"] = np.asarray(classes, dtype=object)[probabilities.argmax(-1)]
        found |= {f"p_{name}": _float32(probabilities[:, k]) for k, name in enumerate(classes)}
        for part in ("total", "aleatoric", "epistemic"):
            found[f"entropy_{part}"] = _float32(getattr(predictive, part).numpy())
    else:
        found["mean"], found["std"] = _float64(predictive.mean), _float32(predictive.std.numpy())
        found["std_aleatoric"], found["std_epistemic"] = (
            _float32(part.sqrt().numpy()) for part in (predictive.aleatoric, predictive.epistemic)
        )
        found |= _interval_columns(predictive, levels, interval)
    found["ood"] = [None] * len(predictive) if ood is None else _float32(ood)
    return found


def _interval_columns(
    predictive: Predictive, levels: Sequence[float], interval: IntervalFunction | None
) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for level in levels:
        lower, upper = _interval_names(level)
        bayes = predictive.interval(level)
        found[lower], found[upper] = map(_float64, bayes if interval is None else interval(predictive, level))
        if interval is not None:
            found[f"bayes_{lower}"], found[f"bayes_{upper}"] = map(_float64, bayes)
    return found


def _interval_names(level: float) -> tuple[str, str]:
    return f"lower_{percent(level)}", f"upper_{percent(level)}"


def prediction_names(
    classes: Sequence[str] | None, levels: Sequence[float] = LEVELS, *, both_intervals: bool = False
) -> list[str]:
    """Return the names of all columns that a prediction file has, including the notes."""
    if classes is not None:
        entropies = [f"entropy_{part}" for part in ("total", "aleatoric", "epistemic")]
        return ["prediction", *(f"p_{name}" for name in classes), *entropies, "ood", NOTES]
    ends = [name for level in levels for name in _interval_names(level)]
    ends += [f"bayes_{name}" for name in ends] if both_intervals else []
    return ["mean", "std", "std_aleatoric", "std_epistemic", *ends, "ood", NOTES]


def kept_columns(
    option: str, wanted: Sequence[str], available: Sequence[str], predictions: Collection[str]
) -> list[str]:
    """Return the columns of a file to carry over, in the order asked for; ("all",) is every column.

    Raise if one does not exist, is named twice or has the name of a column of predictions.
    """
    chosen = list(available) if tuple(wanted) == (ALL,) else list(wanted)
    for column in chosen:
        check_column(option, column, list(available))
        if chosen.count(column) > 1:
            raise InputError(option, f"must name every column once, got {column!r} twice")
    taken = [repr(column) for column in chosen if column in predictions]
    if taken:
        what = "is also the name of a column" if len(taken) == 1 else "are also names of columns"
        advice = "Rename it in the table, or list the columns to keep without it"
        raise InputError(option, f"{', '.join(taken)} {what} of predictions", advice)
    return chosen


def _float64(values: Tensor) -> Array:
    found: Array = values.double().numpy()
    return found


def _float32(values: Array) -> Array:
    return values.astype(np.float32)
