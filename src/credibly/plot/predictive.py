"""Plots of predictions: bands, decision surfaces, calibration, uncertainty. Conventions as in `credibly.plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.metrics import scores as metrics
from credibly.plot.style import (
    BLUE,
    BOX,
    DARK,
    INK,
    ORANGE,
    Array,
    Options,
    array,
    axes_of,
    column,
    grid_of,
    legend_on,
    pairs,
    text_colour,
)
from credibly.predictive.base import Predictive
from credibly.predictive.pit import pit_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bands(
    predictive: Predictive,
    x: Any,
    *,
    data: tuple[Any, Any] | None = None,
    truth: Any = None,
    levels: Sequence[float] = (0.5, 0.9),
    functions: int = 0,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Plot a regression with one input: the mean, credible intervals of y and the epistemic standard deviation.

    Args:
        predictive: predictions at x.
        x: inputs, (N,) or (N, 1), in any order.
        data: observed (x, y), drawn as points.
        truth: the noise-free function at x, if known.
        levels: levels of the credible intervals of y, drawn light; the strong band is the epistemic part.
        functions: number of draws of the function to add as thin lines.
        legend: whether to add a legend.
        ax: the Axes to draw on; None creates one.
    """
    if not predictive.likelihood.ordered:
        found = "must be predictions of real targets or counts, got labels"
        raise InputError("predictive", found, "For labels use decision and reliability")
    at = column("x", x)
    if len(at) != len(predictive):
        found = f"has {len(at)} rows, the predictions have {len(predictive)}"
        raise InputError("x", found, "Pass the x of these predictions")
    order = np.argsort(at, kind="stable")
    at, mean = at[order], column("predictive", predictive.mean)[order]
    epistemic = np.sqrt(column("predictive", predictive.epistemic)[order])
    axes = axes_of(ax)
    for i, level in enumerate(sorted(levels, reverse=True)):
        lower, upper = (column("predictive", edge)[order] for edge in predictive.interval(level))
        options: Options = {"color": BLUE, "alpha": min(0.22 + 0.18 * i, 0.9), "linewidth": 0}
        axes.fill_between(at, lower, upper, label=f"{level:.0%} interval of y", **options)
    if epistemic.any():
        label = "epistemic part, ± 1 sd"
        axes.fill_between(at, mean - epistemic, mean + epistemic, color=ORANGE, alpha=0.6, linewidth=0, label=label)
    if functions:
        for curve in array(predictive.functions(functions)).reshape(-1, len(at)):
            axes.plot(at, curve[order], color=ORANGE, linestyle="-", linewidth=0.6, alpha=0.8, label="_draw")
    axes.plot(at, mean, color=BLUE, linestyle="-", linewidth=1.5, label="mean")
    if truth is not None:
        axes.plot(
            at, column("truth", truth)[order], color=text_colour(axes), linestyle="--", linewidth=1, label="truth"
        )
    if data is not None:
        observed = (column("data", data[0]), column("data", data[1]))
        axes.scatter(*observed, s=9, color=text_colour(axes), linewidths=0, zorder=3, label="data")
    axes.set(xlabel="x", ylabel="y")
    return legend_on(axes) if legend else axes


