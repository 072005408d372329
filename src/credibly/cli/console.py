"""How commands speak: to people on standard output, with tables of figures."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from credibly.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

MEANINGS = {
    "log_density": "mean log predictive density of a row: higher is better",
    "rmse": "root mean squared error of the mean",
    "crps": "error of the whole predictive distribution, in the target's units",
    "coverage": "share inside the 90 % interval or set: near 0.9 is right",
    "width": "mean width of the 90 % interval",
    "calibration_error": "mean gap between stated and observed frequencies",
    "accuracy": "share of rows whose likeliest class is right",
    "brier": "squared error of the probabilities",
    "ece": "gap between confidence and accuracy",
    "set_size": "mean number of classes in the 90 % set",
}


def say(*lines: str) -> None:
    """Lines for people, folded to the width of the terminal; what is indented or listed stays so where it is folded."""
    width = min(110, shutil.get_terminal_size().columns)
    for line in "\n".join(lines).split("\n"):
        inner = len(line) - len(line.lstrip())
        hang = " " * (inner + 2 if inner or line.startswith("- ") else 0)
        typer.echo(textwrap.fill(line, width, subsequent_indent=hang, break_on_hyphens=False) if line else "")


def figures_table(title: str, figures: Mapping[str, float], baseline: Mapping[str, float]) -> None:
    """Figures of merit beside those of knowing nothing of the inputs, each with what it means."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    table.add_column("figure", no_wrap=True)
    table.add_column("this fit", justify="right", no_wrap=True)
    table.add_column("no inputs", justify="right", no_wrap=True)
    table.add_column("meaning")
    for key, value in figures.items():
        other = number(baseline[key]) if key in baseline else ""
        table.add_row(key.replace("_", " "), number(value), other, MEANINGS.get(key, ""))
    show_table(table)


def show_table(table: Table) -> None:
    """A table on standard output; on a terminal too narrow for its numbers lines run over rather than lose columns."""
    from rich.console import Console

    least = Console(width=400).measure(table).minimum
    Console(width=max(Console().width, least)).print(table)


def number(value: float) -> str:
    """Three decimals, or as many figures as a large or small number needs."""
    if not math.isfinite(value) or 0.01 <= abs(value) < 1000 or value == 0:
        return f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def as_text(values: Any) -> str:
    """Plain values as JSON; what is not finite is null, since JSON has no word for it."""
    return json.dumps(_finite(values), indent=2)


def _finite(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def show_page(page: Path) -> None:
    """Opens a page in the browser."""
    import webbrowser

    webbrowser.open(page.resolve().as_uri())


def check_folder(out: Path, force: bool) -> None:
    """Refuses a folder that is not empty, before any work."""
    if out.exists() and not out.is_dir():
        raise InputError("--out", f"{out} is a file", "Name a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError("--out", f"{out} exists and is not empty", "Choose another folder, or pass --force")
