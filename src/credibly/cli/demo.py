"""`credibly demo`: every method on embedded data, ending in a page and a file of figures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from credibly.cli.console import check_folder, show_page
from credibly.cli.error_handling import plainly

if TYPE_CHECKING:
    from rich.table import Table

    from credibly.demo.fits import DemoResult, Progress

TITLES = {
    "diabetes": "Diabetes (regression, test rows, original units)",
    "breast_cancer": "Breast cancer (two classes, test rows)",
    "gap_regression": "A gap in the data (toy)",
    "star_classification": "A far-away star (toy)",
}


def run(
    out: Annotated[Path, typer.Option(help="Folder for index.html and results.json; made if it is not there.")] = Path(
        "demo"
    ),
    methods: Annotated[
        str | None, typer.Option(help="Names to compare, with commas: mle,map,ensemble. By default all of them.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same figures. Another one shows how much is chance.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tenth of the work or less: a first look in about 20 seconds.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the path of the page.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the two files in a folder that is not empty; others stay.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser at the end.")] = False,
) -> None:
    """Compare the methods on real data and toys, and write a page that explains what came out.

    Fits each method to diabetes (regression), breast cancer (two classes) and
    two small made-up problems whose truth is known, and says how close each
    comes to HMC, which draws from the posterior itself. Needs no data of yours
    and no network access; takes about two minutes.
    """
    with plainly():
        check_folder(out, force)
        from credibly.demo.fits import check_methods, run_demo
        from credibly.report import demo_page, write

        # Unknown names are refused before any work is done.
        names = check_methods(None if methods is None else [m.strip() for m in methods.split(",") if m.strip()])
        with staged(out) as folder:
            with progress_line(quiet) as report:
                result = run_demo(names, seed=seed, quick=quick, progress=report)
            write(demo_page(result), folder / "index.html")
            (folder / "results.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
        page = out / "index.html"
        if not quiet:
            _print_tables(result)
        typer.echo(str(page))
        if open_page:
            show_page(page)


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` (or whose files move there) only if nothing went wrong.

    It is made before the work, so that a place where nothing can be written is found out at once.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    there = out.is_dir()
    staging = (out if there else out.parent) / f".{out.resolve().name}.{os.getpid()}.part"
    staging.mkdir()
    try:
        yield staging
        if there:
            for file in sorted(staging.iterdir()):
                if file.is_dir() and (out / file.name).is_dir():
                    shutil.rmtree(out / file.name)
                os.replace(file, out / file.name)
        else:
            staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def progress_line(quiet: bool) -> Iterator[Progress | None]:
    """A progress line on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _print_tables(result: DemoResult) -> None:
    from rich.console import Console

    console = Console()
    for task, figures in result.figures.items():
        console.print(_table(TITLES[task], figures))
        console.print()
    if any(result.against.values()):
        console.print(_table(*_closeness(result)))
        console.print()


def _table(title: str, figures: dict[str, dict[str, float]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    for key in next(iter(figures.values())):
        table.add_column(key.replace("_", " "), justify="right")
    for name, row in figures.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    return table


def _closeness(result: DemoResult) -> tuple[str, dict[str, dict[str, float]]]:
    """Total variation from HMC, a column for each task; in HMC's own row, what chance gives."""
    title = "Total variation from HMC (its own: half the chains against half)"
    rows = {
        name: {task: by_name[name]["total_variation"] for task, by_name in result.against.items()}
        for name in result.methods
    }
    return title, rows
