"""The command line, one file per verb. Nothing heavy is imported before a command runs, so help is instant."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from credibly.cli import (
    bench,
    card,
    compare,
    demo,
    evaluate,
    export,
    fit,
    methods,
    playground,
    predict,
    report,
    resume,
    serve,
    study,
    verify,
)
from credibly.cli.group import CommandGroup
from credibly.cli.output import PrintableFormatter, echo
from credibly.core import interrupts

app = typer.Typer(
    name="credibly",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb, command in (
    ("demo", demo),
    ("fit", fit),
    ("predict", predict),
    ("evaluate", evaluate),
    ("compare", compare),
    ("report", report),
    ("resume", resume),
    ("verify", verify),
    ("export", export),
    ("card", card),
    ("serve", serve),
    ("methods", methods),
    ("playground", playground),
    ("study", study),
    ("bench", bench),
):
    app.command(verb, context_settings=getattr(command, "CONTEXT", None))(command.run)


def _version(asked: bool) -> None:
    if asked:
        from credibly import __version__

        echo(f"credibly {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Bayesian deep learning for PyTorch: any network in, credible predictions out.

    Start with `credibly demo`, which fits every method to real data and writes a
    page that explains the results, or with your own table:

    credibly fit house.csv --target price

    credibly predict run/ new.csv

    Exit codes: 0 success; 1 a failure during the run (training diverged, disk full);
    2 an invalid request (a missing file, an unknown column, a bad value); 130 stopped
    by Ctrl-C. With --json an error is one JSON object on standard output.
    """


def main() -> None:
    """Run the `credibly` console script."""
    interrupts.install()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    app()
