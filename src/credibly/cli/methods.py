"""`credibly methods`: what there is to choose from."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from credibly.cli.error_handling import plainly


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, for programs.")] = False,
) -> None:
    """List the methods by the names that other commands take, each with a line on what it is."""
    with plainly():
        from credibly.demo.fits import summary
        from credibly.methods import METHODS

        rows = [{"name": name, "class": kind.__name__, "description": summary(name)} for name, kind in METHODS.items()]
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("Method", "Class", "What it is"):
            table.add_column(title, no_wrap=title != "What it is")
        for row in rows:
            table.add_row(*row.values())
        Console().print(table)
