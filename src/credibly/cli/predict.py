"""`credibly predict`: predictions of a run for the rows of a table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from credibly.cli import options
from credibly.cli.console import print_wrapped, to_json
from credibly.cli.error_handling import exit_stopped, handle_errors, persistent_interrupt
from credibly.cli.processes import is_leader
from credibly.core.checks import check_integer
from credibly.errors import InputError


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit`.")],
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="File with the same columns; no target needed.")],
    out: Annotated[
        Path,
        typer.Option(
            help="File to write: .csv, .tsv, .csv.gz, .parquet, .feather, .jsonl or .xlsx, in an existing folder."
        ),
    ] = Path("predictions.csv"),
    draws: Annotated[
        int | None,
        typer.Option(
            help="Number of posterior draws to use, evenly spaced: fewer are faster and less accurate. (Default: all.)"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file once the new one is complete.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Predict the rows of a table with uncertainty.

    Regression: mean, std, aleatoric and epistemic variance (noise and model
    uncertainty; they sum to std squared), lower_90 and upper_90. Classification:
    the most probable class, p_<class> per class, and total, aleatoric and epistemic
    uncertainty in nats. `ood` near 1 means a row unlike the training data; `notes`
    lists what is unusual about it: an imputed value, an unknown category.

    Files larger than memory are streamed. Under torchrun the processes share the
    rows.
    """
    with handle_errors(shared=True):
        if draws is not None:
            check_integer("--draws", draws)
        from credibly.core.progress import Progress
        from credibly.tables.reading import header
        from credibly.tables.run import TableRun
        from credibly.tables.writing import TableWriter

        # Errors in the two files show before anything is loaded.
        header(table)
        TableWriter(out, force=force)
        if out.exists() and os.path.samefile(out, table):
            raise InputError("--out", f"{out} is the table itself, which is never overwritten", "Choose another file")
        model = TableRun.load(folder).model
        try:
            rows = _rows(table) if is_leader() else 0
            with (
                persistent_interrupt() as raise_again,
                Progress("predict", rows, False if quiet or as_json else None) as line,
            ):

                def update(done: int) -> None:
                    raise_again()
                    line.update(done)

                done = model.predict_file(table, out, force=force, draws=draws, progress=update)
        except KeyboardInterrupt:
            exit_stopped("no predictions were written")
        if as_json:
            results: dict[str, Any] = {
                "out": os.fspath(out),
                "rows": done.rows,
                "rows_with_notes": done.noted,
                "missing_columns": list(done.absent),
            }
            typer.echo(to_json(results))
            return
        if not quiet:
            print_wrapped(f"{done.rows:,} rows predicted.")
            if done.absent:
                print_wrapped(f"The table has no column {', '.join(done.absent)}: treated as missing in every row.")
            if done.noted:
                print_wrapped(f"{done.noted:,} rows have notes, such as: {'; '.join(done.examples)}.")
        typer.echo(os.fspath(out))


def _rows(table: Path) -> int:
    """Return the approximate number of rows of a file, for the progress bar."""
    from credibly.tables.reading import count_rows

    known = count_rows(table)
    if known is not None:
        return known
    with open(table, "rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(2**24), b""))
