"""`credibly bench`: published tables, made again, and speed against peers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.checkout import checkout_module, find_checkout
from credibly.cli.console import say, show_page
from credibly.cli.demo import progress_line
from credibly.cli.error_handling import plainly, stopped
from credibly.cli.processes import several, speaks
from credibly.errors import InputError

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}  # `speed` hands them on


def run(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="uci: the regression benchmark with its standard splits. speed: times against peers."
        ),
    ],
    root: Annotated[
        Path | None, typer.Option(help="The folder that holds uci/NAME.npz, or NAME.npz; speed can do without.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="A,B", help="Data sets; by default all that are there.")] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Some of map,dropout,bbb,ensemble,sghmc,hmc; by default all.")
    ] = None,
    splits: Annotated[int, typer.Option(help="How many of the splits, from the first.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the tables and for every cell (bench-NAME); a run that was stopped goes on there."
        ),
    ] = None,
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
    goes on. Takes any data set in the form of the others. Processes that torchrun
    started share out the cells.

    credibly bench speed --jax PYTHON --cases hmc,ensemble

    The same work here and in the peers that are installed, as a table of ratios.
    It lives in a checkout of the repository, and takes the options of
    python -m benchmarks (--list, --cases, --jax, --budget, --repeats, --page).
    """
    with plainly(shared=name == "uci"):
        if name == "speed":
            raise typer.Exit(_speed(root, out, device, quick, context.args))
        if name != "uci":
            raise InputError("NAME", f"found {name!r}", "The benchmarks are uci and speed")
        if context.args:
            raise InputError("bench uci", f"there is no option {context.args[0]}", "See credibly bench --help")
        if root is None:
            raise InputError("--root", "is missing", "Name the folder that holds uci/NAME.npz, or NAME.npz")
        out = out or Path("bench-uci")

        bench = checkout_module("studies.uci_bench", "credibly bench uci")
        from credibly.data import uci_names

        names = options.listed(data) or uci_names(root)
        if jobs not in (None, 1) and several():
            raise InputError("--jobs", f"found {jobs} under torchrun", "Leave it out: each of its processes runs cells")
        processes = jobs if jobs is not None else 1 if device != "cpu" or several() else os.cpu_count() or 1
        plan = bench.Plan(
            root, out, names, options.listed(methods) or bench.METHODS, splits, seed, quick, device, processes
        )
        bench.check(plan)
        words = [
            f"credibly bench uci --root DIR --splits {splits} --seed {seed}",
            *([f"--data {data}"] if data else []),
        ]
        words += [*([f"--methods {methods}"] if methods else []), *(["--quick"] if quick else [])]
        try:
            with progress_line(quiet) as report:
                cells = bench.run(plan, report)
        except KeyboardInterrupt:
            stopped(f"the cells so far are in {out}; the same command goes on")
        if not speaks():
            return
        page = bench.write_all(cells, plan, " ".join(words))
        if not quiet:
            say(*bench.findings(cells))
        typer.echo(os.fspath(page))
        if open_page:
            show_page(page)


def _speed(root: Path | None, out: Path | None, device: str, quick: bool, more: list[str]) -> int:
    """Runs the suite of the checkout that this package, or the current folder, belongs to; its exit status."""
    found = find_checkout("benchmarks", "credibly bench speed")
    words = ["--device", device, *(["--quick"] if quick else [])]
    words += [] if root is None else ["--root", os.fspath(root)]
    words += [] if out is None else ["--out", os.fspath(out)]
    paths = os.pathsep.join([os.fspath(found), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks", *words, *more]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode
