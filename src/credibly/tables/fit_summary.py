"""Summary of a fit to a table: the only values that the pages and the command line use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    from credibly.diagnostics.summary import Diagnostics
    from credibly.posterior.base import Posterior
    from credibly.predictive.base import Predictive

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class View:
    """A fit with one or two inputs, all numeric, that can be plotted over them.

    Attributes:
        names: names of the input columns.
        x: training inputs (N, 1 or 2) in their own units.
        y: training targets (N,) in their own units, or class indices.
        predict: maps inputs (M, 1 or 2) to the predictive in the units of the target.
    """

    names: tuple[str, ...]
    x: Array
    y: Array
    predict: Callable[[Array], Predictive]


@dataclass(frozen=True, eq=False)
class FitSummary:
    """Summary of a fit to a table.

    Attributes:
        table: file name.
        target: column that is predicted.
        task: what is predicted: "regression" for numbers, "classification" for classes, "survival" for censored times.
        classes: labels in the order of the probabilities; None unless classes are predicted.
        columns: (name, kind, note) per input column, such as ("age", "numeric", "3 missing, filled with the median").
        rows, held_out: number of training and of held-out rows.
        seed: seed of the split and of the fit.
        method: name in METHODS.
        why: why it was chosen.
        settings: its settings.
        network, prior, noise: descriptions, a phrase each.
        parameters: number of random parameters.
        seconds: duration of the fit.
        on: "held-out" or "training", the rows behind `predictive`, `y` and `figures`.
        predictive: predictive in the units of the target.
        y: targets (M,), or class indices; times are negative if they are censored.
        figures: metrics, as returned by `evaluation.evaluate`.
        baseline: the metrics that apply to a constant prediction: the training mean and standard deviation, or the
            training frequencies of the classes.
        ood, ood_far: `ood` score (0 to 1) of those rows, and of rows with every column shuffled independently, which
            breaks the dependence between columns; None if the method has no epistemic uncertainty.
        diagnostics: diagnostics of the chains at those rows; None unless the method is a sampler.
        posterior: posterior in standardised units, with its record.history.
        view: the fit as a function of its inputs, if there are one or two and all are numeric.
        kind: task of `Recipe`, such as "counts", which is a regression, or "ordinal", a classification; "" for `task`.
        options: options of `credibly fit` that describe the target, such as --event.
    """

    table: str
    target: str
    task: str
    classes: tuple[str, ...] | None
    columns: tuple[tuple[str, str, str], ...]
    rows: int
    held_out: int
    seed: int
    method: str
    why: str
    settings: dict[str, Any]
    network: str
    prior: str
    noise: str
    parameters: int
    seconds: float
    on: str
    predictive: Predictive
    y: Array
    figures: dict[str, float]
    baseline: dict[str, float]
    ood: Array | None
    ood_far: Array | None
    diagnostics: Diagnostics | None
    posterior: Posterior
    view: View | None
    kind: str = ""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", self.task)
