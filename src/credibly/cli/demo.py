"""`credibly demo`: every method on embedded data, with a page and a file of results."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from credibly.cli.console import check_folder, open_in_browser
from credibly.cli.early_checks import check_numbers
from credibly.cli.error_handling import handle_errors
from credibly.cli.output import echo

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
    out: Annotated[Path, typer.Option(help="Folder for index.html and results.json; created if needed.")] = Path(
        "demo"
    ),
    methods: Annotated[
        str | None, typer.Option(help="Methods to compare, such as mle,map,ensemble. (Default: all.)")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; another one shows how much of the results is chance.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tenth of the work or less: a first look in about 20 seconds.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the path of the page.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the two files in a folder that is not empty; other files stay.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Compare the methods on real and toy data, and write a page that explains the results.

    Fits each method to diabetes (regression), breast cancer (two classes) and two
    toy problems with a known ground truth, and reports how close each comes to HMC,
    which samples the posterior without approximating it. Needs no data and no
    network access; takes about two minutes.
    """
    with handle_errors():
        check_numbers(seed)
        check_folder(out, force)
        from credibly.demo.fits import check_methods, run_demo
        from credibly.demo.page import demo_page
        from credibly.report import write

        # Raise on unknown names before any work is done.
        names = check_methods(None if methods is None else [m.strip() for m in methods.split(",") if m.strip()])
        with staged(out) as folder:
            with progress_line(quiet) as report:
                result = run_demo(names, seed=seed, quick=quick, progress=report)
            write(demo_page(result), folder / "index.html")
            (folder / "results.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
        page = out / "index.html"
        if not quiet:
            _print_tables(result)
        echo(str(page))
        if open_page:
            open_in_browser(page)


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `out` (or whose files move there) only on success.

    It is created before the work, so that an unwritable location fails immediately.
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
    """Show a progress bar on standard error if that is a terminal."""
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
    for task, metrics in result.figures.items():
        console.print(_table(TITLES[task], metrics))
        console.print()
    if any(result.against.values()):
        console.print(_table(*_closeness(result)))
        console.print()


def _table(title: str, metrics: dict[str, dict[str, float]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    for key in next(iter(metrics.values())):
        table.add_column(key.replace("_", " "), justify="right")
    for name, row in metrics.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    return table


def _closeness(result: DemoResult) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the title and rows of a table of total variation from HMC, per task; HMC's own row shows chance level."""
    title = "Total variation distance from HMC (HMC itself: one half of the chains against the other)"
    rows = {
        name: {task: by_name[name]["total_variation"] for task, by_name in result.against.items()}
        for name in result.methods
    }
    return title, rows
