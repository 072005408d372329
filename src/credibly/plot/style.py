"""Shared by all plots: colours, figure style, creation of Axes, and conversion of arguments to arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from credibly.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[Any]
Options = dict[str, Any]  # keyword arguments of matplotlib

INK = "#7e7e7e"  # text and axes: about the same contrast on white and on black
BLUE, ORANGE, GREEN = "#3a86c8", "#e0801f", "#2f9e77"
PALETTE = (BLUE, ORANGE, GREEN, "#b565a7", "#b8941f", "#7a6fd0", "#c8553d", "#5aa9b8")
DARK = "#222222"  # text on coloured surfaces, which are light everywhere
BOX = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 2, 2)))


@contextmanager
def style() -> Iterator[None]:
    """Return a context in which new figures have a transparent background and text legible on light and dark pages."""
    import matplotlib as mpl
    from cycler import cycler

    settings: Any = {
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
        "axes.prop_cycle": cycler(color=PALETTE) + cycler(linestyle=DASHES),
        "legend.frameon": False,
        "legend.fontsize": "small",
    }
    with mpl.rc_context(settings):
        yield
        # The first figure loads the backend, which may switch interactive mode on, as that of notebooks does.
        interactive = mpl.is_interactive()
    mpl.interactive(interactive)


def axes_of(ax: Axes | None) -> Axes:
    """Return the given Axes, or a new one in `style`."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    with style():
        return plt.subplots(layout="constrained")[1]


def text_colour(axes: Axes) -> Any:
    """Return the text colour of these Axes, so that additions are legible wherever the Axes are."""
    return axes.xaxis.label.get_color()


def legend_on(axes: Axes) -> Axes:
    """Add a legend and return the Axes."""
    axes.legend(frameon=False, fontsize="small", labelcolor=text_colour(axes))
    return axes


def array(value: Any) -> Array:
    """Return a float64 array from a tensor on any device or anything array-like."""
    return np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)


def column(name: str, value: Any) -> Array:
    """Return (N,) from (N,) or (N, 1). Raises for other shapes."""
    found = array(value)
    found = found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
    if found.ndim != 1:
        raise InputError(name, f"must be one column, (N,) or (N, 1), got shape {found.shape}")
    return found


def pairs(name: str, value: Any) -> Array:
    """Return an array (N, 2). Raises for other shapes."""
    found = array(value)
    if found.ndim != 2 or found.shape[1] != 2:
        raise InputError(name, f"must be two columns, (N, 2), got shape {found.shape}")
    return found


class Grid(NamedTuple):
    """A full rectangular grid: its points (G, 2) in the given order, both axes, and the extent of its image."""

    points: Array
    x1: Array
    x2: Array
    extent: tuple[float, float, float, float]

    def image(self, values: Array) -> Array:
        """Reshape values at the points, (G,), to rows of x2 by columns of x1."""
        by_x1_then_x2 = np.lexsort((self.points[:, 1], self.points[:, 0]))
        return np.asarray(values[by_x1_then_x2].reshape(len(self.x1), len(self.x2)).T)


def grid_of(grid: Any, *around: Any) -> Grid:
    """Return the grid of these points; for None, 101 by 101 points around the given data."""
    points = pairs("grid", grid) if grid is not None else _surround([v for v in around if v is not None])
    x1, x2 = np.unique(points[:, 0]), np.unique(points[:, 1])
    if len(x1) * len(x2) != len(points) or min(len(x1), len(x2)) < 2:
        found = f"must be a full grid, every pair of two ranges once, got {len(points)} points"
        raise InputError("grid", found)
    half = [(axis[-1] - axis[0]) / (len(axis) - 1) / 2 for axis in (x1, x2)]
    return Grid(points, x1, x2, (x1[0] - half[0], x1[-1] + half[0], x2[0] - half[1], x2[-1] + half[1]))


def _surround(around: list[Any]) -> Array:
    if not around:
        raise InputError("grid", "must be given without data or marks, got None")
    points = np.concatenate([pairs("data", v) for v in around])
    low, high = points.min(0), points.max(0)
    margin = 0.15 * np.where(high > low, high - low, 1.0)
    ranges = [np.linspace(a - m, b + m, 101) for a, b, m in zip(low, high, margin)]
    return np.stack([axis.ravel() for axis in np.meshgrid(*ranges, indexing="ij")], 1)
