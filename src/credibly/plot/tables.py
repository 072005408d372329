"""Plots for tabular fits: confusion matrix, out-of-distribution scores, training loss, surfaces over two inputs.

Conventions as in `credibly.plot`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.errors import InputError
from credibly.plot.style import (
    BLUE,
    DARK,
    GREEN,
    INK,
    ORANGE,
    PALETTE,
    Array,
    Options,
    array,
    axes_of,
    column,
    grid_of,
    legend_on,
    pairs,
)
from credibly.predictive.base import Predictive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = ("mean", "epistemic", "aleatoric", "total")
SCORE_BINS = 25
MAX_CLASSES = 30  # in one confusion matrix
SHADES = ("#ffffff", "#f5f2ec", "#b9d3ea", BLUE, "#123f66")  # mostly light, so that dark marks stay visible


def ood_histogram(scores: Any, far: Any = None, *, ax: Axes | None = None) -> Axes:
    """Plot histograms of out-of-distribution scores for in-distribution and out-of-distribution rows.

    The less they overlap, the better unusual rows are detected.

    Args:
        scores: scores of in-distribution rows, (N,).
        far: scores of out-of-distribution rows, (M,).
        ax: the Axes to draw on; None creates one.
    """
    series = [("like the training data", _finite("scores", scores), BLUE)]
    if far is not None:
        series.append(("out of distribution", _finite("far", far), ORANGE))
    low, high = min(v.min() for _, v, _ in series), max(v.max() for _, v, _ in series)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    edges = np.linspace(low, high if high > low else low + 1, SCORE_BINS + 1)
    axes = axes_of(ax)
    for name, values, colour in series:
        fraction = np.histogram(values, edges)[0] / len(values)
        axes.stairs(fraction, edges, fill=True, color=colour, alpha=0.4)
        axes.stairs(fraction, edges, color=colour, linewidth=1.4, label=f"{name} ({len(values):,})")
    axes.set(xlabel="out-of-distribution score", ylabel="fraction of rows", xlim=(edges[0], edges[-1]))
    axes.set_ylim(bottom=0)
    return legend_on(axes)


def free_energy(history: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """Plot the training loss and its terms by step: the mean over members, with their range.

    For Bayes by Backprop the loss is the free energy: misfit to the data plus the complexity of the weights.

    Args:
        history: `posterior.record.history` of a method that trains.
        ax: the Axes to draw on; None creates one.
    """
    if not isinstance(history, Mapping) or not history.get("step") or not history.get("loss"):
        found = f"keys {', '.join(map(str, history)) or 'none'}" if isinstance(history, Mapping) else repr(history)
        advice = "Pass posterior.record.history of a method that trains; for samplers use trace"
        raise InputError("history", f"must have step and loss, got {found}", advice)
    step = column("history", history["step"])
    lines = {"loss": history["loss"], **(history.get("parts") or {})}
    if len(lines) == 2:  # the only part is the loss itself
        lines = {"loss": history["loss"]}
    axes = axes_of(ax)
    lowest = np.inf
    for (name, values), colour in zip(lines.items(), (BLUE, ORANGE, GREEN, *PALETTE[3:])):
        by_member = array(values).reshape(len(array(values)), -1)
        if len(by_member) != len(step):
            raise InputError("history", f"has {len(step)} steps and {len(by_member)} values of {name}")
        mean = by_member.mean(1)
        if by_member.shape[1] > 1:
            axes.fill_between(step, by_member.min(1), by_member.max(1), color=colour, alpha=0.2, linewidth=0)
        options: Options = {"linestyle": "-" if name == "loss" else "--", "linewidth": 1.5 if name == "loss" else 1.1}
        marker = "o" if len(step) == 1 else None
        axes.plot(step, mean, color=colour, label=name, marker=marker, **options)
        lowest = min(lowest, float(np.nanmin(by_member)))
    axes.set(xlabel="step", ylabel="loss")
    if lowest > 0:
        axes.set_yscale("log")
    return legend_on(axes) if len(lines) > 1 else axes


def confusion(
    predictive: Predictive | Any, y: Any, *, classes: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the confusion matrix: observed classes in rows, most probable classes in columns.

    A cell shows the count; its colour is the fraction of the observed class. Correct predictions lie on the diagonal.

    Args:
        predictive: predictions of labels, or class probabilities (N, K).
        y: observed class numbers, (N,).
        classes: names of the K classes.
        ax: the Axes to draw on; None creates one.
    """
    p = array(predictive.probabilities if isinstance(predictive, Predictive) else predictive)
    observed = column("y", y).astype(int)
    if p.ndim != 2 or p.shape[1] < 2 or len(p) != len(observed):
        found = f"must be probabilities (N, K) beside labels (N,), got {p.shape} and {observed.shape}"
        raise InputError("predictive", found)
    count = p.shape[1]
    if count > MAX_CLASSES:
        raise InputError("predictive", f"must have at most {MAX_CLASSES} classes, got {count}")
    names = _class_names(classes, [str(i) for i in range(count)])
    if not ((observed >= 0) & (observed < count)).all():
        raise InputError("y", f"must be class numbers below {count}, got {observed.min()} to {observed.max()}")
    table = np.zeros((count, count), dtype=int)
    np.add.at(table, (observed, p.argmax(1)), 1)
    fraction = table / np.maximum(table.sum(1, keepdims=True), 1)
    axes = axes_of(ax)
    axes.imshow(fraction, cmap=_shades(), vmin=0, vmax=1.3, aspect="auto")
    size = "small" if count <= 5 else "x-small" if count <= 12 else "xx-small"
    for i, j in zip(*np.nonzero(table)):
        axes.text(j, i, f"{table[i, j]:,}", ha="center", va="center", fontsize=size, color=DARK)
    short = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
    axes.set_xticks(range(count), short, rotation=0 if count <= 4 and max(map(len, short)) <= 10 else 60)
    axes.set_yticks(range(count), short)
    axes.set(xlabel="most probable class", ylabel="observed class")
    return axes


