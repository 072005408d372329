"""Helpers of the studies that compare methods: settings, labels, multi-panel pictures, formatting of repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from credibly.core.threads import one_thread as one_thread
from credibly.demo.fits import demo_settings
from credibly.methods import METHODS
from credibly.plot import style
from credibly.posterior.base import Posterior
from credibly.problem import Problem
from credibly.report.pictures import Picture, svg_of
from studies.study import mean_error, plus_minus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIX = ("mle", "map", "dropout", "bbb", "ensemble", "hmc")
AVERAGES = ("dropout", "bbb", "ensemble", "hmc")  # the methods that average over models
SETTINGS = (
    "Settings, fixed in advance and the same for every data set: 1,500 Adam steps for the methods that train; dropout "
    "rate 0.1 before the last layer; 10 anchored ensemble members initialised at prior draws; mean-field Bayes by "
    "Backprop; HMC with short trajectories and partial momentum refreshment."
)

Repeats = Sequence[float]


def label(method: str) -> str:
    """Return the label of a method for tables and pictures."""
    return METHODS[method].short_name()


def fit(method: str, problem: Problem, *, seed: int, quick: bool, **settings: Any) -> Posterior:
    """Fit a method with the settings of `credibly demo`, overridden by those given."""
    chosen = demo_settings(method, quick=quick) | settings
    return METHODS[method](**chosen).fit(problem, seed=seed, progress=False)


def panels(
    name: str,
    paint: Callable[[list[Axes]], Any],
    *,
    alt: str,
    title: str = "",
    caption: str = "",
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] = (9.0, 5.6),
    shared: bool = True,
    legend: int = 4,
) -> Picture:
    """Draw several panels in one picture, to compare methods at a glance.

    Args:
        paint: draws on the Axes, which are in reading order.
        shared: whether the panels share their axes, with labels on the outside only.
        legend: columns of the legend below the panels, whose entries are those of the last panel; 0 for none.
    """
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).flat)
        paint(axes)
        if shared:
            for axis in axes:
                axis.label_outer()
        if legend:
            figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=legend)
        return Picture(name, short(svg_of(figure, name)), alt, title, caption)


def short(svg: str) -> str:
    """Round the coordinates of a drawing to 0.01 points: finer than any screen, and half the file size."""
    return re.sub(r'\b(?:d|x|y|points)="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]), svg)


def mean_text(values: Repeats, digits: int = 2) -> str:
    """Format the mean of repeats with its standard error."""
    return plus_minus(*mean_error(list(values)), digits)


def difference(first: Repeats, second: Repeats) -> tuple[float, float]:
    """Return the mean of first - second, paired by repeat, and its standard error."""
    return mean_error([a - b for a, b in zip(first, second, strict=True)])


def above(values: Repeats, limit: float) -> bool:
    """Return whether the mean exceeds the limit by more than two standard errors; always False for a single repeat."""
    mean, error = mean_error(list(values))
    return mean - 2 * error > limit


def listed(parts: Sequence[str]) -> str:
    """Join parts as in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else list(parts))


def verdict(reproduced: bool | None, partly: bool = False) -> str:
    """Return the start of the first sentence; `partly` if some but not all parts of the finding were reproduced."""
    if reproduced is False and partly:
        return "Not fully reproduced"
    return {True: "Reproduced", False: "Not reproduced", None: "Inconclusive"}[reproduced]
