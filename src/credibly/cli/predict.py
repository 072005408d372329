"""`credibly predict`: a run and a table in, a table of predictions out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from credibly.cli import options
from credibly.cli.console import as_text, say
from credibly.cli.error_handling import never_lost, plainly, stopped
from credibly.cli.processes import speaks
from credibly.errors import InputError


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `credibly fit` made.")],
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="A CSV or Parquet file with the same columns; no target is needed.")
    ],
    out: Annotated[
        Path, typer.Option(help="The file to write: .csv, .tsv, .csv.gz or .parquet; in a folder that exists.")
    ] = Path("predictions.csv"),
    draws: Annotated[
        int | None,
        typer.Option(help="Use so many of the draws, evenly spaced: quicker, a little rougher. By default all."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that is there, once the new one is whole.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Predict the rows of a table, each with its uncertainty.

    A regression gives mean, std, aleatoric and epistemic variance (noise, and what
    the model does not know; they sum to std squared), lower_90 and upper_90. A
    classification gives the likeliest class, p_<class> for each, and the same parts
    in nats. `ood` is near 1 where a row is unlike those that were fitted, and
    `notes` says what was odd about it: a gap that was filled, an unknown category.

    Files larger than memory are streamed. Processes that torchrun started share
    out the rows.
    """
    with plainly(shared=True):
        if draws is not None and draws < 1:
            raise InputError("--draws", f"found {draws}", "Pass a number from 1 up")
        from credibly.core.progress import Progress
        from credibly.tables.reading import header
        from credibly.tables.run import TableRun
        from credibly.tables.writing import TableWriter

        header(table)  # what is wrong with the two files is found before anything is loaded
        TableWriter(out, force=force)
        if out.exists() and os.path.samefile(out, table):
            raise InputError(
                "--out", f"{out} is the table itself", "Choose another file; the table is never written over"
            )
        model = TableRun.load(folder).model
        try:
            rows = _rows(table) if speaks() else 0
            with never_lost() as stop_again, Progress("predict", rows, False if quiet or as_json else None) as line:

                def tell(done: int) -> None:
                    stop_again()
                    line.update(done)

                done = model.predict_file(table, out, force=force, draws=draws, progress=tell)
        except KeyboardInterrupt:
            stopped("no predictions were kept")
        if as_json:
            told: dict[str, Any] = {
                "out": os.fspath(out), "rows": done.rows, "rows_with_notes": done.noted, "missing_columns": list(done.absent)
            }  # fmt: skip
            typer.echo(as_text(told))
            return
        if not quiet:
            say(f"{done.rows:,} rows predicted.")
            if done.absent:
                say(f"The table has no column {', '.join(done.absent)}: filled as missing in every row.")
            if done.noted:
                say(f"{done.noted:,} rows have notes, such as: {'; '.join(done.examples)}.")
        typer.echo(os.fspath(out))


def _rows(table: Path) -> int:
    """About how many rows a file has, for the progress line."""
    from credibly.tables.reading import count_rows

    known = count_rows(table)
    if known is not None:
        return known
    with open(table, "rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(2**24), b""))
