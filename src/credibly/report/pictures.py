"""Pictures for a page: matplotlib figures as SVG text that can stand inline beside others."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from credibly.errors import InputError
from credibly.plot import INK, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.0, 3.15)  # inches; panels of a row are drawn apart, so that they wrap on a narrow screen


@dataclass(frozen=True)
class Picture:
    """An inline picture.

    Attributes:
        name: unique on its page; every id inside the SVG starts with it.
        svg: the drawing, as `svg_of` gives it; it goes into the page as it is.
        alt: what it shows, for those who cannot see it.
        title: a short heading above it.
        caption: the sentence below it.
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
    """A picture that `paint` draws on an Axes it is given, such as `lambda ax: plot.reliability(p, y, ax=ax)`.

    A legend it makes is moved below the axes, where it covers nothing.
    """
    import matplotlib as mpl

    try:
        return Picture(name, _drawn(name, paint, size), alt, title, caption)
    except ValueError:  # a name that is the user's holds signs that read as a formula and are none
        with mpl.rc_context({"text.parse_math": False}):
            return Picture(name, _drawn(name, paint, size), alt, title, caption)


def _drawn(name: str, paint: Callable[[Axes], Any], size: tuple[float, float]) -> str:
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=size, layout="constrained")  # not pyplot's: nothing global to close afterwards
        axes = figure.subplots()
        paint(axes)
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
            _legend_below(figure, *axes.get_legend_handles_labels())
        return svg_of(figure, name)


def _legend_below(figure: Figure, handles: list[Any], labels: list[str]) -> None:
    """A legend in as many columns, up to three, as the figure is wide enough for."""
    tight: dict[str, Any] = {"columnspacing": 1.0, "handlelength": 1.5, "handletextpad": 0.5}
    for columns in (3, 2, 1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, **tight)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def svg_of(figure: Figure, name: str) -> str:
    """The figure as an <svg> element for inline use; the same figure gives the same text.

    Ids are prefixed, since an inline picture shares them with its page; the ink becomes the page's text colour; and the
    parts that only a file of its own needs (prolog, metadata, a style sheet for everything, a fixed size) are dropped.
    """
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise InputError("name", f"found {name!r}", "Pass a letter, then letters, digits, - and _")
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "svg.id": None}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing, dpi=110)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<style\b.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*</defs>\n?", "", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    text = text.replace(INK, "currentColor")
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(width|height|version|xmlns(:xlink)?)="[^"]*"', "", opening)
    # Old and new browsers alike take a plain href inside inline SVG; the prefix would need its own namespace.
    return f'{opening} aria-hidden="true" focusable="false">{rest.replace("xlink:href=", "href=")}'
