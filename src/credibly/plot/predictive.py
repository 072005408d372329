"""Pictures of predictions: bands, decisions, calibration, and the kinds of uncertainty. Conventions as in `credibly.plot`."""

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
    Look,
    array,
    axes_of,
    column,
    grid_of,
    ink,
    legend_on,
    pairs,
)
from credibly.predictive.base import Predictive

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
    """Regression with one input: the mean, the credible intervals of y, and the epistemic part of the doubt apart.

    Args:
        predictive: predictions at x.
        x: inputs, (N,) or (N, 1), in any order.
        data: observed (x, y), drawn as points.
        truth: the noise-free function at x, where it is known.
        levels: total intervals, light; the epistemic deviation is the strong band around the mean.
        functions: how many single draws of the function to add as thin lines.
        legend: whether to explain the parts on the picture.
    """
    if not predictive.likelihood.ordered:
        raise InputError("predictive", "is of labels", "Bands need real targets; labels have decision and reliability")
    at = column("x", x)
    if len(at) != len(predictive):
        raise InputError("x", f"has {len(at)} rows, the predictions {len(predictive)}", "Pass the x they were made at")
    order = np.argsort(at, kind="stable")
    at, mean = at[order], column("predictive", predictive.mean)[order]
    doubt = np.sqrt(column("predictive", predictive.epistemic)[order])
    axes = axes_of(ax)
    for i, level in enumerate(sorted(levels, reverse=True)):
        lower, upper = (column("predictive", edge)[order] for edge in predictive.interval(level))
        look: Look = {"color": BLUE, "alpha": min(0.22 + 0.18 * i, 0.9), "linewidth": 0}
        axes.fill_between(at, lower, upper, label=f"{level:.0%} interval of y", **look)
    if doubt.any():
        label = "epistemic part, ± 1 sd"
        axes.fill_between(at, mean - doubt, mean + doubt, color=ORANGE, alpha=0.6, linewidth=0, label=label)
    if functions:
        for curve in array(predictive.functions(functions)).reshape(-1, len(at)):
            axes.plot(at, curve[order], color=ORANGE, linestyle="-", linewidth=0.6, alpha=0.8, label="_draw")
    axes.plot(at, mean, color=BLUE, linestyle="-", linewidth=1.5, label="mean")
    if truth is not None:
        axes.plot(at, column("truth", truth)[order], color=ink(axes), linestyle="--", linewidth=1, label="truth")
    if data is not None:
        seen = (column("data", data[0]), column("data", data[1]))
        axes.scatter(*seen, s=9, color=ink(axes), linewidths=0, zorder=3, label="data")
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
    """Two inputs, two classes: the probability of class 1 over a grid, with its 0.5 line.

    Args:
        predict: a callable such as `posterior.predict`, from points (G, 2) to a Predictive or to probabilities of class 1;
            or the Predictive at `grid`.
        grid: the points of a full rectangular grid, (G, 2), in any order; None lays one around data and marks.
        data: observed (x, labels 0 and 1), drawn as points.
        marks: points (M, 2) to mark with a star and their probability; they need `predict` to be callable.
        classes: what the two labels are called.
        colorbar: whether to add the scale of colours.
    """
    if len(classes) != 2:
        raise InputError("classes", f"has {len(classes)} names", "This picture is for two classes")
    if not callable(predict) and (grid is None or marks is not None):
        raise InputError("predict", "is a Predictive", "Pass grid= with it and no marks=, or pass posterior.predict")
    net = grid_of(grid, data and data[0], marks)
    answer = predict(torch.as_tensor(net.points, dtype=torch.float32)) if callable(predict) else predict
    surface = net.image(_of_class_1(answer, len(net.points)))
    axes = axes_of(ax)
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("orange to blue", [ORANGE, "#f5f2ec", BLUE])
    # A picture of cells, not of polygons: small in an SVG, and its array is exactly the probabilities.
    image = axes.imshow(surface, cmap=colours, vmin=0, vmax=1, origin="lower", extent=net.extent, aspect="auto")
    if surface.min() < 0.5 < surface.max():
        axes.contour(net.x1, net.x2, surface, levels=[0.5], colors=DARK, linewidths=1.2)
    if data is not None:
        x, labels = pairs("data", data[0]), column("data", data[1])
        for label, colour, marker in ((0, "#8a4300", "o"), (1, "#0b4a86", "^")):
            at = x[labels == label].T
            edge: Look = {"edgecolors": "white", "linewidths": 0.6, "zorder": 3}
            axes.scatter(at[0], at[1], s=26, color=colour, marker=marker, label=classes[label], **edge)
    if marks is not None and callable(predict):
        stars = pairs("marks", marks)
        values = _of_class_1(predict(torch.as_tensor(stars, dtype=torch.float32)), len(stars))
        spots: Look = {"s": 150, "marker": "*", "edgecolors": "white", "linewidths": 0.8, "zorder": 4}
        axes.scatter(stars[:, 0], stars[:, 1], color=DARK, **spots)
        for star, p in zip(stars, values):
            side = (
                -1 if star[0] > (net.extent[0] + net.extent[1]) / 2 else 1
            )  # towards the middle, so that it stays inside
            look: Look = {"bbox": BOX, "color": DARK, "va": "center", "fontsize": "small", "zorder": 5}
            look |= {"xytext": (11 * side, 0), "textcoords": "offset points", "ha": "left" if side > 0 else "right"}
            axes.annotate(f"P(1) = {p:.2f}", star, **look)
    if colorbar:
        axes.figure.colorbar(image, ax=axes, label=f"probability of {classes[1]}")
    axes.set(xlabel="x1", ylabel="x2", xlim=net.extent[:2], ylim=net.extent[2:])
    return axes


