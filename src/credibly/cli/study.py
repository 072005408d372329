"""`credibly study`: reproductions of published findings."""

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
from credibly.cli.console import check_folder, open_in_browser, print_wrapped
from credibly.cli.demo import progress_line, staged
from credibly.cli.early_checks import check_input_folder, check_numbers
from credibly.cli.error_handling import exit_stopped, handle_errors
from credibly.cli.output import echo
from credibly.core.durations import to_seconds
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
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of the study; without it the studies are listed.", autocompletion=_names
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder with the data files, for studies that need any.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page, the table and the figures. (Default: study-NAME.)")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same results.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small run: a first look, not an answer.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of the study; repeatable."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time budget, such as 10min, with interim results; repeat the command to continue.",
        ),
    ] = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    open_page: options.Open = False,
) -> None:
    """Reproduce a published finding, with a table, figures and whether it was reproduced.

    credibly study gap-regression

    credibly study temperature --root data/

    credibly study hmc-reference --root data/ --device cuda --budget 10min
    """
    with handle_errors():
        check_numbers(seed)
        if root is not None:
            check_input_folder(root, "--root", "Pass the folder with the data files")
        studies = checkout_module("studies", COMMAND)
        if name is None:
            for each in studies.MODULES:
                print_wrapped(f"{each}: {studies.find(each).title}")
            return
        study = studies.find(name)
        folder = out if out is not None else Path(f"study-{name}")
        seconds = None if budget is None else to_seconds("--budget", budget)
        if seconds is not None and not study.budgeted:
            raise InputError("--budget", f"study {name} has no time budget", "Leave it out")
        # Beside the folder, which is replaced as a whole.
        state = folder.with_name(f"{folder.name}.state.safetensors")
        check_folder(folder, force or (seconds is not None and state.exists()))
        module = checkout_module("studies.study", COMMAND)
        chosen = module.Options(root, seed, quick, device, None, _pairs(settings or []))
        if seconds is not None:
            show = None if as_json or quiet else typer.echo
            chosen = dataclasses.replace(chosen, budget=seconds, state=state, show=show)
        # Report missing files before any work.
        for file in study.files:
            chosen.file(file)
        started = time.perf_counter()
        try:
            with staged(folder) as place, progress_line(quiet or as_json) as report:
                result = study.run(dataclasses.replace(chosen, progress=report))
                module.write_result(study, result, chosen, time.perf_counter() - started, place)
        except KeyboardInterrupt:
            exit_stopped("nothing was kept")
        if as_json:
            echo(json.dumps(json.loads((folder / "results.json").read_text(encoding="utf-8")), indent=2))
        else:
            if not quiet:
                print_wrapped(*result.sentences)
            echo(os.fspath(folder / "index.html"))
        if open_page:
            open_in_browser(folder / "index.html")


def _pairs(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise InputError("--set", f"must be NAME=VALUE, got {pair!r}")
        found[key.strip()] = value.strip()
    return found
