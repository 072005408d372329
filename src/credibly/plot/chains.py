"""MCMC plots: traces, rank histograms, R-hat of weights and of predictions. Conventions as in `credibly.plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from credibly.core.checks import check_integer
from credibly.diagnostics.summary import Diagnostics
from credibly.diagnostics.verdict import RHAT_GOOD, RHAT_POOR
from credibly.errors import InputError
from credibly.plot.style import BLUE, INK, ORANGE, PALETTE, array, axes_of, style, text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[Any]

MAX_PANELS = 12  # quantities in one figure
RHAT_FLOOR = 1e-4  # R-hat - 1 at the left edge of the histogram
BINS_PER_DECADE = 10  # from 1.001 to 1.01, from 1.01 to 1.1 and so on


def trace(draws: Any, *, names: Sequence[str] | None = None, axes: Sequence[Axes] | None = None) -> list[Axes]:
    """Plot the draws of each chain in order, one panel per quantity: traces of chains that mix overlap.

    Args:
        draws: weights or predictions, (chain, draw) for one quantity or (chain, draw, k) for up to 12.
        names: names of the k quantities.
        axes: k Axes to draw on; None creates a figure.
    """
    values, titles = _quantities(draws, names)
    panels = _panels(axes, len(titles), 1.5)
    for panel, quantity, title in zip(panels, np.moveaxis(values, 2, 0), titles):
        for chain, line in enumerate(quantity):
            panel.plot(line, color=_colour(chain), linestyle="-", linewidth=0.7, alpha=0.75, label=f"chain {chain}")
        panel.set(ylabel=title, xlim=(0, values.shape[1] - 1))
    panels[-1].set_xlabel("draw")
    return _legend(panels, len(values))


def ranks(
    draws: Any, *, names: Sequence[str] | None = None, bins: int = 20, axes: Sequence[Axes] | None = None
) -> list[Axes]:
    """Plot rank histograms of each chain among the draws of all, one panel per quantity: flat where chains agree.

    A chain that is biased low has excess counts on the left; one that is too narrow peaks in the middle. Counts are
    relative to the uniform count. In any one bin, 95 of 100 chains of independent draws lie in the grey band;
    correlated draws leave it more often.

    Args:
        draws: weights or predictions, (chain, draw) for one quantity or (chain, draw, k) for up to 12; at least two
            chains.
        names: names of the k quantities.
        bins: number of equal-width bins.
        axes: k Axes to draw on; None creates a figure.
    """
    values, titles = _quantities(draws, names)
    chains, count, _ = values.shape
    if chains < 2:
        raise InputError("draws", "must have at least 2 chains, got 1", "Ranks compare chains with one another")
    check_integer("bins", bins, least=2, most=count)
    # Under uniform ranks a chain's count in a bin is hypergeometric: its draws are a sample of all without replacement.
    total = chains * count
    variance = count / bins * (1 - 1 / bins) * (total - count) / (total - 1)
    half_width = 2 * np.sqrt(variance) * bins / count
    edges = np.linspace(0, 1, bins + 1)
    panels = _panels(axes, len(titles), 1.7)
    for panel, quantity, title in zip(panels, np.moveaxis(values, 2, 0), titles):
        panel.axhspan(1 - half_width, 1 + half_width, color=INK, alpha=0.18, linewidth=0, label="independent draws")
        panel.axhline(1, color=text_colour(panel), linestyle="-", linewidth=0.8)
        for chain, row in enumerate(_relative_ranks(quantity)):
            height = np.histogram(row, edges)[0] * bins / count
            panel.stairs(height, edges, baseline=None, color=_colour(chain), linewidth=1.3, label=f"chain {chain}")
        panel.set(ylabel=f"{title}\nrelative count", xlim=(0, 1))
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("rank among the draws of all chains, from lowest to highest")
    return _legend(panels, chains)


def rhat_histogram(weights: Diagnostics | Any, functions: Any = None, *, ax: Axes | None = None) -> Axes:
    """Plot R-hat of weights and of predictions with the limits 1.01 and 1.1.

    Function space mixes better than weight space. The axis is logarithmic in R-hat - 1. Values up to 1.0001 fall in the
    first bin, infinite ones in the last.

    Args:
        weights: a `Diagnostics`, or R-hat of the weights, (k,).
        functions: R-hat of the predictions, unless `weights` is a Diagnostics.
        ax: the Axes to draw on; None creates one.
    """
    if isinstance(weights, Diagnostics):
        functions = None if weights.functions is None else weights.functions.rhat
        weights = weights.weights.rhat
    series = [("weights", _without_nan("weights", weights), BLUE)]
    if functions is not None:
        series.append(("predictions", _without_nan("functions", functions), ORANGE))
    largest = max(float(v[np.isfinite(v)].max(initial=2.0)) - 1 for _, v, _ in series)
    first, last = math.log10(RHAT_FLOOR) * BINS_PER_DECADE, math.ceil(math.log10(largest) * BINS_PER_DECADE) + 2
    edges = 10.0 ** (np.arange(first, last) / BINS_PER_DECADE)  # 1.01 and 1.1 are edges, so no bin straddles a limit
    axes = axes_of(ax)
    fractions = [np.histogram(np.clip(v - 1, edges[0], edges[-1]), edges)[0] / len(v) for _, v, _ in series]
    for (_, _, colour), fraction in zip(series, fractions):
        axes.stairs(fraction, edges, fill=True, color=colour, alpha=0.4)
    for (name, values, colour), fraction in zip(series, fractions):
        axes.stairs(fraction, edges, color=colour, linewidth=1.4, label=f"{name}, median {np.median(values):.3f}")
    top = max(float(fraction.max()) for fraction in fractions)
    for limit, text, side in ((RHAT_GOOD, "good ", "right"), (RHAT_POOR, " not mixed", "left")):
        axes.axvline(limit - 1, color=text_colour(axes), linestyle="--", linewidth=1)
        axes.text(limit - 1, 1.06 * top, text, ha=side, va="center", fontsize="small", color=text_colour(axes))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda at, _: f"{'≤ ' if at < 2 * RHAT_FLOOR else ''}{1 + at:.10g}")
    axes.set(xlabel="R-hat", ylabel="fraction of coordinates", xlim=(edges[0], edges[-1]), ylim=(0, 1.12 * top))
    return _legend([axes], len(series))[0]


def _quantities(draws: Any, names: Sequence[str] | None) -> tuple[Array, list[str]]:
    """Return the draws as (chain, draw, k) and the names of the k quantities."""
    values = array(draws)
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or 0 in values.shape:
        raise InputError("draws", f"must have shape (chain, draw) or (chain, draw, k), got {values.shape}")
    if values.shape[2] > MAX_PANELS:
        found = f"must have at most {MAX_PANELS} quantities, got shape {values.shape}"
        raise InputError("draws", found, "Pass some of them, as in draws[..., :4]")
    if not np.isfinite(values).all():
        raise InputError("draws", "has NaN or infinite values", "Leave those draws out")
    default = ["value"] if values.shape[2] == 1 else [f"[{i}]" for i in range(values.shape[2])]
    titles = default if names is None else list(names)
    if len(titles) != values.shape[2]:
        raise InputError("names", f"has {len(titles)} entries, there are {values.shape[2]} quantities")
    return values, titles


def _panels(axes: Sequence[Axes] | None, count: int, height: float) -> list[Axes]:
    if axes is not None:
        given = list(np.ravel(np.asarray(axes, dtype=object)))
        if len(given) != count:
            raise InputError("axes", f"has {len(given)} Axes, there are {count} quantities")
        return given
    import matplotlib.pyplot as plt

    with style():
        size = (7.0, 0.9 + height * count)
        return list(plt.subplots(count, 1, sharex=True, squeeze=False, layout="constrained", figsize=size)[1][:, 0])


def _legend(panels: list[Axes], chains: int) -> list[Axes]:
    """Add a legend above the first panel if there are few enough chains to distinguish by colour."""
    if chains <= len(PALETTE):
        options: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 5, "borderaxespad": 0.2}
        panels[0].legend(frameon=False, fontsize="small", labelcolor=text_colour(panels[0]), **options)
    return panels


def _colour(chain: int) -> str:
    return PALETTE[chain % len(PALETTE)]


def _relative_ranks(values: Array) -> Array:
    """Return (rank - 1/2) / S among all of (chain, draw); ties get their mean rank."""
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - count / 2
    return np.asarray(middle[index].reshape(values.shape) / values.size)


def _without_nan(name: str, values: Any) -> Array:
    found = array(values).ravel()
    found = found[~np.isnan(found)]
    if found.size == 0:
        raise InputError(name, "has no R-hat that is a number", "R-hat is NaN for constant coordinates")
    return found
