"""`credibly evaluate`: metrics of a run on new rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.console import print_metrics, print_wrapped, to_json
from credibly.cli.early_checks import check_run, check_table
from credibly.cli.error_handling import handle_errors
from credibly.errors import InputError


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit`.")],
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="File with the same columns and the target.")],
    as_json: options.Json = False,
) -> None:
    """Evaluate a run on a table with known targets: accuracy, calibration, log density.

    Each metric is shown beside that of a baseline that ignores the inputs. Rows
    without a target are left out.
    """
    with handle_errors():
        check_run(folder)
        check_table(table)
        import torch

        from credibly.tables.reading import header, read_table
        from credibly.tables.run import TableRun
        from credibly.tables.summarise import baseline
        from credibly.tables.target_metrics import target_metrics

        # Errors in the file show before anything is loaded.
        header(table)
        done = TableRun.load(folder)
        known = done.model.preparation
        rows = read_table(table, text=known.text_names, conventions=known.conventions)
        usable = known.usable_rows(rows)
        if not len(usable):
            raise InputError("table", f"no row of {table.name} has a {known.target!r}", "Use credibly predict instead")
        kept = rows.take(usable)
        y = known.target_values(kept)
        predictive = done.model.predict_table(kept)
        metrics = target_metrics(predictive, torch.from_numpy(y), known.targets, seed=done.config.seed)
        plain = baseline(done.model, y, done.sample())
        if as_json:
            results = {
                "run": os.fspath(folder),
                "table": os.fspath(table),
                "rows": len(kept),
                "figures": metrics,
                "baseline": plain,
            }
            typer.echo(to_json(results))
            return
        print_metrics(f"{done.config.method} on {len(kept):,} rows of {table.name}", metrics, plain)
        if len(usable) < len(rows):
            print_wrapped(f"{len(rows) - len(usable):,} rows without a target were left out.")
