"""What there is to tell about a fit to a table. The pages and the command line read these values and nothing else."""

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
    """The whole fit where the table has one or two numeric inputs and no other: what a picture of it needs.

    Attributes:
        names: of the input columns.
        x: training inputs (N, 1 or 2) in their own units.
        y: training targets (N,) in their own units, or class numbers.
        predict: the predictive at such inputs (M, 1 or 2), in the target's own units.
    """

    names: tuple[str, ...]
    x: Array
    y: Array
    predict: Callable[[Array], Predictive]


@dataclass(frozen=True, eq=False)
class Facts:
    """A fit to a table, as told to the user.

    Attributes:
        table: the file's name. target: the column that is predicted. task: "regression" or "classification".
        classes: the labels in the order of the probabilities; None for a regression.
        columns: each input column with what was done with it, such as ("age", "numeric", "3 missing, filled with the median").
        rows, held_out: how many rows were fitted and kept back. seed: of everything.
        method: its name in METHODS. why: the reason it was taken. settings: as it ran.
        network, prior, noise: each a phrase for people. parameters: the number of random ones.
        seconds: of the fit.
        on: "held-out" or "training": the rows that `predictive`, `y` and `figures` are of.
        predictive: in the units of the target. y: its targets (M,), or class numbers.
        figures: as `evaluation.evaluate` gives them. baseline: the same figures (those that make sense) of always predicting
            the training mean and deviation, or the training shares of the classes.
        ood, ood_far: the `ood` score (0 to 1) of those rows, and of rows made by shuffling every column by itself, which
            breaks the ties between columns; None where the method has no epistemic uncertainty.
        diagnostics: of the chains at those rows, for samplers. posterior: in standardised units, with its record.history.
        view: where the table has one or two numeric inputs and no other.
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
