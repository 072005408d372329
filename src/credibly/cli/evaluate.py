"""`credibly evaluate`: how good a run is on rows it has not seen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.failures import plainly
from credibly.cli.words import figures_table, say


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

        from credibly import evaluation
        from credibly.tables.reading import read_table
        from credibly.tables.run import TableRun
        from credibly.tables.telling import baseline

        rows = read_table(table)
        done = TableRun.load(folder)
        known = done.model.preparation
        usable = known.usable_rows(rows)
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
            typer.echo(json.dumps(told, indent=2))
            return
        figures_table(f"{done.config.method} on {len(kept):,} rows of {table.name}", figures, plain)
        if len(usable) < len(rows):
            say(f"{len(rows) - len(usable):,} rows without a target were left out.")
