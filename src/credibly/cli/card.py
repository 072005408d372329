"""`credibly card`: a model card in Markdown from what a run stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli.early_checks import check_run
from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo
from credibly.errors import InputError


def run(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `credibly fit`.")],
    out: Annotated[Path, typer.Option(help="Markdown file to write, in an existing folder.")] = Path("MODEL_CARD.md"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a model card: data, method, metrics with their rows, verdict and limits.

    Everything comes from the run folder; nothing is fitted again. The verdict is that
    of the stored rows. Add what only you know: where the data come from, and what the
    model is for.

    credibly card run/ --out MODEL_CARD.md
    """
    with handle_errors():
        check_run(folder)
        if not out.parent.is_dir():
            raise InputError("--out", f"no such folder: {os.fspath(out.parent)!r}")
        if out.exists() and not force:
            raise InputError("--out", f"{os.fspath(out)!r} exists", "Pass --force to replace it")
        from credibly.cli.verdicts import verdict_of
        from credibly.core.files import write_atomic
        from credibly.export.card import model_card
        from credibly.storage.guarding import as_store_errors
        from credibly.tables.run import TableRun
        from credibly.tables.summarise import summarise_targets

        loaded = TableRun.load(folder)
        # Not from results.json, which no checksum covers.
        with as_store_errors(f"path: the run {os.fspath(folder)!r}"):
            first, *others = summarise_targets(loaded)
            verdict = [f"{one.target}: {verdict_of(one)[0]}" for one in (first, *others)]
            card = model_card(folder, verdict=verdict if others else verdict_of(first), baseline=first.baseline)
        write_atomic(out, card)
        echo(os.fspath(out))
