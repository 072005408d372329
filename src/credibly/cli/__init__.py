"""The command line, one file a verb. Nothing heavy is imported before a command runs, so that help comes at once."""

from __future__ import annotations

from typing import Annotated

import typer

from credibly.cli import demo, methods, resume

app = typer.Typer(
    name="credibly",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.run)
app.command("methods")(methods.run)
app.command("resume")(resume.run)


def _version(asked: bool) -> None:
    if asked:
        from credibly import __version__

        typer.echo(f"credibly {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Bayesian deep learning for PyTorch: any network in, credible predictions out.

    Begin with `credibly demo`, which fits every method to real data and writes a page that explains the results.
    """


def main() -> None:
    """The `credibly` console script."""
    app()
