"""Output of the commands: wrapped text, tables of metrics, JSON."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credibly.cli.early_checks import check_output_folder
from credibly.cli.output import echo, in_markup
from credibly.core.text import printable
from credibly.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTIONS = {
    "log_density": "mean log predictive density per row; higher is better",
    "rmse": "root mean squared error of the predictive mean",
    "crps": "error of the whole predictive distribution, in the units of the target",
    "coverage": "fraction of rows inside the 90 % interval or set; should be near 0.9",
    "width": "mean width of the 90 % interval",
    "calibration_error": "mean gap between predicted and observed frequencies",
    "concordance": "fraction of pairs of rows in the right order; 0.5 is chance",
    "accuracy": "fraction of rows whose most probable class is correct",
    "brier": "squared error of the probabilities; lower is better",
    "ece": "mean gap between confidence and accuracy",
    "set_size": "mean number of classes in the 90 % set",
    "balanced_accuracy": "mean recall of the classes",
    "roc_auc": "how often a row of the rarer class (or of each class) gets the higher probability",
    "average_precision": "mean precision over all recalls, of the rarer class or of each; its frequency for no skill",
}


def print_wrapped(*lines: str) -> None:
    """Print lines wrapped to the width of the terminal; indented lines and list items get a hanging indent."""
    width = min(110, shutil.get_terminal_size().columns)
    for line in printable("\n".join(lines)).split("\n"):
        inner = len(line) - len(line.lstrip())
        hang = " " * (inner + 2 if inner or line.startswith("- ") else 0)
        echo(textwrap.fill(line, width, subsequent_indent=hang, break_on_hyphens=False) if line else "")


def print_metrics(title: str, metrics: Mapping[str, float], baseline: Mapping[str, float]) -> None:
    """Print metrics beside those of a baseline that ignores the inputs, each with its meaning."""
    from rich.table import Table

    table = Table(
        title=in_markup(title), title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    table.add_column("metric", no_wrap=True)
    table.add_column("this fit", justify="right", no_wrap=True)
    table.add_column("no inputs", justify="right", no_wrap=True)
    table.add_column("meaning")
    for key, value in metrics.items():
        other = format_number(baseline[key]) if key in baseline else ""
        table.add_row(in_markup(key.replace("_", " ")), format_number(value), other, DESCRIPTIONS.get(key, ""))
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table. On a terminal too narrow for its numbers, lines overflow rather than lose columns."""
    from rich.console import Console

    least = Console(width=400).measure(table).minimum
    Console(width=max(Console().width, least)).print(table)


def format_number(value: float) -> str:
    """Format a number with three decimals, or with significant digits if it is very large or small."""
    if not math.isfinite(value) or 0.01 <= abs(value) < 1000 or value == 0:
        return f"{value:.3f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def to_json(values: Any) -> str:
    """Return plain values as JSON text, with null for values that are not finite."""
    return json.dumps(_finite(values), indent=2)


def _finite(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def open_in_browser(page: Path) -> None:
    """Open a page in the browser."""
    import webbrowser

    webbrowser.open(page.resolve().as_uri())


def check_folder(out: Path, force: bool) -> None:
    """Raise if the folder is not empty, before any work."""
    if out.exists() and not out.is_dir():
        raise InputError("--out", f"{out} is a file", "Pass a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError("--out", f"{out} is not empty", "Choose another folder, or pass --force")
    check_output_folder(out, force=True)
