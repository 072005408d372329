"""The section that plots the fitted function over its inputs, for tables with one or two numeric columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from credibly import plot
from credibly.report.page import Section
from credibly.report.pictures import Picture, picture
from credibly.report.row_statistics import POINTS
from credibly.tables.fit_summary import FitSummary, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Grid points of a map along either input.
MAP_SIDE = 61
# Grid points of a curve.
CURVE_POINTS = 240
# Margin around the data, as a fraction of its range.
MARGIN = 0.15


def function_section(facts: FitSummary) -> Section | None:
    """Plot the fit over its one or two inputs, slightly beyond the data."""
    view = facts.view
    if view is None or len(view.x) == 0:
        return None
    draw = _curve if view.x.shape[1] == 1 else _maps
    pictures, text = draw(facts, _subsample(view))
    beyond = "The plot extends slightly beyond the data: a model that knows its limits becomes less confident there."
    return Section("The fit", (text, beyond), pictures=pictures)


def _subsample(view: View) -> View:
    indices = np.linspace(0, len(view.x) - 1, min(len(view.x), POINTS)).round().astype(int)
    return View(view.names, np.asarray(view.x, float)[indices], np.asarray(view.y)[indices], view.predict)


def _limits(values: Any) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    margin = MARGIN * (high - low if high > low else 1.0)
    return low - margin, high + margin


def _curve(facts: FitSummary, view: View) -> tuple[tuple[Picture, ...], str]:
    grid = np.linspace(*_limits(view.x[:, 0]), CURVE_POINTS)[:, None]
    predictive = view.predict(grid)
    regression = facts.task == "regression"

    def paint(ax: Axes) -> None:
        if regression:
            plot.bands(predictive, grid, data=(view.x, view.y), ax=ax)
        else:
            plot.class_curves(predictive, grid, data=(view.x, view.y), classes=facts.classes, ax=ax)
        ax.set(xlabel=view.names[0], xlim=(grid[0, 0], grid[-1, 0]))
        ax.set_ylabel(facts.target if regression else "probability")

    what = "Mean and intervals" if regression else "Probability of each class"
    drawn = picture(
        "fit",
        paint,
        title=f"{facts.target} against {view.names[0]}",
        size=(6.2, 4.2),
        alt=f"{what} of {facts.target} over {view.names[0]} with the training data.",
        caption=f"{what}, with training rows.",
    )
    if regression:
        text = (
            "Light bands are prediction intervals, noise included. The dark band around the mean is epistemic "
            "uncertainty, which more rows would narrow."
        )
    else:
        text = "Probability of each class along the input. Ticks mark the training rows of each class."
    return (drawn,), text


def _maps(facts: FitSummary, view: View) -> tuple[tuple[Picture, ...], str]:
    axes = [np.linspace(*_limits(column), MAP_SIDE) for column in view.x.T]
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], 1)
    predictive = view.predict(grid)
    data = (view.x, view.y)
    binary = facts.classes if facts.classes is not None and len(facts.classes) == 2 else None

    def paint_prediction(ax: Axes) -> None:
        if facts.task == "regression":
            plot.surface(predictive, grid, data=data, label=facts.target, ax=ax)
        elif binary is not None:
            plot.decision(predictive, grid, data=data, classes=binary, ax=ax)
            ax.legend()
        else:
            plot.surface(predictive, grid, part="total", data=data, ax=ax)
        ax.set(xlabel=view.names[0], ylabel=view.names[1])

    def paint_epistemic(ax: Axes) -> None:
        plot.surface(predictive, grid, part="epistemic", data=data, ax=ax)
        ax.set(xlabel=view.names[0], ylabel=view.names[1])

    title = facts.target
    if facts.task == "classification":
        title = "Total uncertainty" if binary is None else f"Probability of {binary[1]}"
    over = f"over {view.names[0]} and {view.names[1]}, with training rows."
    caption = "Points are training rows."
    size = (5.0, 3.9)
    pictures = [picture("fit", paint_prediction, title=title, size=size, alt=f"{title} {over}", caption=caption)]
    text = "Prediction for each pair of inputs"
    if float(predictive.epistemic.max()) > 0:
        title = "Epistemic uncertainty"
        caption = "Darker is more uncertain: more rows there would help most."
        alt = f"{title} {over}"
        pictures.append(picture("fit-doubt", paint_epistemic, title=title, size=size, alt=alt, caption=caption))
        text += ", and its epistemic uncertainty"
    return tuple(pictures), f"{text}."
