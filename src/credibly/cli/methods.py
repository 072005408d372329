"""`credibly methods`: the available methods."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the methods with the names that other commands take and a one-line description."""
    with handle_errors():
        from credibly.methods import METHODS

        rows = [{"name": name, "class": kind.__name__, "description": kind.title()} for name, kind in METHODS.items()]
        if as_json:
            echo(json.dumps(rows, indent=2))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("Method", "Class", "Description"):
            table.add_column(title, no_wrap=title != "Description")
        for row in rows:
            table.add_row(*row.values())
        Console().print(table)
