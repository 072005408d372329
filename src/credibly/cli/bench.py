"""`credibly bench`: published benchmarks reproduced, and speed compared with peer libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from credibly.cli import options
from credibly.cli.checkout import checkout_module, find_checkout
from credibly.cli.console import open_in_browser, print_wrapped
from credibly.cli.demo import progress_line
from credibly.cli.early_checks import check_input_folder, check_numbers
from credibly.cli.error_handling import exit_stopped, handle_errors
from credibly.cli.output import echo
from credibly.cli.processes import is_distributed, is_leader
from credibly.errors import InputError

# `speed` passes on unknown options.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def run(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="uci: the regression benchmark with its standard splits. speed: timings against peer libraries.",
        ),
    ],
    root: Annotated[Path | None, typer.Option(help="Folder with uci/NAME.npz or NAME.npz; optional for speed.")] = None,
    data: Annotated[str | None, typer.Option(metavar="A,B", help="Data sets. (Default: all in the folder.)")] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Any of map,dropout,bbb,ensemble,sghmc,hmc. (Default: all.)")
    ] = None,
    splits: Annotated[int, typer.Option(help="Number of splits, starting with the first.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the tables and every cell; an interrupted run resumes there. (Default: bench-NAME.)"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same results.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Number of processes. (Default: one per core.)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Hardly any training: a smoke test, not a result.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quiet: options.Quiet = False,
    open_page: options.Open = False,
) -> None:
    """Run a published benchmark and compare the results with the published ones.

    credibly bench uci --root data/ --data concrete,yacht --splits 20

    Writes README.md, results.csv, a figure and a page. Every cell (data set, split,
    method) is saved as soon as it is done, so Ctrl-C loses little: the same command
    resumes. Any data set in the same format works. Under torchrun the processes
    share the cells.

    credibly bench speed --jax PYTHON --cases hmc,ensemble

    Times the same work here and in the installed peer libraries and prints a table
    of ratios. Needs a checkout of the repository and takes the options of
    python -m benchmarks (--list, --cases, --jax, --budget, --repeats, --page).
    """
    with handle_errors(shared=name == "uci"):
        check_numbers(seed)
        if root is not None:
            check_input_folder(root, "--root", "Pass the folder with uci/NAME.npz or NAME.npz")
        if name == "speed":
            raise typer.Exit(_speed(root, out, device, quick, context.args))
        if name != "uci":
            raise InputError("NAME", f"must be uci or speed, got {name!r}")
        if context.args:
            raise InputError("bench uci", f"no such option: {context.args[0]}", "See credibly bench --help")
        if root is None:
            raise InputError("--root", "missing", "Pass the folder with uci/NAME.npz or NAME.npz")
        out = out or Path("bench-uci")

        bench = checkout_module("studies.uci_bench", "credibly bench uci")
        from credibly.data import uci_names

        names = options.split_names(data) or uci_names(root)
        if jobs not in (None, 1) and is_distributed():
            raise InputError("--jobs", f"must not be given under torchrun, got {jobs}", "Leave it out")
        processes = jobs if jobs is not None else 1 if device != "cpu" or is_distributed() else os.cpu_count() or 1
        plan = bench.Plan(
            root, out, names, options.split_names(methods) or bench.METHODS, splits, seed, quick, device, processes
        )
        bench.check(plan)
        command = [
            f"credibly bench uci --root DIR --splits {splits} --seed {seed}",
            *([f"--data {data}"] if data else []),
        ]
        command += [*([f"--methods {methods}"] if methods else []), *(["--quick"] if quick else [])]
        try:
            with progress_line(quiet) as report:
                cells = bench.run(plan, report)
        except KeyboardInterrupt:
            exit_stopped(f"finished cells are in {out}; run the same command to resume")
        if not is_leader():
            return
        page = bench.write_all(cells, plan, " ".join(command))
        if not quiet:
            print_wrapped(*bench.findings(cells))
        echo(os.fspath(page))
        if open_page:
            open_in_browser(page)


def _speed(root: Path | None, out: Path | None, device: str, quick: bool, more: list[str]) -> int:
    """Run the benchmark suite of the checkout and return its exit status."""
    found = find_checkout("benchmarks", "credibly bench speed")
    arguments = ["--device", device, *(["--quick"] if quick else [])]
    arguments += [] if root is None else ["--root", os.fspath(root)]
    arguments += [] if out is None else ["--out", os.fspath(out)]
    paths = os.pathsep.join([os.fspath(found), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks", *arguments, *more]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode
