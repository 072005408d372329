"""`credibly report`: the page of a run, made again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.console import show_page
from credibly.cli.error_handling import plainly


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `credibly fit` made.")],
    as_json: options.Json = False,
    open_page: options.Open = False,
) -> None:
    """Write the page of a run again, RUN/report.html.

    What was fitted, how good and calibrated it is, what it does not know, what to
    do next: one file with its pictures inside, which needs no network.
    """
    with plainly():
        from credibly.cli.fit import write_results
        from credibly.tables.run import TableRun

        page = write_results(TableRun.load(folder))[1]
        if as_json:
            typer.echo((folder / "results.json").read_text(encoding="utf-8").strip())
        else:
            typer.echo(os.fspath(page))
        if open_page:
            show_page(page)
