"""Pictures for a page: matplotlib figures as inline SVG."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from credibly.core.stages import stage
from credibly.errors import InputError
from credibly.plot import INK, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches. The panels of a row are separate pictures, so that they wrap on a narrow screen.
SIZE = (4.0, 3.15)


@dataclass(frozen=True)
class Picture:
    """An inline picture.

    Attributes:
        name: unique on its page; prefixes every id in the SVG.
        svg: markup from `svg_of`, inserted into the page as is.
        alt: text alternative.
        title: short heading above the picture.
        caption: text below the picture.
    """

    name: str
    svg: str
    alt: str
    title: str = ""
    caption: str = ""


def picture(
    name: str,
    paint: Callable[[Axes], Any],
    *,
    alt: str,
    title: str = "",
    caption: str = "",
    size: tuple[float, float] = SIZE,
) -> Picture:
    """Return a picture drawn by `paint` on an Axes, such as `lambda ax: plot.reliability(p, y, ax=ax)`.

    A legend is moved below the axes, so that it covers no data.
    """
    import matplotlib as mpl

    stage("pictures", title)
    try:
        return Picture(name, _draw(name, paint, size), alt, title, caption)
    except ValueError:
        # A column name from the user's table contains "$" and does not parse as a formula.
        with mpl.rc_context({"text.parse_math": False}):
            return Picture(name, _draw(name, paint, size), alt, title, caption)


def _draw(name: str, paint: Callable[[Axes], Any], size: tuple[float, float]) -> str:
    from matplotlib.figure import Figure

    with style():
        # Not from pyplot, which would keep it in a global registry until closed.
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        paint(axes)
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
            _legend_below(figure, *axes.get_legend_handles_labels())
        return svg_of(figure, name)


def _legend_below(figure: Figure, handles: list[Any], labels: list[str]) -> None:
    """Add a legend below the axes in as many columns as fit, at most three."""
    tight: dict[str, Any] = {"columnspacing": 1.0, "handlelength": 1.5, "handletextpad": 0.5}
    for columns in (3, 2, 1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, **tight)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def svg_of(figure: Figure, name: str) -> str:
    """Return the figure as an <svg> element for inline use. The output is deterministic.

    Ids are prefixed, since inline pictures share them with the page. The ink becomes the page's text colour. What only
    a standalone file needs (prolog, metadata, global style sheet, fixed size) is removed.
    """
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise InputError("name", f"must be a letter followed by letters, digits, - or _, got {name!r}")
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "svg.id": None}), warnings.catch_warnings():
        # Text stays text, and the browser has fonts for what matplotlib's lack.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=no_metadata, dpi=110)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<style\b.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*</defs>\n?", "", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    text = text.replace(INK, "currentColor")
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(width|height|version|xmlns(:xlink)?)="[^"]*"', "", opening)
    # All browsers accept a plain href in inline SVG; xlink:href would need its own namespace.
    return f'{opening} aria-hidden="true" focusable="false">{rest.replace("xlink:href=", "href=")}'
