"""Pictures for a fit to a table: confusion of classes, out-of-distribution scores, training, and maps over two inputs.

Conventions as in `credibly.plot`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from credibly.errors import InputError
from credibly.plot.style import (
    BLUE,
    DARK,
    GREEN,
    INK,
    ORANGE,
    PALETTE,
    Array,
    Look,
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
BINS = 25  # of a histogram of scores
MOST_CLASSES = 30  # in one picture of a confusion
SHADES = ("#ffffff", "#f5f2ec", "#b9d3ea", BLUE, "#123f66")  # light, so that marks in dark ink are seen on most of it


def ood_histogram(scores: Any, far: Any = None, *, ax: Axes | None = None) -> Axes:
    """How the out-of-distribution scores of rows are spread, beside those of rows from elsewhere.

    The further apart the two, the better strange rows can be told from familiar ones.

    Args:
        scores: of rows like those of the training, (N,).
        far: of rows unlike them, (M,).
    """
    found = [("rows like the training data", _finite("scores", scores), BLUE)]
    if far is not None:
        found.append(("strange rows", _finite("far", far), ORANGE))
    low, high = min(v.min() for _, v, _ in found), max(v.max() for _, v, _ in found)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    axes = axes_of(ax)
    for name, values, colour in found:
        share = np.histogram(values, edges)[0] / len(values)
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.4)
        axes.stairs(share, edges, color=colour, linewidth=1.4, label=f"{name} ({len(values):,})")
    axes.set(xlabel="out-of-distribution score", ylabel="share of rows", xlim=(edges[0], edges[-1]))
    axes.set_ylim(bottom=0)
    return legend_on(axes)


def free_energy(history: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """The loss of a training and the parts it is the sum of, over the steps; of several members their mean, and their range.

    For Bayes by Backprop the loss is the free energy: misfit to the data plus the complexity of the weights.

    Args:
        history: `posterior.record.history` of a method that trains.
    """
    if not isinstance(history, Mapping) or not history.get("step") or not history.get("loss"):
        found = f"has {', '.join(map(str, history)) or 'nothing'}" if isinstance(history, Mapping) else repr(history)
        raise InputError(
            "history", found, "Pass posterior.record.history of a method that trains; samplers have chains"
        )
    step = column("history", history["step"])
    lines = {"loss": history["loss"], **(history.get("parts") or {})}
    if len(lines) == 2:  # the only part is the loss itself
        lines = {"loss": history["loss"]}
    axes = axes_of(ax)
    lowest = np.inf
    for (name, values), colour in zip(lines.items(), (BLUE, ORANGE, GREEN, *PALETTE[3:])):
        by_member = array(values).reshape(len(array(values)), -1)
        if len(by_member) != len(step):
            raise InputError(
                "history", f"has {len(step)} steps and {len(by_member)} of {name}", "Pass one for each step"
            )
        mean = by_member.mean(1)
        if by_member.shape[1] > 1:
            axes.fill_between(step, by_member.min(1), by_member.max(1), color=colour, alpha=0.2, linewidth=0)
        look: Look = {"linestyle": "-" if name == "loss" else "--", "linewidth": 1.5 if name == "loss" else 1.1}
        marker = "o" if len(step) == 1 else None
        axes.plot(step, mean, color=colour, label=name, marker=marker, **look)
        lowest = min(lowest, float(np.nanmin(by_member)))
    axes.set(xlabel="step", ylabel="loss")
    if lowest > 0:
        axes.set_yscale("log")
    return legend_on(axes) if len(lines) > 1 else axes


def confusion(
    predictive: Predictive | Any, y: Any, *, classes: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    """How often each class was taken for each: rows are what was observed, columns the most probable class.

    A square has the number of rows, and the colour of their share of the observed class. Right answers are on the diagonal.

    Args:
        predictive: predictions of labels, or class probabilities (N, K).
        y: observed class numbers, (N,).
        classes: what the K classes are called.
    """
    p = array(predictive.probabilities if isinstance(predictive, Predictive) else predictive)
    seen = column("y", y).astype(int)
    if p.ndim != 2 or p.shape[1] < 2 or len(p) != len(seen):
        raise InputError(
            "predictive", f"has shape {p.shape}, y {seen.shape}", "Pass probabilities (N, K) and labels (N,)"
        )
    count = p.shape[1]
    if count > MOST_CLASSES:
        raise InputError("predictive", f"has {count} classes", f"This picture shows up to {MOST_CLASSES}")
    names = [str(i) for i in range(count)] if classes is None else [str(c) for c in classes]
    if len(names) != count:
        raise InputError("classes", f"has {len(names)} names", f"Pass one for each of the {count} classes")
    if not ((seen >= 0) & (seen < count)).all():
        raise InputError("y", f"has values from {seen.min()} to {seen.max()}", f"There are {count} classes, from 0")
    table = np.zeros((count, count), dtype=int)
    np.add.at(table, (seen, p.argmax(1)), 1)
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    axes = axes_of(ax)
    axes.imshow(share, cmap=_shades(), vmin=0, vmax=1.3, aspect="auto")
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
    """A map over two inputs: the mean of a real target, or one kind of uncertainty.

    Args:
        predict: a callable such as `posterior.predict`, from points (G, 2) to a Predictive; or the Predictive at `grid`.
        grid: the points of a full rectangular grid, (G, 2), in any order; None lays one around the data.
        part: "mean", or "epistemic", "aleatoric" or "total" uncertainty: deviations, or nats for labels.
        data: observed (x, y). On the mean the points have the colour of their y, otherwise they only show where they are.
        label: of the scale of colours; None says what part it is.
        colorbar: whether to add that scale.
    """
    if part not in PARTS:
        raise InputError("part", f"found {part!r}", f"Pass one of {', '.join(PARTS)}")
    if not callable(predict) and grid is None:
        raise InputError("predict", "is a Predictive", "Pass grid= with it, or pass posterior.predict")
    net = grid_of(grid, data and data[0])
    answer = predict(torch.as_tensor(net.points, dtype=torch.float32)) if callable(predict) else predict
    ordered = answer.likelihood.ordered
    if part == "mean" and not ordered:
        raise InputError("predict", "is of labels", 'Pass part="total" or "epistemic"; two classes have plot.decision')
    values = array(getattr(answer, part))
    if values.shape not in ((len(net.points),), (len(net.points), 1)):
        raise InputError(
            "predict", f"gives {values.shape} for {len(net.points)} points", "This picture needs one value each"
        )
    values = np.sqrt(values.ravel()) if part != "mean" and ordered else values.ravel()
    image = net.image(values)
    axes = axes_of(ax)
    seen = None if data is None else (pairs("data", data[0]), column("data", data[1]))
    look: Look = {"cmap": _shades() if part == "mean" else _warm(), "vmin": image.min(), "vmax": image.max()}
    if part == "mean" and seen is not None:
        look |= {"vmin": min(image.min(), seen[1].min()), "vmax": max(image.max(), seen[1].max())}
    elif part != "mean":
        look["vmin"] = 0.0
    picture = axes.imshow(image, origin="lower", extent=net.extent, aspect="auto", **look)
    if seen is not None:
        where = seen[0].T
        dots: Look = {"edgecolors": DARK, "linewidths": 0.5, "zorder": 3}
        if part == "mean":
            axes.scatter(where[0], where[1], s=16, c=seen[1], **look, **dots)
        else:
            axes.scatter(where[0], where[1], s=7, color=DARK, alpha=0.6, linewidths=0, zorder=3)
    if colorbar:
        unit = "" if part == "mean" else ", sd" if ordered else ", nats"
        axes.figure.colorbar(picture, ax=axes, label=label or f"{part}{unit}")
    axes.set(xlabel="x1", ylabel="x2", xlim=net.extent[:2], ylim=net.extent[2:])
    return axes


def class_curves(
    predictive: Predictive,
    x: Any,
    *,
    data: tuple[Any, Any] | None = None,
    classes: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Labels with one input: the probability of each class, which add up to one everywhere.

    Args:
        predictive: predictions at x.
        x: inputs, (N,) or (N, 1), in any order.
        data: observed (x, class numbers), drawn as short strokes below, a line for each class.
        classes: what the classes are called.
    """
    if predictive.likelihood.ordered:
        raise InputError("predictive", "is of real targets or counts", "Pass predictions of labels; others have bands")
    at, p = column("x", x), array(predictive.probabilities)
    if len(at) != len(p):
        raise InputError("x", f"has {len(at)} rows, the predictions {len(p)}", "Pass the x they were made at")
    names = [f"class {i}" for i in range(p.shape[1])] if classes is None else [str(c) for c in classes]
    if len(names) != p.shape[1]:
        raise InputError("classes", f"has {len(names)} names", f"Pass one for each of the {p.shape[1]} classes")
    order = np.argsort(at, kind="stable")
    axes = axes_of(ax)
    for k, name in enumerate(names):
        colour = PALETTE[k % len(PALETTE)]
        axes.plot(at[order], p[order, k], color=colour, linewidth=1.5, label=name)
        if data is not None:
            there = column("data", data[0])[column("data", data[1]) == k]
            axes.plot(
                there, np.full(len(there), -0.05 * (k + 1)), color=colour, linestyle="none", marker="|", alpha=0.7
            )
    axes.axhline(0, color=INK, linestyle="-", linewidth=0.6)
    axes.set(xlabel="x", ylabel="probability", ylim=(-0.05 * (len(names) + 1) if data is not None else 0, 1.02))
    return legend_on(axes)


def _finite(name: str, values: Any) -> Array:
    found = column(name, values)
    if found.size == 0 or not np.isfinite(found).all():
        raise InputError(name, "is empty or has values that are not finite", "Pass one number for each row")
    return found


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("white to blue", SHADES)


def _warm() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("white to orange", ["#fbf7f0", "#f3c793", ORANGE, "#8a4300"])
