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
    from credibly.tables.effects import Effect
    from credibly.tables.importance import Importance

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


@dataclass(frozen=True)
class Candidate:
    """A candidate of a choice made before the fit, such as a prior scale or a transformation of the target.

    Attributes:
        name: name in the report.
        score: its score on the folds; higher is better.
        error: standard error of the score, or of its difference to the best; NaN if unknown.
        chosen: whether the fit uses it.
    """

    name: str
    score: float
    error: float
    chosen: bool = False


@dataclass(frozen=True, eq=False)
class FitSummary:
    """Summary of a fit to a table.

    Attributes:
        table: file name.
        target: column that is predicted.
        task: what is predicted: "regression" for numbers, "classification" for classes, "survival" for censored times.
        classes: labels in the order of the probabilities; None unless classes are predicted.
        columns: (name, kind, note) per input column, such as ("age", "numeric", "3 missing, completed from similar
            rows").
        rows, held_out: number of training and of held-out rows.
        seed: seed of the split and of the fit.
        method: name in METHODS.
        why: why it was chosen.
        settings: its settings.
        network, prior, noise: descriptions, a phrase each.
        parameters: number of random parameters.
        seconds: duration of the fit.
        on: the rows behind `predictive`, `y` and `figures`: "held-out", "training", "cross-validated" (every row is
            predicted by a fit that has not seen it) or "new" (rows of another table, named in `evaluated`).
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
        evaluated: name of the table of the evaluated rows, where it is another one.
        baseline_density: log density of the constant prediction per row, (M,); None if unknown.
        class_weight: weights of the classes in the fit, such as "balanced".
        guarantee: coverage promised and measured, as {"level": 0.9, "measured": 0.904, "rows": n, "kind":
            "cross-conformal"}, for classes and counts with "measured_given"; None without a guarantee.
        warnings: warnings about the table from before the fit, a sentence each.
        choices: candidates that were compared on folds before the fit.
        refitted: whether the rows behind the metrics were held out of other fits only, and the fit itself has all rows.
        importance: permutation importance of the columns; None if it was not computed.
        effects: effect curves of the most important columns, with an output for each of several targets.
        target_importance: importance of the columns for each of several targets, in the summary of all of them.
        kind: task of `Recipe`, such as "counts", which is a regression, or "ordinal", a classification; "" for `task`.
        options: options of `credibly fit` that describe the data, such as --event and --group.
        group: column whose groups stayed together when rows were held out; None for none.
        time: column whose latest rows were held out; None for none.
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
    evaluated: str = ""
    baseline_density: Array | None = None
    class_weight: str | None = None
    guarantee: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    choices: tuple[Candidate, ...] = ()
    refitted: bool = False
    importance: Importance | None = None
    effects: tuple[Effect, ...] = ()
    target_importance: tuple[Importance, ...] = ()
    kind: str = ""
    options: tuple[str, ...] = ()
    group: str | None = None
    time: str | None = None

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", self.task)