def reliability(
    calibration: metrics.Calibration | Any, labels: Any = None, *, bins: int = 15, ax: Axes | None = None
) -> Axes:
    """How often the top label is right against how sure the model was, with the share and number of rows of each bin.

    Args:
        calibration: a `metrics.Calibration`, a Predictive of labels, or class probabilities (N, K).
        labels: the observed labels (N,), unless a Calibration is given.
        bins: how many bins of equal width on [0, 1], unless a Calibration is given.
    """
    if not isinstance(calibration, metrics.Calibration):
        if labels is None:
            raise InputError("labels", "found None", "Pass the observed labels beside the probabilities")
        p = calibration.probabilities if isinstance(calibration, Predictive) else torch.as_tensor(calibration)
        calibration = metrics.calibration(p.cpu(), torch.as_tensor(labels).long().cpu(), bins)
    edges, confidence, right, count = (array(c) for c in calibration[2:])
    used = count > 0
    axes = axes_of(ax)
    bars = axes.bar(edges[:-1], count / count.sum(), np.diff(edges), align="edge", color=INK, alpha=0.3, linewidth=0)
    bars.set_label("share of rows, with their number")
    low = float(edges[:-1][used][0])
    axes.plot([low, 1], [low, 1], color=ink(axes), linestyle="--", linewidth=1, label="calibrated")
    axes.vlines(confidence[used], confidence[used], right[used], color=BLUE, linewidth=1)
    dots: Look = {"linestyle": "none", "marker": "o", "markersize": 5, "clip_on": False, "zorder": 3}
    axes.plot(confidence[used], right[used], color=BLUE, label="observed", **dots)
    for edge, step, n in zip(edges[:-1][used], np.diff(edges)[used], count[used]):
        share = n / count.sum()
        spot = (edge + step / 2, share if share < 0.5 else 0.0)  # a tall bar would push its number into the curve
        look: Look = {"xytext": (0, 2), "textcoords": "offset points", "fontsize": "x-small", "color": ink(axes)}
        axes.annotate(f"{n:.0f}", spot, ha="center", va="bottom", **look)
    axes.set(xlabel="confidence in the top label", ylabel="share that is right", xlim=(low, 1.02), ylim=(0, 1.05))
    return legend_on(axes)


