"""`credibly export`: a run as one ONNX file, from the cells of a row to predictions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.console import print_wrapped, to_json
from credibly.cli.early_checks import check_run
from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo
from credibly.core.levels import check_levels
from credibly.errors import InputError


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit`.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, ending in .onnx.")],
    level: Annotated[
        str, typer.Option(metavar="A,B", help="Levels of the intervals: 0.8,0.95 gives lower_80 and so on.")
    ] = "0.9",
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file once the new one is complete.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Export a run as an ONNX file that predicts without credibly and torch.

    Its inputs are the columns of the table: float64 for numbers, with NaN for missing
    cells, and text for categories. Its outputs are the columns of `credibly predict`.
    The file is compared with the run's own predictions before it is put in place.

    credibly export run/ model.onnx

    Needs the optional dependencies of the extra "export".
    """
    with handle_errors():
        check_run(folder)
        levels = check_levels("--level", options.split_names(level))
        if out.suffix != ".onnx":
            raise InputError("FILE", f"must end in .onnx, got {os.fspath(out)!r}")
        if out.exists() and not force:
            raise InputError("FILE", f"{os.fspath(out)!r} exists", "Pass --force to replace it")
        from credibly.export.tables import export_run
        from credibly.tables.run import TableRun

        done = export_run(TableRun.load(folder), out, levels=levels, overwrite=force)
        worst = max(done.difference.values())
        if as_json:
            results = {
                "out": os.fspath(done.path),
                "bytes": done.bytes,
                "inputs": list(done.inputs),
                "outputs": list(done.outputs),
                "draws": done.draws,
                "largest_difference": worst,
                "notes": list(done.notes),
            }
            echo(to_json(results))
            return
        if not quiet:
            print_wrapped(f"{done.bytes / 1e6:.1f} MB, {done.draws:,} draws; differs from the run by {worst:.0e}.")
            for note in done.notes:
                print_wrapped(note)
        echo(os.fspath(done.path))
