"""`credibly compare`: several methods on one table, side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from credibly.cli import options
from credibly.cli.console import check_folder, format_number, open_in_browser, print_table, print_wrapped, to_json
from credibly.cli.error_handling import exit_stopped, handle_errors
from credibly.cli.fit import describe_table
from credibly.cli.processes import is_leader
from credibly.cli.settings import config_from
from credibly.errors import InputError, StoreError

if TYPE_CHECKING:
    from credibly.tables.config import Config
    from credibly.tables.fit_summary import FitSummary
    from credibly.tables.run import Prepared

RESULTS = "results.json"
FORMAT = "credibly-comparison"


def run(
    table: Annotated[Path | None, options.TABLE] = None,
    target: options.Target = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and one run folder per method.")] = Path("comparison"),
    methods: options.Methods = None,
    task: options.Task = None,
    drop: options.Drop = None,
    weight: options.Weight = None,
    transform: options.Transform = None,
    order: options.Order = None,
    event: options.Event = None,
    holdout: options.Holdout = None,
    hidden: options.Hidden = None,
    noise: options.Noise = None,
    prior_scale: options.PriorScale = None,
    activation: options.Activation = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.NAME=VALUE",
            help="A setting of one method, such as hmc.draws=500; repeatable.",
        ),
    ] = None,
    seed: options.Seed = None,
    device: options.Device = None,
    config: options.ConfigFile = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    open_page: options.Open = False,
) -> None:
    """Fit a table with every method on the same rows and compare the results.

    credibly compare house.csv --target price

    Prints a table and writes a page, comparison/index.html, which links to a page
    per method. `credibly predict comparison/hmc new.csv` uses one of them.
    """
    given = {
        "table": table,
        "target": target,
        "task": task,
        "drop": drop,
        "weight": weight,
        "transform": transform,
        "order": order,
        "event": event,
        "holdout": holdout,
        "hidden": hidden,
        "noise": noise,
        "prior_scale": prior_scale,
        "activation": activation,
        "seed": seed,
        "device": device,
    }
    with handle_errors(shared=True):
        if is_leader():
            _check_out(out, force)
        base = config_from(config, given | {"method": "auto"}, None)
        names = _names(methods)
        configs = _configs(base, names, settings or [])
        from credibly.distributed import world
        from credibly.tables.reading import read_table
        from credibly.tables.run import prepare

        rows = read_table(base.table)
        # Prepare all methods first, so that errors show before the first fit.
        ready = {name: prepare(one, rows) for name, one in configs.items()}
        several = next(iter(ready.values())).preparation.targets
        if len(several) > 1:
            raise InputError("--target", f"must be one column, got {len(several)}", "Compare the targets one by one")
        if not quiet and not as_json:
            print_wrapped(describe_table(next(iter(ready.values()))))
        try:
            with _staged(out) if is_leader() else nullcontext(out) as made:
                folder = Path(world.current().gather(os.fspath(made))[0])
                facts = _fit(ready, folder, out, quiet or as_json)
                if is_leader():
                    _write(facts, folder)
        except KeyboardInterrupt:
            exit_stopped("nothing was kept")
        if not is_leader():
            return
        page = out / "index.html"
        if as_json:
            typer.echo((out / RESULTS).read_text(encoding="utf-8").strip())
        else:
            if not quiet:
                _print(facts)
            typer.echo(os.fspath(page))
        if open_page:
            open_in_browser(page)


def _check_out(out: Path, force: bool) -> None:
    """Raise if the folder is occupied. With force, only an earlier comparison may be replaced."""
    check_folder(out, force)
    if out.is_dir() and any(out.iterdir()):
        try:
            found = json.loads((out / RESULTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InputError("--out", f"{out} is not a comparison", "Choose another folder")
        if out.resolve() == Path.cwd():
            raise InputError("--out", f"{out} is the current directory", "Run the command from another one")


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, created before the work and moved to `out` only on success."""
    from credibly.tables.folder import swap

    place = out.resolve()
    staging = place.with_name(f".{place.name}.{os.getpid()}.part")
    made = [parent for parent in place.parents if not parent.exists()]
    try:
        staging.mkdir(parents=True)
        yield staging
        swap(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


def _names(text: str | None) -> tuple[str, ...]:
    from credibly.demo.fits import check_methods

    return check_methods(None if text is None else options.split_names(text))


def _configs(base: Config, names: tuple[str, ...], pairs: list[str]) -> dict[str, Config]:
    """Return the configuration of each method."""
    from credibly.tables.config import parse_settings

    own: dict[str, list[str]] = {name: [] for name in names}
    for pair in pairs:
        name, _, rest = pair.partition(".")
        if name not in own:
            raise InputError("--set", f"must be METHOD.NAME=VALUE, with one of {', '.join(names)}, got {pair!r}")
        own[name].append(rest)
    return {name: dataclasses.replace(base, method=name, settings=parse_settings(own[name])) for name in names}


def _fit(ready: dict[str, Prepared], folder: Path, out: Path, silent: bool) -> dict[str, FitSummary]:
    from credibly.cli.fit import write_results
    from credibly.distributed import world
    from credibly.tables.run import fit_table

    found = {}
    for name, prepared in ready.items():
        try:
            run = fit_table(prepared, folder / name, progress=False if silent else None)
        except StoreError as error:
            # The message names a staging folder that is about to be removed, so raise the cause instead.
            cause = error.__cause__.__cause__ if isinstance(error.__cause__, StoreError) else error.__cause__
            raise cause if isinstance(cause, OSError) else error from None
        if not is_leader():
            continue
        with world.alone():
            found[name] = write_results(run, out / name)[0]
        if not silent:
            typer.echo(f"{name}: {found[name].seconds:.1f} s", err=True)
    return found


def _write(facts: dict[str, FitSummary], folder: Path) -> None:
    from credibly.core.files import write_atomic
    from credibly.report import compare_page, write

    write(compare_page(facts, {name: f"{name}/report.html" for name in facts}), folder / "index.html")
    first = next(iter(facts.values()))
    results = {
        "format": FORMAT,
        "table": first.table,
        "target": first.target,
        "task": first.kind,
        "rows": first.rows,
        "held_out": first.held_out,
        "seed": first.seed,
        "baseline": first.baseline,
        "methods": {name: {"figures": one.figures, "seconds": one.seconds} for name, one in facts.items()},
    }
    write_atomic(folder / RESULTS, to_json(results) + "\n")


def _print(facts: dict[str, FitSummary]) -> None:
    from rich.markup import escape
    from rich.table import Table

    first = next(iter(facts.values()))
    title = escape(f"{first.target} in {first.table}, {first.on} rows")
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    # On a narrow terminal headings wrap; numbers are never truncated.
    for key in first.figures:
        widest = max(len(format_number(one.figures[key])) for one in facts.values())
        table.add_column(key.replace("_", " "), justify="right", min_width=widest, overflow="fold")
    table.add_column("seconds", justify="right", min_width=6, overflow="fold")
    for name, one in facts.items():
        table.add_row(name, *(format_number(value) for value in one.figures.values()), f"{one.seconds:.1f}")
    plain = [format_number(first.baseline[key]) if key in first.baseline else "" for key in first.figures]
    table.add_row("no inputs", *plain, "")
    print_table(table)
    print_wrapped("")