def surface(
    predict: Predictive | Callable[[Tensor], Predictive],
    grid: Any = None,
    *,
    part: str = "mean",
    data: tuple[Any, Any] | None = None,
    label: str | None = None,
    colorbar: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Plot the mean of a real target, or one kind of uncertainty, over two inputs.

    Args:
        predict: a callable such as `posterior.predict`, from points (G, 2) to a Predictive; or the Predictive at
            `grid`.
        grid: the points of a full rectangular grid, (G, 2), in any order; None places one around the data.
        part: "mean", or "epistemic", "aleatoric" or "total" uncertainty: standard deviations, or nats for labels.
        data: observed (x, y). Points are coloured by y on the mean, and black on uncertainties.
        label: label of the colour bar; None names the part.
        colorbar: whether to add a colour bar.
        ax: the Axes to draw on; None creates one.
    """
    check_choice("part", part, PARTS)
    if not callable(predict) and grid is None:
        raise InputError("predict", "is a Predictive", "Pass grid= with it, or pass posterior.predict")
    mesh = grid_of(grid, data and data[0])
    prediction = predict(torch.as_tensor(mesh.points, dtype=torch.float32)) if callable(predict) else predict
    ordered = prediction.likelihood.ordered
    if part == "mean" and not ordered:
        advice = 'For labels pass part="total" or "epistemic"; for two classes use plot.decision'
        raise InputError("predict", "must predict real targets or counts, got labels", advice)
    values = array(getattr(prediction, part))
    if values.shape not in ((len(mesh.points),), (len(mesh.points), 1)):
        raise InputError(
            "predict", f"must return one value per point, got {values.shape} for {len(mesh.points)} points"
        )
    values = np.sqrt(values.ravel()) if part != "mean" and ordered else values.ravel()
    image = mesh.image(values)
    axes = axes_of(ax)
    observed = None if data is None else (pairs("data", data[0]), column("data", data[1]))
    options: Options = {"cmap": _shades() if part == "mean" else _warm(), "vmin": image.min(), "vmax": image.max()}
    if part == "mean" and observed is not None:
        options |= {"vmin": min(image.min(), observed[1].min()), "vmax": max(image.max(), observed[1].max())}
    elif part != "mean":
        options["vmin"] = 0.0
    shown = axes.imshow(image, origin="lower", extent=mesh.extent, aspect="auto", **options)
    if observed is not None:
        x1, x2 = observed[0].T
        dots: Options = {"edgecolors": DARK, "linewidths": 0.5, "zorder": 3}
        if part == "mean":
            axes.scatter(x1, x2, s=16, c=observed[1], **options, **dots)
        else:
            axes.scatter(x1, x2, s=7, color=DARK, alpha=0.6, linewidths=0, zorder=3)
    if colorbar:
        unit = "" if part == "mean" else ", sd" if ordered else ", nats"
        axes.figure.colorbar(shown, ax=axes, label=label or f"{part}{unit}")
    axes.set(xlabel="x1", ylabel="x2", xlim=mesh.extent[:2], ylim=mesh.extent[2:])
    return axes


def class_curves(
    predictive: Predictive,
    x: Any,
    *,
    data: tuple[Any, Any] | None = None,
    classes: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the probability of each class over one input.

    Args:
        predictive: predictions at x.
        x: inputs, (N,) or (N, 1), in any order.
        data: observed (x, class numbers), drawn as ticks below the curves, one line per class.
        classes: names of the classes.
        ax: the Axes to draw on; None creates one.
    """
    if predictive.likelihood.ordered:
        found = "must be predictions of labels, got real targets or counts"
        raise InputError("predictive", found, "For those use bands")
    at, p = column("x", x), array(predictive.probabilities)
    if len(at) != len(p):
        found = f"has {len(at)} rows, the predictions have {len(p)}"
        raise InputError("x", found, "Pass the x of these predictions")
    names = _class_names(classes, [f"class {i}" for i in range(p.shape[1])])
    order = np.argsort(at, kind="stable")
    axes = axes_of(ax)
    for k, name in enumerate(names):
        colour = PALETTE[k % len(PALETTE)]
        axes.plot(at[order], p[order, k], color=colour, linewidth=1.5, label=name)
        if data is not None:
            there = column("data", data[0])[column("data", data[1]) == k]
            height = np.full(len(there), -0.05 * (k + 1))
            axes.plot(there, height, color=colour, linestyle="none", marker="|", alpha=0.7)
    axes.axhline(0, color=INK, linestyle="-", linewidth=0.6)
    axes.set(xlabel="x", ylabel="probability", ylim=(-0.05 * (len(names) + 1) if data is not None else 0, 1.02))
    return legend_on(axes)


def _finite(name: str, values: Any) -> Array:
    found = column(name, values)
    if found.size == 0 or not np.isfinite(found).all():
        raise InputError(name, "must be one finite number per row, got none or values that are not finite")
    return found


def _class_names(classes: Sequence[str] | None, default: list[str]) -> list[str]:
    names = default if classes is None else [str(c) for c in classes]
    if len(names) != len(default):
        raise InputError("classes", f"has {len(names)} names, the predictions have {len(default)} classes")
    return names


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("white to blue", SHADES)


def _warm() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("white to orange", ["#fbf7f0", "#f3c793", ORANGE, "#8a4300"])
