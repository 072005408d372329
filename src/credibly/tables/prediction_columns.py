"""The columns of a prediction file: their names and values, and which columns of the input are carried over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from credibly.conformal.predictive import CalibratedPredictive
from credibly.core.levels import LEVELS, percent
from credibly.errors import InputError
from credibly.predictive.one_target import one_target
from credibly.tables.targets.checks import check_column

if TYPE_CHECKING:
    from torch import Tensor

    from credibly.predictive.base import Predictive
    from credibly.tables.preparation import Preparation

Array: TypeAlias = npt.NDArray[Any]
# Maps prepared inputs and their predictions to predictions whose intervals carry a guarantee, or to None if there is
# none.
Promise: TypeAlias = "Callable[[Array, Predictive], Predictive | None]"

NOTES = "notes"
ALL = "all"
ENTROPIES = ("total", "aleatoric", "epistemic")


def prediction_columns(
    predictive: Predictive,
    preparation: Preparation,
    levels: Sequence[float] = LEVELS,
    promised: Predictive | None = None,
    times: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the columns of predictions, without `ood` and the notes. Several targets have a set of columns each.

    Regression: `mean`, `std`, its parts `std_aleatoric` and `std_epistemic` (their squares sum to that of `std`), and
    intervals. Classes: `prediction`, `p_<class>`, and `entropy_total`, `entropy_aleatoric` and `entropy_epistemic` in
    nats, of which the first is the sum of the other two; and, of predictions with a promise, `set_90` with the classes
    that the prediction set holds. Times: `median` and `survival_<t>` too, and with a promise `at_least_90`, which the
    time exceeds.

    Args:
        predictive: the predictions.
        preparation: the targets and what they are.
        levels: levels of the intervals or prediction sets.
        promised: predictions whose intervals are `lower_90` and `upper_90`. Those of `predictive` are then written
            beside them as `bayes_lower_90` and `bayes_upper_90`, and those of several targets together as
            `joint_lower_90` and `joint_upper_90`. None writes the first as `lower_90` and `upper_90`.
        times: of the probabilities of survival.
    """
    targets = preparation.targets
    if preparation.classes is not None:
        return _class_columns(predictive, preparation.classes, levels, promised)
    if preparation.task == "survival":
        return _time_columns(predictive, levels, promised, times)
    if len(targets) == 1:
        bounds = {} if promised is None else {level: promised.interval(level) for level in levels}
        return _number_columns(predictive, levels, bounds)
    found: dict[str, Any] = {}
    each = {} if promised is None else {level: promised.interval(level) for level in levels}
    joint = {level: promised.joint_interval(level) for level in levels} if _jointly(promised) else {}
    for k, target in enumerate(targets):
        own = {level: (lower[:, k], upper[:, k]) for level, (lower, upper) in each.items()}
        columns = _number_columns(one_target(predictive, k), levels, own)
        for level, ends in joint.items():
            for name, bound in zip(interval_names(level), ends):
                columns[f"joint_{name}"] = _float64(bound[:, k])
        found |= {f"{name}_{target}": column for name, column in columns.items()}
    return found


def _jointly(promised: Predictive | None) -> TypeGuard[CalibratedPredictive]:
    """Return whether predictions have joint intervals."""
    return isinstance(promised, CalibratedPredictive) and promised.calibration.settings.score == "pit"


def _class_columns(
    predictive: Predictive, classes: Sequence[str], levels: Sequence[float], promised: Predictive | None
) -> dict[str, Any]:
    probabilities = predictive.probabilities.double().numpy()
    found: dict[str, Any] = {"prediction": np.asarray(classes, dtype=object)[probabilities.argmax(-1)]}
    found |= {f"p_{name}": float32(probabilities[:, k]) for k, name in enumerate(classes)}
    found |= {f"entropy_{part}": float32(getattr(predictive, part).numpy()) for part in ENTROPIES}
    for level in levels if promised is not None else ():
        assert promised is not None
        found[f"set_{percent(level)}"] = _sets(promised.prediction_set(level).cpu().numpy(), classes)
    return found


def _time_columns(
    predictive: Predictive, levels: Sequence[float], promised: Predictive | None, times: Sequence[float]
) -> dict[str, Any]:
    found = {"median": _float64(predictive.quantile(0.5))} | _number_columns(predictive, levels, {})
    for level in levels if isinstance(promised, CalibratedPredictive) else ():
        assert isinstance(promised, CalibratedPredictive)
        found[bound_name(level)] = _float64(promised.lower_bound(level))
    for time in times:
        found[survival_name(time)] = float32(1 - _float64(predictive.cdf(torch.full((len(predictive),), time))))
    return found


def _number_columns(
    predictive: Predictive, levels: Sequence[float], bounds: Mapping[float, tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Return the columns of one target; `bounds` are promised intervals by level, if there are any."""
    found: dict[str, Any] = {"mean": _float64(predictive.mean), "std": float32(predictive.std.numpy())}
    for part in ("aleatoric", "epistemic"):
        found[f"std_{part}"] = float32(getattr(predictive, part).sqrt().numpy())
    for level in levels:
        lower, upper = interval_names(level)
        bayes = predictive.interval(level)
        found[lower], found[upper] = map(_float64, bounds.get(level, bayes))
        if level in bounds:
            found[f"bayes_{lower}"], found[f"bayes_{upper}"] = map(_float64, bayes)
    return found


def _sets(member: Array, classes: Sequence[str]) -> list[str]:
    """Return the classes of each prediction set, (N, K) booleans, as text."""
    names = np.asarray(classes, dtype=object)
    return [" | ".join(names[row]) for row in member]


def interval_names(level: float) -> tuple[str, str]:
    """Return the names of the columns of a level: ("lower_90", "upper_90"), ("lower_97.5", "upper_97.5")."""
    return f"lower_{percent(level)}", f"upper_{percent(level)}"


def bound_name(level: float) -> str:
    """Return the name of the column of a lower bound: "at_least_90"."""
    return f"at_least_{percent(level)}"


def survival_name(time: float) -> str:
    """Return the name of the column with the probability of surviving a time: "survival_12"."""
    return f"survival_{time:.10g}"


def check_times(name: str, times: Iterable[Any]) -> tuple[float, ...]:
    """Return times as floats. Raise unless all are positive and finite, and no two the same."""
    found: list[float] = []
    for time in times:
        try:
            value = float(time)
        except (TypeError, ValueError):
            value = float("nan")
        if not 0 < value < float("inf"):
            raise InputError(name, f"must be positive times such as 12,24, got {time!r}")
        if survival_name(value) in map(survival_name, found):
            raise InputError(name, f"must be different times, got {value:g} twice")
        found.append(value)
    return tuple(found)


def prediction_names(
    preparation: Preparation, levels: Sequence[float] = LEVELS, times: Sequence[float] = ()
) -> list[str]:
    """Return the names of all columns that a prediction file may have, including `ood` and the notes."""
    if preparation.classes is not None:
        found = ["prediction", *(f"p_{name}" for name in preparation.classes), *(f"entropy_{p}" for p in ENTROPIES)]
        found += [f"set_{percent(level)}" for level in levels]
    else:
        ends = [name for level in levels for name in interval_names(level)]
        found = ["mean", "std", "std_aleatoric", "std_epistemic", *ends, *(f"bayes_{name}" for name in ends)]
    if preparation.task == "survival":
        found = ["median", *found, *map(bound_name, levels), *map(survival_name, times)]
    targets = preparation.targets
    if len(targets) > 1:
        found += [f"joint_{name}" for level in levels for name in interval_names(level)]
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
