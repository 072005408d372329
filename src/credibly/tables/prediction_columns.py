"""The columns of a prediction file: their names and values, and which columns of the input are carried over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from credibly.core.levels import LEVELS, percent
from credibly.errors import InputError
from credibly.predictive.one_target import one_target
from credibly.tables.targets import check_column

if TYPE_CHECKING:
    from torch import Tensor

    from credibly.predictive.base import Predictive
    from credibly.tables.preparation import Preparation

Array: TypeAlias = npt.NDArray[Any]
# Maps prepared inputs and their predictions to predictions whose intervals keep a promise, or to None if there is none.
Promise: TypeAlias = "Callable[[Array, Predictive], Predictive | None]"

NOTES = "notes"
ALL = "all"
ENTROPIES = ("total", "aleatoric", "epistemic")


def prediction_columns(
    predictive: Predictive,
    preparation: Preparation,
    levels: Sequence[float] = LEVELS,
    promised: Predictive | None = None,
) -> dict[str, Any]:
    """Return the columns of predictions, without `ood` and the notes. Several targets have a set of columns each.

    Regression: `mean`, `std`, its parts `std_aleatoric` and `std_epistemic` (their squares sum to that of `std`), and
    intervals. Classes: `prediction`, `p_<class>`, and `entropy_total`, `entropy_aleatoric` and `entropy_epistemic` in
    nats, of which the first is the sum of the other two; and, of predictions with a promise, `set_90` with the classes
    that the prediction set holds.

    Args:
        predictive: the predictions.
        preparation: the targets and what they are.
        levels: levels of the intervals or prediction sets.
        promised: predictions whose intervals are `lower_90` and `upper_90`. Those of `predictive` are then written
            beside them as `bayes_lower_90` and `bayes_upper_90`. None writes the latter as `lower_90` and `upper_90`.
    """
    targets = preparation.targets
    if len(targets) == 1:
        return _columns(predictive, preparation, levels, promised)
    found: dict[str, Any] = {}
    for k, target in enumerate(targets):
        own = None if promised is None else one_target(promised, k)
        columns = _columns(one_target(predictive, k), preparation, levels, own)
        found |= {f"{name}_{target}": column for name, column in columns.items()}
    return found


def _columns(
    predictive: Predictive, preparation: Preparation, levels: Sequence[float], promised: Predictive | None
) -> dict[str, Any]:
    classes = preparation.classes
    found: dict[str, Any] = {}
    if classes is not None:
        probabilities = predictive.probabilities.double().numpy()
        found["prediction"] = np.asarray(classes, dtype=object)[probabilities.argmax(-1)]
        found |= {f"p_{name}": float32(probabilities[:, k]) for k, name in enumerate(classes)}
        found |= {f"entropy_{part}": float32(getattr(predictive, part).numpy()) for part in ENTROPIES}
        for level in levels if promised is not None else ():
            assert promised is not None
            found[f"set_{percent(level)}"] = _sets(promised.prediction_set(level).cpu().numpy(), classes)
        return found
    if preparation.task == "survival":
        found["median"] = _float64(predictive.quantile(0.5))
    found["mean"], found["std"] = _float64(predictive.mean), float32(predictive.std.numpy())
    for part in ("aleatoric", "epistemic"):
        found[f"std_{part}"] = float32(getattr(predictive, part).sqrt().numpy())
    for level in levels:
        lower, upper = interval_names(level)
        bayes = predictive.interval(level)
        found[lower], found[upper] = map(_float64, bayes if promised is None else promised.interval(level))
        if promised is not None:
            found[f"bayes_{lower}"], found[f"bayes_{upper}"] = map(_float64, bayes)
    return found


def _sets(member: Array, classes: Sequence[str]) -> list[str]:
    """Return the classes of each prediction set, (N, K) booleans, as text."""
    names = np.asarray(classes, dtype=object)
    return [" | ".join(names[row]) for row in member]


def interval_names(level: float) -> tuple[str, str]:
    """Return the names of the columns of a level: ("lower_90", "upper_90"), ("lower_97.5", "upper_97.5")."""
    return f"lower_{percent(level)}", f"upper_{percent(level)}"


def prediction_names(preparation: Preparation, levels: Sequence[float] = LEVELS) -> list[str]:
    """Return the names of all columns that a prediction file may have, including `ood` and the notes."""
    if preparation.classes is not None:
        found = ["prediction", *(f"p_{name}" for name in preparation.classes), *(f"entropy_{p}" for p in ENTROPIES)]
        found += [f"set_{percent(level)}" for level in levels]
    else:
        ends = [name for level in levels for name in interval_names(level)]
        found = ["median"] if preparation.task == "survival" else []
        found += ["mean", "std", "std_aleatoric", "std_epistemic", *ends, *(f"bayes_{name}" for name in ends)]
    targets = preparation.targets
    if len(targets) > 1:
        found = [f"{name}_{target}" for target in targets for name in found]
    return [*found, "ood", NOTES]


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


def float32(values: Array) -> Array:
    """Return values in single precision, which is enough for uncertainties."""
    return values.astype(np.float32)
