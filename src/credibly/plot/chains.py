"""Pictures of chains: traces, rank histograms, R-hat of weights beside that of predictions. Conventions as in `credibly.plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from credibly.diagnostics.summary import Diagnostics
from credibly.diagnostics.verdict import RHAT_GOOD, RHAT_POOR
from credibly.errors import InputError
from credibly.plot.style import BLUE, INK, ORANGE, PALETTE, array, axes_of, ink, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[Any]

MOST = 12  # quantities in one figure
LEAST = 1e-4  # R-hat - 1 at the left edge of its histogram
PER_DECADE = 10  # its bins from 1.001 to 1.01, from 1.01 to 1.1 and so on


def trace(draws: Any, *, names: Sequence[str] | None = None, axes: Sequence[Axes] | None = None) -> list[Axes]:
    """The draws of each chain in their order, a panel for each quantity: chains that mix lie over one another.

    Args:
        draws: weights or predictions, (chain, draw) for one quantity or (chain, draw, k) for up to 12.
        names: what the k quantities are called.
        axes: k Axes to draw on; None makes a figure of them.
    """
    values, titles = _quantities(draws, names)
    panels = _panels(axes, len(titles), 1.5)
    for panel, quantity, title in zip(panels, np.moveaxis(values, 2, 0), titles):
        for chain, line in enumerate(quantity):
            panel.plot(line, color=_colour(chain), linestyle="-", linewidth=0.7, alpha=0.75, label=f"chain {chain}")
        panel.set(ylabel=title, xlim=(0, values.shape[1] - 1))
    panels[-1].set_xlabel("draw")
    return _key(panels, len(values))


def ranks(
    draws: Any, *, names: Sequence[str] | None = None, bins: int = 20, axes: Sequence[Axes] | None = None
) -> list[Axes]:
    """How the draws of each chain rank among those of all, a panel for each quantity: flat where chains agree.

    A chain that sits low has more than its part on the left; one that is too narrow has a hill in the middle. Counts are
    given as multiples of an equal part. At any one place, 95 of 100 chains of independent draws lie in the grey strip;
    correlated draws leave it more often.

    Args:
        draws: weights or predictions, (chain, draw) for one quantity or (chain, draw, k) for up to 12; at least two chains.
        names: what the k quantities are called.
        bins: how many bins of equal width the ranks are counted in.
        axes: k Axes to draw on; None makes a figure of them.
    """
    values, titles = _quantities(draws, names)
    chains, count, _ = values.shape
    if chains < 2:
        raise InputError("draws", "there is 1 chain", "Ranks compare chains with one another: pass two or more")
    if isinstance(bins, bool) or not isinstance(bins, int) or not 2 <= bins <= count:
        raise InputError("bins", f"found {bins!r}", f"Pass a whole number from 2 to the number of draws, {count}")
    # A chain's draws are picked from all without replacement: hypergeometric.
    total = chains * count
    variance = count / bins * (1 - 1 / bins) * (total - count) / (total - 1)
    spread = 2 * np.sqrt(variance) * bins / count
    edges = np.linspace(0, 1, bins + 1)
    panels = _panels(axes, len(titles), 1.7)
    for panel, quantity, title in zip(panels, np.moveaxis(values, 2, 0), titles):
        panel.axhspan(1 - spread, 1 + spread, color=INK, alpha=0.18, linewidth=0, label="independent draws")
        panel.axhline(1, color=ink(panel), linestyle="-", linewidth=0.8)
        for chain, row in enumerate(_relative_ranks(quantity)):
            height = np.histogram(row, edges)[0] * bins / count
            panel.stairs(height, edges, baseline=None, color=_colour(chain), linewidth=1.3, label=f"chain {chain}")
        panel.set(ylabel=f"{title}\ntimes an equal part", xlim=(0, 1))
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("rank among the draws of all chains, from lowest to highest")
    return _key(panels, chains)


def rhat_histogram(weights: Diagnostics | Any, functions: Any = None, *, ax: Axes | None = None) -> Axes:
    """R-hat of weights and of predictions, with the limits 1.01 and 1.1: function space mixes better than weight space.

    The axis is logarithmic in R-hat - 1. Values up to 1.0001 are in the first bin, infinite ones in the last.

    Args:
        weights: a `Diagnostics`, or R-hat of the weights, (k,).
        functions: R-hat of the predictions, unless a Diagnostics is given.
    """
    if isinstance(weights, Diagnostics):
        functions = None if weights.functions is None else weights.functions.rhat
        weights = weights.weights.rhat
    found = [("weights", _numbers("weights", weights), BLUE)]
    if functions is not None:
        found.append(("predictions", _numbers("functions", functions), ORANGE))
    largest = max(float(v[np.isfinite(v)].max(initial=2.0)) - 1 for _, v, _ in found)
    tens = np.arange(math.log10(LEAST) * PER_DECADE, math.ceil(math.log10(largest) * PER_DECADE) + 2) / PER_DECADE
    edges = 10.0**tens  # 1.01 and 1.1 are edges, so that no bin lies on both sides of a limit
    axes = axes_of(ax)
    shares = [np.histogram(np.clip(v - 1, edges[0], edges[-1]), edges)[0] / len(v) for _, v, _ in found]
    for (_, _, colour), share in zip(found, shares):
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.4)
    for (name, values, colour), share in zip(found, shares):
        axes.stairs(share, edges, color=colour, linewidth=1.4, label=f"{name}, median {np.median(values):.3f}")
    top = max(float(share.max()) for share in shares)
    for limit, words, side in ((RHAT_GOOD, "good ", "right"), (RHAT_POOR, " not mixed", "left")):
        axes.axvline(limit - 1, color=ink(axes), linestyle="--", linewidth=1)
        axes.text(limit - 1, 1.06 * top, words, ha=side, va="center", fontsize="small", color=ink(axes))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda at, _: f"{'≤ ' if at < 2 * LEAST else ''}{1 + at:.10g}")
    axes.set(xlabel="R-hat", ylabel="share of coordinates", xlim=(edges[0], edges[-1]), ylim=(0, 1.12 * top))
    return _key([axes], len(found))[0]


def _quantities(draws: Any, names: Sequence[str] | None) -> tuple[Array, list[str]]:
    """Draws as (chain, draw, k), and the names of the k."""
    values = array(draws)
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or 0 in values.shape:
        raise InputError("draws", f"has shape {values.shape}", "Pass (chain, draw) or (chain, draw, k)")
    if values.shape[2] > MOST:
        found = f"has {values.shape[2]} quantities (shape {values.shape})"
        raise InputError("draws", found, f"A picture shows up to {MOST}: pass some of them, as draws[..., :4]")
    if not np.isfinite(values).all():
        raise InputError("draws", "has NaN or infinite values", "Leave those draws out")
    default = ["value"] if values.shape[2] == 1 else [f"[{i}]" for i in range(values.shape[2])]
    titles = default if names is None else list(names)
    if len(titles) != values.shape[2]:
        raise InputError(
            "names", f"has {len(titles)} entries", f"Pass one name for each of the {values.shape[2]} quantities"
        )
    return values, titles


def _panels(axes: Sequence[Axes] | None, count: int, height: float) -> list[Axes]:
    if axes is not None:
        given = list(np.ravel(np.asarray(axes, dtype=object)))
        if len(given) != count:
            raise InputError("axes", f"has {len(given)} Axes", f"Pass {count}, one for each quantity")
        return given
    import matplotlib.pyplot as plt

    with style():
        size = (7.0, 0.9 + height * count)
        return list(plt.subplots(count, 1, sharex=True, squeeze=False, layout="constrained", figsize=size)[1][:, 0])


def _key(panels: list[Axes], chains: int) -> list[Axes]:
    """What the colours mean, above the first panel, where there are few enough to tell apart."""
    if chains <= len(PALETTE):
        look: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 5, "borderaxespad": 0.2}
        panels[0].legend(frameon=False, fontsize="small", labelcolor=ink(panels[0]), **look)
    return panels


def _colour(chain: int) -> str:
    return PALETTE[chain % len(PALETTE)]


def _relative_ranks(values: Array) -> Array:
    """(rank - 1/2) / S among all of (chain, draw); equal draws share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - count / 2
    return np.asarray(middle[place].reshape(values.shape) / values.size)


def _numbers(name: str, values: Any) -> Array:
    found = array(values).ravel()
    found = found[~np.isnan(found)]
    if found.size == 0:
        raise InputError(name, "has no R-hat that is a number", "Pass R-hat of coordinates that change")
    return found
