"""`credibly study`: a published finding, run again."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.checkout import checkout_module
from credibly.cli.console import check_folder, say, show_page
from credibly.cli.demo import progress_line, staged
from credibly.cli.error_handling import plainly, stopped
from credibly.errors import InputError

COMMAND = "credibly study"


def _names(incomplete: str) -> list[str]:
    try:
        names = checkout_module("studies", COMMAND).MODULES
    except InputError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def run(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The study; without it they are listed.", autocompletion=_names)
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="The folder with the data files, for studies that need any.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page, the table and the picture; study-NAME by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same figures.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small size: a first look, not an answer.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of the study's own; may be given again."),
    ] = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    open_page: options.Open = False,
) -> None:
    """Run a study of a published finding: it ends in a table, a picture and whether the finding held.

    credibly study gap-regression

    credibly study temperature --root data/
    """
    with plainly():
        studies = checkout_module("studies", COMMAND)
        if name is None:
            for each in studies.MODULES:
                say(f"{each}: {studies.find(each).title}")
            return
        study = studies.find(name)
        folder = out if out is not None else Path(f"study-{name}")
        check_folder(folder, force)
        module = checkout_module("studies.study", COMMAND)
        chosen = module.Options(root, seed, quick, device, None, _pairs(settings or []))
        for file in study.files:  # what is missing shows before any work
            chosen.file(file)
        started = time.perf_counter()
        try:
            with staged(folder) as place, progress_line(quiet or as_json) as report:
                result = study.run(dataclasses.replace(chosen, progress=report))
                module.write_result(study, result, chosen, time.perf_counter() - started, place)
        except KeyboardInterrupt:
            stopped("nothing was kept")
        if as_json:
            typer.echo(json.dumps(json.loads((folder / "results.json").read_text(encoding="utf-8")), indent=2))
        else:
            if not quiet:
                say(*result.sentences)
            typer.echo(os.fspath(folder / "index.html"))
        if open_page:
            show_page(folder / "index.html")


def _pairs(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise InputError("--set", f"found {pair!r}", "Pass NAME=VALUE")
        found[key.strip()] = value.strip()
    return found