def coverage_curve(
    predictive: Predictive, y: Any, *, levels: Any = None, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """Share of y inside the central interval of each level, against the level: below the line is overconfident.

    At any one level, about 95 of 100 calibrated models with as many rows lie in the grey strip. Call again on the same
    Axes, with `label`, to compare predictives.
    """
    at = np.arange(1, 20) / 20 if levels is None else column("levels", levels)
    if not ((at > 0) & (at < 1)).all():
        raise InputError("levels", f"found {at.tolist()}", "Pass numbers between 0 and 1")
    # y lies in the central interval of level q exactly when its predictive CDF is within q/2 of one half.
    distance = np.abs(2 * array(predictive.cdf(y)).ravel() - 1)
    observed = (distance[:, None] <= at).mean(0)
    axes = axes_of(ax)
    if not any(line.get_label() == "calibrated" for line in axes.lines):
        fine = np.linspace(0, 1, 101)
        spread = 2 * np.sqrt(fine * (1 - fine) / len(distance))
        low, high = np.clip(fine - spread, 0, 1), np.clip(fine + spread, 0, 1)
        axes.fill_between(fine, low, high, color=INK, alpha=0.18, linewidth=0, label="± 2 standard errors")
        axes.plot([0, 1], [0, 1], color=ink(axes), linestyle="-", linewidth=0.8, label="calibrated")
    axes.plot(at, observed, marker="o", markersize=3, linewidth=1.5, label=label or "observed")
    axes.set(xlabel="level of the interval", ylabel="share of y inside it", xlim=(0, 1), ylim=(0, 1))
    return legend_on(axes)


def predicted_observed(predictive: Predictive, y: Any, *, level: float = 0.9, ax: Axes | None = None) -> Axes:
    """Observed y against the predicted mean, each with its credible interval; those outside it stand out."""
    lower, upper = (array(edge).ravel() for edge in predictive.interval(level))
    mean, seen = array(predictive.mean).ravel(), array(y).ravel()
    if len(seen) != len(mean):
        raise InputError("y", f"has {len(seen)} values, the predictions {len(mean)}", "Pass one y for each prediction")
    inside = (lower <= seen) & (seen <= upper)
    axes = axes_of(ax)
    for rows, colour, what in ((inside, BLUE, "inside"), (~inside, ORANGE, "outside")):
        reach = np.stack([mean - lower, upper - mean])[:, rows].clip(min=0)
        look: Look = {"fmt": "o", "markersize": 3.5, "elinewidth": 0.7, "color": colour, "alpha": 0.75}
        label = f"{what} the {level:.0%} interval ({rows.mean():.0%})"
        axes.errorbar(seen[rows], mean[rows], yerr=reach, label=label, **look)
    ends = [min(seen.min(), mean.min()), max(seen.max(), mean.max())]
    axes.plot(ends, ends, color=ink(axes), linestyle="--", linewidth=1, label="equal")
    axes.set(xlabel="observed", ylabel="predicted")
    return legend_on(axes)


def uncertainty_parts(predictive: Predictive, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Aleatoric against epistemic uncertainty, a point for each prediction: deviations, or nats for labels."""
    noise, doubt, unit = array(predictive.aleatoric).ravel(), array(predictive.epistemic).ravel(), "nats"
    if predictive.likelihood.ordered:
        noise, doubt, unit = np.sqrt(noise), np.sqrt(doubt), "sd"
    axes = axes_of(ax)
    axes.scatter(noise, doubt, s=14, alpha=0.7, linewidths=0, label=label)
    axes.set(xlabel=f"aleatoric ({unit}): noise in y", ylabel=f"epistemic ({unit}): doubt about the model")
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
    """The error of the rows that are kept when the least certain ones are handed to somebody else.

    Args:
        curve: a `metrics.RiskCoverage`, or a Predictive together with y.
        y: the observed targets, unless a RiskCoverage is given.
        kind: the uncertainty that ranks the rows, as in `Predictive.ood_score`.
        label: the name of the curve; call again on the same Axes to compare.
    """
    risk = "mean loss"
    if isinstance(curve, Predictive):
        if y is None:
            raise InputError("y", "found None", "Pass the observed targets beside the predictions")
        target = torch.as_tensor(y).cpu()
        ordered = curve.likelihood.ordered
        guess = curve.mean.cpu() if ordered else curve.probabilities.argmax(-1).cpu()
        if guess.shape != target.shape:
            raise InputError("y", f"has shape {tuple(target.shape)}", f"These predictions have {tuple(guess.shape)}")
        loss = (guess - target).square() if ordered else (guess != target).double()
        risk = "mean squared error" if ordered else "error rate"
        curve = metrics.risk_coverage(curve.ood_score(kind).cpu(), loss.reshape(len(target), -1).double().mean(1))
    axes = axes_of(ax)
    axes.plot(array(curve.coverage), array(curve.risk), linewidth=1.5, label=label)
    axes.set(xlabel="share of rows kept, the most certain first", ylabel=f"{risk} of the rows kept", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    return legend_on(axes) if label else axes


def _of_class_1(answer: Any, rows: int) -> Array:
    """Probabilities of class 1, (rows,), from a Predictive or an array of (N,), (N, 1) or (N, 2)."""
    if isinstance(answer, Predictive):
        answer = answer.probabilities
    p = array(answer).reshape(rows, -1)
    if p.shape[1] > 2:
        raise InputError("predict", f"gives {p.shape[1]} classes", "This picture is for two classes")
    return p[:, -1]
