"""`credibly report`: rewrites the page of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.console import open_in_browser
from credibly.cli.early_checks import check_run
from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit`.")],
    as_json: options.Json = False,
    open_page: options.Open = False,
) -> None:
    """Rewrite the page of a run, RUN/report.html.

    It shows what was fitted, how accurate and calibrated it is, where it is
    uncertain and what to do next: one self-contained file that works offline.
    """
    with handle_errors():
        check_run(folder)
        from credibly.cli.fit import write_results
        from credibly.tables.run import TableRun

        page = write_results(TableRun.load(folder), progress=False if as_json else None)[1]
        if as_json:
            echo((folder / "results.json").read_text(encoding="utf-8").strip())
        else:
            echo(os.fspath(page))
        if open_page:
            open_in_browser(page)
