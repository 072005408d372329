"""`credibly bench`: published tables, made again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.demo import progress_line
from credibly.cli.failures import plainly, stopped
from credibly.cli.words import say, show_page
from credibly.errors import InputError


def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="uci: the regression benchmark with its standard splits.")
    ],
    root: Annotated[Path, typer.Option(help="The folder that holds uci/NAME.npz, or NAME.npz.")],
    data: Annotated[str | None, typer.Option(metavar="A,B", help="Data sets; by default all that are there.")] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Some of map,dropout,bbb,ensemble,sghmc,hmc; by default all.")
    ] = None,
    splits: Annotated[int, typer.Option(help="How many of the splits, from the first.")] = 20,
    out: Annotated[
        Path, typer.Option(help="Folder for the tables and for every cell; a run that was stopped goes on there.")
    ] = Path("bench-uci"),
    seed: Annotated[int, typer.Option(help="Same seed, same figures.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Processes; by default one for each processor.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Hardly any training: to see that it works, not for figures.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quiet: options.Quiet = False,
    open_page: options.Open = False,
) -> None:
    """Run a published benchmark and set the figures beside the published ones.

    credibly bench uci --root data/ --data concrete,yacht --splits 20

    Ends in README.md, results.csv, a picture and a page. Every cell (data set,
    split, method) is kept as it ends, so Ctrl-C loses little: the same command
    goes on. Takes any data set in the form of the others.
    """
    with plainly():
        if name != "uci":
            raise InputError("NAME", f"found {name!r}", "The benchmark is uci")
        from credibly.data import uci_names
        from credibly.studies.uci_bench import Plan, check, write_all
        from credibly.studies.uci_bench import run as run_bench
        from credibly.studies.uci_cell import METHODS

        names = options.listed(data) or uci_names(root)
        processes = jobs if jobs is not None else 1 if device != "cpu" else os.cpu_count() or 1
        plan = Plan(root, out, names, options.listed(methods) or METHODS, splits, seed, quick, device, processes)
        check(plan)
        words = [
            f"credibly bench uci --root DIR --splits {splits} --seed {seed}",
            *([f"--data {data}"] if data else []),
        ]
        words += [*([f"--methods {methods}"] if methods else []), *(["--quick"] if quick else [])]
        try:
            with progress_line(quiet) as report:
                cells = run_bench(plan, report)
        except KeyboardInterrupt:
            stopped(f"the cells so far are in {out}; the same command goes on")
        page = write_all(cells, plan, " ".join(words))
        if not quiet:
            from credibly.studies.uci_bench import findings

            say(*findings(cells))
        typer.echo(os.fspath(page))
        if open_page:
            show_page(page)
