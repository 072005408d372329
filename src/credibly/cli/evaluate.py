"""`credibly evaluate`: metrics of a run on new rows, and the verdict on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.console import print_wrapped, to_json
from credibly.cli.early_checks import check_run, check_table
from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo
from credibly.cli.verdicts import details_of, print_summary, verdict_of
from credibly.errors import InputError


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit`.")],
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="CSV or Parquet file with the same columns and the target.")
    ],
    as_json: options.Json = False,
) -> None:
    """Evaluate a run on a table with known targets: accuracy, calibration, log density.

    Each metric is shown beside that of a baseline that ignores the inputs, followed by
    a verdict from the same checks as in the report of the fit. Rows without a target are
    left out.
    """
    with handle_errors():
        check_run(folder)
        check_table(table)
        from credibly.tables.files.reading import header, read_table
        from credibly.tables.run import TableRun
        from credibly.tables.summarise import summarise_on

        # Report errors in the file before anything is loaded.
        names = header(table)
        done = TableRun.load(folder)
        known = done.model.preparation
        absent = known.missing_columns(names)
        if len(absent) == len(known.names):
            listed = ", ".join(absent[:5]) + (" and others" if len(absent) > 5 else "")
            raise InputError("table", f"{table.name} has none of the columns of the training data ({listed})")
        rows = read_table(table, text=known.text_names, conventions=known.conventions)
        usable = known.usable_rows(rows)
        if not len(usable):
            raise InputError("table", f"no row of {table.name} has a {known.target!r}", "Use credibly predict instead")
        joint, *each = summarise_on(done, rows.take(usable), table.name)
        # With several targets, the verdict is on the first and the metrics cover all of them.
        facts = each[0] if each else joint
        if as_json:
            details = details_of(facts)
            results = {
                "run": os.fspath(folder),
                "table": os.fspath(table),
                "rows": len(facts.y),
                "missing_columns": absent,
                "figures": joint.figures,
                "baseline": joint.baseline,
                "verdict": verdict_of(facts),
                **{key: details[key] for key in ("assessment", "by_class", "confusion_matrix")},
            }
            echo(to_json(results))
            return
        title = f"{done.config.method} on {len(facts.y):,} row{'s' if len(facts.y) != 1 else ''} of {table.name}"
        print_summary(title, facts, joint.figures if each else None)
        if len(usable) < len(rows):
            print_wrapped(f"{len(rows) - len(usable):,} rows without a target were left out.")
        if absent:
            print_wrapped(f"The table has no column {', '.join(absent)}: treated as missing in every row.")
