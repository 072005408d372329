"""`credibly predict`: predictions of a run for the rows of a table."""

from __future__ import annotations

import csv
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from credibly.cli import options
from credibly.cli.console import print_wrapped, to_json
from credibly.cli.early_checks import check_output_file, check_run, check_table
from credibly.cli.error_handling import exit_stopped, handle_errors, persistent_interrupt
from credibly.cli.output import echo
from credibly.cli.processes import is_leader
from credibly.core.checks import check_integer
from credibly.core.levels import LEVELS, check_levels
from credibly.errors import InputError

if TYPE_CHECKING:
    from credibly.tables.model import PredictedFile, TableModel


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit`.")],
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="File with the same columns; no target needed.")],
    out: Annotated[
        Path,
        typer.Option(
            help="File to write: .csv, .tsv, .csv.gz, .parquet, .feather, .jsonl or .xlsx, in an existing folder."
        ),
    ] = Path("predictions.csv"),
    level: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Levels of the intervals: 0.8,0.95 gives lower_80, upper_80, lower_95 and upper_95. Regression only.",
        ),
    ] = "0.9",
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Columns of the table to copy unchanged, such as id,name, or all. (Default: none.)",
            autocompletion=options.complete_columns,
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="12,24",
            help="Times at which to write the probability of survival, as survival_12 and survival_24. Censored"
            " times only. (Default: none.)",
        ),
    ] = None,
    allow_empty: Annotated[
        bool,
        typer.Option(
            "--allow-empty",
            help="Allow empty prediction sets of classes, so that coverage equals the level exactly. By default the"
            " most probable class is added to an empty set, so coverage on easy tables exceeds the level.",
        ),
    ] = False,
    draws: Annotated[
        int | None,
        typer.Option(
            help="Number of posterior draws to use, evenly spaced: fewer are faster and less accurate. (Default: all.)"
        ),
    ] = None,
    excel_safe: Annotated[
        bool,
        typer.Option(
            "--excel-safe",
            help="Write an apostrophe before names and texts that begin with =, +, - or @, which a spreadsheet would"
            " evaluate as formulas. Numbers stay numbers.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file once the new one is complete.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Predict the rows of a table with uncertainty.

    Regression: mean, std, its parts std_aleatoric (noise) and std_epistemic (what the
    model does not know; the squares of the two sum to that of std), lower_90 and
    upper_90. Classification: the most probable class, p_<class> per class, and
    entropy_total, which is entropy_aleatoric plus entropy_epistemic, in nats.
    Censored times: also the median, at_least_90, which the time exceeds with a
    guarantee of 90 %, and survival_12 with --at 12. Several targets: also
    joint_lower_90 and joint_upper_90, which hold for all of them together. `ood`
    near 1 means a row unlike the training data; `notes` lists what is unusual about
    it: an imputed value, an unknown category.

    credibly predict run/ new.csv --keep id --level 0.8,0.95

    Files larger than memory are streamed. Under torchrun the processes share the
    rows.
    """
    with handle_errors(shared=True):
        check_run(folder)
        check_table(table)
        check_output_file(out, force)
        if out.exists() and os.path.samefile(out, table):
            raise InputError("--out", f"{out} is the table itself, which is never overwritten", "Choose another file")
        levels = check_levels("--level", options.split_names(level))
        kept = _kept(keep)
        if draws is not None:
            check_integer("--draws", draws)
        if at is not None and not options.split_names(at):
            raise InputError("--at", f"must be positive times such as 12,24, got {at!r}")
        from credibly.core.interrupts import holding_output
        from credibly.core.progress import Progress
        from credibly.tables.files.reading import header
        from credibly.tables.guarantee import guaranteed
        from credibly.tables.prediction_columns import check_times
        from credibly.tables.run import TableRun

        # Report errors in the file before anything is loaded.
        header(table)
        times = check_times("--at", () if at is None else options.split_names(at))
        model = TableRun.load(folder).model
        _check_available(model, folder, levels, allow_empty)
        try:
            rows = _rows(table) if is_leader() else 0
            with (
                holding_output(),
                persistent_interrupt() as raise_again,
                Progress("predict", rows, False if quiet or as_json else None) as line,
            ):

                def update(done: int) -> None:
                    raise_again()
                    line.update(done)

                done = model.predict_file(
                    table,
                    out,
                    levels=levels,
                    keep=kept,
                    times=times,
                    promise=partial(guaranteed, model, allow_empty=allow_empty),
                    force=force,
                    excel_safe=excel_safe,
                    draws=draws,
                    progress=update,
                )
        except KeyboardInterrupt:
            exit_stopped("no predictions were written")
        if as_json:
            results: dict[str, Any] = {
                "out": os.fspath(out),
                "rows": done.rows,
                "rows_with_notes": done.noted,
                "missing_columns": list(done.absent),
            }
            echo(to_json(results))
            return
        if not quiet:
            _print_summary(model, done)
        echo(os.fspath(out))


def _check_available(model: TableModel, folder: Path, levels: tuple[float, ...], allow_empty: bool) -> None:
    """Raise if the run has no guarantee at one of the levels, or no prediction sets where an option needs them."""
    from credibly.tables.guarantee import check_promise

    if model.preparation.classes is not None and levels != LEVELS and model.calibration is None:
        raise InputError("--level", f"{folder} predicts classes, without prediction sets", "Leave it out")
    if model.calibration is not None:
        check_promise("--level", max(levels), model.calibration.rows)
    if allow_empty and (model.preparation.classes is None or model.calibration is None):
        raise InputError("--allow-empty", f"{folder} has no prediction sets", "Leave it out")


def _print_summary(model: TableModel, done: PredictedFile) -> None:
    print_wrapped(f"{done.rows:,} row{'s' if done.rows != 1 else ''} predicted.")
    if done.absent:
        print_wrapped(f"The table has no column {', '.join(done.absent)}: treated as missing in every row.")
    if done.noted:
        count = "1 row has" if done.noted == 1 else f"{done.noted:,} rows have"
        print_wrapped(f"{count} notes, such as: {'; '.join(done.examples)}.")
    if model.calibration is None and model.preparation.classes is None:
        print_wrapped(
            "These are posterior intervals without a coverage guarantee: the run has no held-out scores, which"
            " need at least 50 rows in `credibly fit`."
        )


def _kept(text: str | None) -> tuple[str, ...]:
    """Return the names in a comma-separated list; a name with a comma is quoted, as in a CSV file."""
    if text is None:
        return ()
    try:
        names = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise InputError("--keep", f"must be a list of columns such as id,name, got {text!r} ({error})") from None
    found = tuple(name.strip() for name in names)
    if not found or not all(found):
        raise InputError("--keep", f"must be a list of columns such as id,name, or all, got {text!r}")
    return found


def _rows(table: Path) -> int:
    """Return the approximate number of rows of a file, for the progress bar."""
    from credibly.tables.files.reading import count_rows

    known = count_rows(table)
    if known is not None:
        return known
    with open(table, "rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(2**24), b""))