def decision(
    predict: Predictive | Callable[[Tensor], Any],
    grid: Any = None,
    *,
    data: tuple[Any, Any] | None = None,
    marks: Any = None,
    classes: Sequence[str] = ("class 0", "class 1"),
    colorbar: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Plot the probability of class 1 over two inputs, with the 0.5 contour.

    Args:
        predict: a callable such as `posterior.predict`, from points (G, 2) to a Predictive or to probabilities of class
            1; or the Predictive at `grid`.
        grid: the points of a full rectangular grid, (G, 2), in any order; None places one around data and marks.
        data: observed (x, labels 0 and 1), drawn as points.
        marks: points (M, 2) to mark with a star and their probability; requires a callable `predict`.
        classes: names of the two labels.
        colorbar: whether to add a colour bar.
        ax: the Axes to draw on; None creates one.
    """
    if len(classes) != 2:
        raise InputError("classes", f"must be the names of two classes, got {len(classes)}")
    if not callable(predict) and (grid is None or marks is not None):
        raise InputError("predict", "is a Predictive", "Pass grid= with it and no marks=, or pass posterior.predict")
    mesh = grid_of(grid, data and data[0], marks)
    prediction = predict(torch.as_tensor(mesh.points, dtype=torch.float32)) if callable(predict) else predict
    surface = mesh.image(_class_1_probability(prediction, len(mesh.points)))
    axes = axes_of(ax)
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("orange to blue", [ORANGE, "#f5f2ec", BLUE])
    # imshow rather than contourf: small in an SVG, and its array is exactly the probabilities.
    image = axes.imshow(surface, cmap=colours, vmin=0, vmax=1, origin="lower", extent=mesh.extent, aspect="auto")
    if surface.min() < 0.5 < surface.max():
        axes.contour(mesh.x1, mesh.x2, surface, levels=[0.5], colors=DARK, linewidths=1.2)
    if data is not None:
        x, labels = pairs("data", data[0]), column("data", data[1])
        for label, colour, marker in ((0, "#8a4300", "o"), (1, "#0b4a86", "^")):
            at = x[labels == label].T
            edge: Options = {"edgecolors": "white", "linewidths": 0.6, "zorder": 3}
            axes.scatter(at[0], at[1], s=26, color=colour, marker=marker, label=classes[label], **edge)
    if marks is not None and callable(predict):
        stars = pairs("marks", marks)
        values = _class_1_probability(predict(torch.as_tensor(stars, dtype=torch.float32)), len(stars))
        markers: Options = {"s": 150, "marker": "*", "edgecolors": "white", "linewidths": 0.8, "zorder": 4}
        axes.scatter(stars[:, 0], stars[:, 1], color=DARK, **markers)
        for star, p in zip(stars, values):
            # The label goes towards the middle, so that it stays inside the Axes.
            side = -1 if star[0] > (mesh.extent[0] + mesh.extent[1]) / 2 else 1
            options: Options = {"bbox": BOX, "color": DARK, "va": "center", "fontsize": "small", "zorder": 5}
            options |= {"xytext": (11 * side, 0), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
            axes.annotate(f"P(1) = {p:.2f}", star, **options)
    if colorbar:
        axes.figure.colorbar(image, ax=axes, label=f"probability of {classes[1]}")
    axes.set(xlabel="x1", ylabel="x2", xlim=mesh.extent[:2], ylim=mesh.extent[2:])
    return axes


def reliability(
    calibration: metrics.Calibration | Any, labels: Any = None, *, bins: int = 15, ax: Axes | None = None
) -> Axes:
    """Plot a reliability diagram: accuracy against confidence of the top label, with the fraction and number of rows.

    Args:
        calibration: a `metrics.Calibration`, a Predictive of labels, or class probabilities (N, K).
        labels: the observed labels (N,), unless a Calibration is given.
        bins: number of equal-width bins on [0, 1], unless a Calibration is given.
        ax: the Axes to draw on; None creates one.
    """
    if not isinstance(calibration, metrics.Calibration):
        if labels is None:
            raise InputError("labels", "must be the observed labels, got None")
        p = calibration.probabilities if isinstance(calibration, Predictive) else torch.as_tensor(calibration)
        calibration = metrics.calibration(p.cpu(), torch.as_tensor(labels).long().cpu(), bins)
    edges, confidence, right, count = (array(c) for c in calibration[2:])
    used = count > 0
    axes = axes_of(ax)
    bars = axes.bar(edges[:-1], count / count.sum(), np.diff(edges), align="edge", color=INK, alpha=0.3, linewidth=0)
    bars.set_label("fraction of rows, with their number")
    low = float(edges[:-1][used][0])
    axes.plot([low, 1], [low, 1], color=text_colour(axes), linestyle="--", linewidth=1, label="calibrated")
    axes.vlines(confidence[used], confidence[used], right[used], color=BLUE, linewidth=1)
    dots: Options = {"linestyle": "none", "marker": "o", "markersize": 5, "clip_on": False, "zorder": 3}
    axes.plot(confidence[used], right[used], color=BLUE, label="observed", **dots)
    for edge, step, n in zip(edges[:-1][used], np.diff(edges)[used], count[used]):
        fraction = n / count.sum()
        position = (edge + step / 2, fraction if fraction < 0.5 else 0.0)  # above a tall bar it would hit the curve
        options: Options = {"xytext": (0, 2), "textcoords": "offset points", "fontsize": "x-small"}
        axes.annotate(f"{n:.0f}", position, ha="center", va="bottom", color=text_colour(axes), **options)
    axes.set(xlabel="confidence in the top label", ylabel="accuracy", xlim=(low, 1.02), ylim=(0, 1.05))
    return legend_on(axes)


def coverage_curve(
    predictive: Predictive, y: Any, *, levels: Any = None, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the coverage of central credible intervals against their level: below the diagonal is overconfident.

    At any one level, about 95 of 100 calibrated models with this number of rows lie in the grey band. Call again on the
    same Axes, with `label`, to compare predictives.
    """
    at = np.arange(1, 20) / 20 if levels is None else column("levels", levels)
    if not ((at > 0) & (at < 1)).all():
        raise InputError("levels", f"must be strictly between 0 and 1, got {at.tolist()}")
    # y lies in the central interval of level q exactly when its predictive CDF is within q/2 of one half.
    distance = np.abs(2 * array(pit_values(predictive, y)).ravel() - 1)
    observed = (distance[:, None] <= at).mean(0)
    axes = axes_of(ax)
    if not any(line.get_label() == "calibrated" for line in axes.lines):
        fine = np.linspace(0, 1, 101)
        half_width = 2 * np.sqrt(fine * (1 - fine) / len(distance))
        low, high = np.clip(fine - half_width, 0, 1), np.clip(fine + half_width, 0, 1)
        axes.fill_between(fine, low, high, color=INK, alpha=0.18, linewidth=0, label="± 2 standard errors")
        axes.plot([0, 1], [0, 1], color=text_colour(axes), linestyle="-", linewidth=0.8, label="calibrated")
    axes.plot(at, observed, marker="o", markersize=3, linewidth=1.5, label=label or "observed")
    axes.set(xlabel="level of the interval", ylabel="fraction of y inside it", xlim=(0, 1), ylim=(0, 1))
    return legend_on(axes)


def predicted_observed(predictive: Predictive, y: Any, *, level: float = 0.9, ax: Axes | None = None) -> Axes:
    """Plot the predicted mean and its credible interval against observed y, with rows outside it highlighted."""
    lower, upper = (array(edge).ravel() for edge in predictive.interval(level))
    mean, observed = array(predictive.mean).ravel(), array(y).ravel()
    if len(observed) != len(mean):
        raise InputError("y", f"has {len(observed)} values, the predictions have {len(mean)}")
    inside = (lower <= observed) & (observed <= upper)
    axes = axes_of(ax)
    for rows, colour, side in ((inside, BLUE, "inside"), (~inside, ORANGE, "outside")):
        errors = np.stack([mean - lower, upper - mean])[:, rows].clip(min=0)
        options: Options = {"fmt": "o", "markersize": 3.5, "elinewidth": 0.7, "color": colour, "alpha": 0.75}
        label = f"{side} the {level:.0%} interval ({rows.mean():.0%})"
        axes.errorbar(observed[rows], mean[rows], yerr=errors, label=label, **options)
    ends = [min(observed.min(), mean.min()), max(observed.max(), mean.max())]
    axes.plot(ends, ends, color=text_colour(axes), linestyle="--", linewidth=1, label="equal")
    axes.set(xlabel="observed", ylabel="predicted")
    return legend_on(axes)


def uncertainty_parts(predictive: Predictive, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot epistemic against aleatoric uncertainty per prediction: standard deviations, or nats for labels."""
    aleatoric, epistemic, unit = array(predictive.aleatoric).ravel(), array(predictive.epistemic).ravel(), "nats"
    if predictive.likelihood.ordered:
        aleatoric, epistemic, unit = np.sqrt(aleatoric), np.sqrt(epistemic), "sd"
    axes = axes_of(ax)
    axes.scatter(aleatoric, epistemic, s=14, alpha=0.7, linewidths=0, label=label)
    axes.set(xlabel=f"aleatoric ({unit}): noise in y", ylabel=f"epistemic ({unit}): model uncertainty")
    axes.set_ylim(bottom=0)
    return legend_on(axes) if label else axes


def risk_coverage(
    curve: metrics.RiskCoverage | Predictive,
    y: Any = None,
    *,
    kind: str = "total",
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the risk-coverage curve: the error of the rows kept when the least certain ones are rejected.

    Args:
        curve: a `metrics.RiskCoverage`, or a Predictive together with y.
        y: the observed targets, unless a RiskCoverage is given.
        kind: the uncertainty that ranks the rows, as in `Predictive.ood_score`.
        label: the name of the curve; call again on the same Axes to compare.
        ax: the Axes to draw on; None creates one.
    """
    risk = "mean loss"
    if isinstance(curve, Predictive):
        if y is None:
            raise InputError("y", "must be the observed targets, got None")
        target = torch.as_tensor(y).cpu()
        ordered = curve.likelihood.ordered
        guess = curve.mean.cpu() if ordered else curve.probabilities.argmax(-1).cpu()
        if guess.shape != target.shape:
            found = f"has shape {tuple(target.shape)}, the predictions have {tuple(guess.shape)}"
            raise InputError("y", found)
        loss = (guess - target).square() if ordered else (guess != target).double()
        risk = "mean squared error" if ordered else "error rate"
        curve = metrics.risk_coverage(curve.ood_score(kind).cpu(), loss.reshape(len(target), -1).double().mean(1))
    axes = axes_of(ax)
    axes.plot(array(curve.coverage), array(curve.risk), linewidth=1.5, label=label)
    axes.set(xlabel="fraction of rows kept, the most certain first", ylabel=f"{risk} of the rows kept", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    return legend_on(axes) if label else axes


def _class_1_probability(prediction: Any, rows: int) -> Array:
    """Return the probability of class 1, (rows,), from a Predictive or an array of (N,), (N, 1) or (N, 2)."""
    if isinstance(prediction, Predictive):
        prediction = prediction.probabilities
    p = array(prediction).reshape(rows, -1)
    if p.shape[1] > 2:
        raise InputError("predict", f"must return probabilities of two classes, got {p.shape[1]}")
    return p[:, -1]
