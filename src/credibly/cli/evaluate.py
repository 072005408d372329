"""`credibly evaluate`: how good a run is on rows it has not seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.console import as_text, figures_table, say
from credibly.cli.error_handling import plainly
from credibly.errors import InputError


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `credibly fit` made.")],
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="A CSV or Parquet file with the same columns and the target.")
    ],
    as_json: options.Json = False,
) -> None:
    """Measure a run on a table whose targets are known: accuracy, calibration, log density.

    Each figure stands beside that of a model that looks at no input at all.
    Rows without a target are left out.
    """
    with plainly():
        import torch

        from credibly.metrics import evaluation
        from credibly.tables.reading import header, read_table
        from credibly.tables.run import TableRun
        from credibly.tables.summarise import baseline

        header(table)  # what is wrong with the file is found before anything is loaded
        done = TableRun.load(folder)
        known = done.model.preparation
        rows = read_table(table, text=known.text_names)
        usable = known.usable_rows(rows)
        if not len(usable):
            raise InputError(
                "table", f"no row of {table.name} has a {known.target!r}", "Use credibly predict for such rows"
            )
        kept = rows.take(usable)
        y = known.target_values(kept)
        predictive = done.model.predict_table(kept)
        figures = evaluation.evaluate(predictive, torch.from_numpy(y), seed=done.config.seed)
        plain = baseline(done.model, y, done.sample())
        if as_json:
            told = {
                "run": os.fspath(folder),
                "table": os.fspath(table),
                "rows": len(kept),
                "figures": figures,
                "baseline": plain,
            }
            typer.echo(as_text(told))
            return
        figures_table(f"{done.config.method} on {len(kept):,} rows of {table.name}", figures, plain)
        if len(usable) < len(rows):
            say(f"{len(rows) - len(usable):,} rows without a target were left out.")
