"""What the studies that put methods side by side share: their settings, their names, panels of one figure, repeats as text."""

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

NAMES = {
    "mle": "MLE",
    "map": "MAP",
    "dropout": "MC-Dropout",
    "bbb": "Bayes by Backprop",
    "ensemble": "deep ensemble",
    "laplace": "Laplace",
    "swag": "SWAG",
    "hmc": "HMC",
    "sghmc": "SGHMC",
    "sgld": "SGLD",
}
SIX = ("mle", "map", "dropout", "bbb", "ensemble", "hmc")
AVERAGES = ("dropout", "bbb", "ensemble", "hmc")  # those that average over models
SETTINGS = (
    "Settings, the same for every data set and fixed beforehand: 1,500 steps of Adam for the methods that train; dropout of 0.1 "
    "before the last layer; 10 anchored members started at draws of the prior; mean-field Bayes by Backprop; HMC with short "
    "trajectories that keep most of their momentum."
)

Repeats = Sequence[float]


def fit(method: str, problem: Problem, *, seed: int, quick: bool, **settings: Any) -> Posterior:
    """A method fitted with the settings of `credibly demo`, and those given over them."""
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
    """Several panels in one picture, so that methods are compared at a glance.

    Args:
        paint: draws on the Axes, which come in reading order.
        shared: whether they have the same ranges, with labels on the outside only.
        legend: columns of the key below all panels, which explains what is on the last one; 0 for none.
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
    """The drawing with coordinates to a hundredth of a point: finer than any screen, in half of the text."""
    return re.sub(r'\b(?:d|x|y|points)="[^"]*"', lambda d: re.sub(r"(\.\d\d)\d+", r"\1", d[0]), svg)


def told(values: Repeats, digits: int = 2) -> str:
    """Repeats as their mean with its standard error."""
    return plus_minus(*mean_error(list(values)), digits)


def difference(first: Repeats, second: Repeats) -> tuple[float, float]:
    """The mean of first - second, repeat by repeat, and its standard error."""
    return mean_error([a - b for a, b in zip(first, second, strict=True)])


def above(values: Repeats, limit: float) -> bool:
    """Whether the mean lies above the limit by more than two standard errors; never for a single repeat."""
    mean, error = mean_error(list(values))
    return mean - 2 * error > limit


def listed(parts: Sequence[str]) -> str:
    """Parts as a sentence has them: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else list(parts))


def first_words(held: bool | None) -> str:
    """How the first sentence begins."""
    return {True: "The finding held", False: "The finding did not hold", None: "The numbers cannot tell"}[held]
