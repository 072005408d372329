"""`credibly compare`: several methods on one table, side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from credibly.cli import options
from credibly.cli.console import check_folder, format_number, open_in_browser, print_table, print_wrapped, to_json
from credibly.cli.early_checks import check_choices, check_fit, check_numbers
from credibly.cli.error_handling import exit_stopped, handle_errors
from credibly.cli.fit import describe_table
from credibly.cli.output import echo, in_markup
from credibly.cli.processes import is_leader
from credibly.cli.settings import config_from
from credibly.core.stages import show_stages, stage
from credibly.errors import InputError, StoreError

if TYPE_CHECKING:
    from credibly.tables.config import Config
    from credibly.tables.fit_summary import FitSummary
    from credibly.tables.prepared import Prepared

RESULTS = "results.json"
FORMAT = "credibly-comparison"
NOT_BAYESIAN = "not Bayesian"


def run(
    table: Annotated[Path | None, options.TABLE] = None,
    target: options.Target = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and one run folder per method.")] = Path("comparison"),
    methods: options.Methods = None,
    task: options.Task = None,
    drop: options.Drop = None,
    weight: options.Weight = None,
    class_weight: options.ClassWeight = None,
    transform: options.Transform = None,
    order: options.Order = None,
    event: options.Event = None,
    na: options.Na = None,
    group: options.Group = None,
    time: options.Time = None,
    holdout: options.HeldOut = None,
    hidden: options.Hidden = None,
    noise: options.Noise = None,
    prior_scale: options.PriorScale = None,
    activation: options.Activation = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline",
            help="Show gradient boosting (scikit-learn, not Bayesian) on the same rows beside the methods.",
        ),
    ] = True,
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
    per method. `credibly predict comparison/hmc new.csv` uses one of them. Gradient
    boosting on the same rows shows what the methods have to beat. A method whose
    chains have not mixed, or whose intervals are off, is not recommended.
    """
    given = {
        "table": table,
        "target": target,
        "task": task,
        "drop": drop,
        "weight": weight,
        "class_weight": class_weight,
        "transform": transform,
        "order": order,
        "event": event,
        "na": na,
        "group": group,
        "time": time,
        "holdout": holdout,
        "hidden": hidden,
        "noise": noise,
        "prior_scale": prior_scale,
        "activation": activation,
        "seed": seed,
        "device": device,
    }
    with handle_errors(shared=True):
        check_fit(table, target, config)
        check_numbers(seed, holdout)
        check_choices(task=task, class_weight=class_weight, transform=transform)
        if is_leader():
            _check_out(out, force)
        base = config_from(config, given | {"method": "auto"}, None)
        names = _names(methods)
        configs = _configs(base, names, settings or [])
        from credibly.tables.cells.conventions import Conventions
        from credibly.tables.files.reading import read_table
        from credibly.tables.files.row_samples import MOST_BYTES
        from credibly.tables.prepared import prepare

        rows = read_table(base.table, conventions=Conventions(base.na), most=MOST_BYTES)
        # Prepare all methods first, so that errors are reported before the first fit.
        ready = {name: prepare(one, rows, refit=False) for name, one in configs.items()}
        several = next(iter(ready.values())).preparation.targets
        if len(several) > 1:
            raise InputError("--target", f"must be one column, got {len(several)}", "Compare the targets one by one")
        if not quiet and not as_json:
            print_wrapped(describe_table(next(iter(ready.values()))))
        try:
            facts, boosting = _fit_and_write(ready, out, baseline, quiet or as_json)
        except KeyboardInterrupt:
            exit_stopped("nothing was kept")
        if not is_leader():
            return
        page = out / "index.html"
        if as_json:
            echo((out / RESULTS).read_text(encoding="utf-8").strip())
        else:
            if not quiet:
                _print(facts, boosting)
            echo(os.fspath(page))
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
    from credibly.core.interrupts import holding_output
    from credibly.storage.replacing import replace_folder

    place = out.resolve()
    staging = place.with_name(f".{place.name}.{os.getpid()}.part")
    made = [parent for parent in place.parents if not parent.exists()]
    try:
        with holding_output():
            staging.mkdir(parents=True)
            yield staging
            replace_folder(staging, out)
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


def _fit_and_write(
    ready: dict[str, Prepared], out: Path, baseline: bool, silent: bool
) -> tuple[dict[str, FitSummary], FitSummary | None]:
    """Fit all methods and write the page. Return the fits and boosting; only the leader has any."""
    from credibly.distributed import world

    boosting = None
    with _staged(out) if is_leader() else nullcontext(out) as made:
        folder = Path(world.current().gather(os.fspath(made))[0])
        facts = _fit(ready, folder, out, silent)
        if is_leader():
            boosting = _fit_boosting(ready, facts, silent) if baseline else None
            with show_stages("page", ("pictures", "page"), False if silent else None):
                _write(facts, boosting, folder)
    return facts, boosting


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
            found[name] = write_results(run, out / name, progress=False if silent else None)[0]
        if not silent:
            echo(f"{name}: {found[name].seconds:.1f} s", err=True)
    return found


def _fit_boosting(ready: dict[str, Prepared], facts: dict[str, FitSummary], silent: bool) -> FitSummary | None:
    """Fit gradient boosting to the same rows."""
    from credibly.distributed import world
    from credibly.report import boosting_summary
    from credibly.tables.boosting import NAME, boosting_of

    with world.alone():
        found = boosting_of(next(iter(ready.values())))
    if not silent:
        left_out = "left out, since it needs held-out rows of a regression or classification"
        echo(f"{NAME}: {left_out if found is None else f'{found.seconds:.1f} s'}", err=True)
    return None if found is None else boosting_summary(next(iter(facts.values())), found)


def _write(facts: dict[str, FitSummary], boosting: FitSummary | None, folder: Path) -> None:
    from credibly.core.files import write_atomic
    from credibly.report import compare_page, write
    from credibly.report.reliability import doubts, recommended

    html = compare_page(facts, {name: f"{name}/report.html" for name in facts}, boosting)
    stage("page")
    write(html, folder / "index.html")
    first = next(iter(facts.values()))
    results: dict[str, Any] = {
        "format": FORMAT,
        "table": first.table,
        "target": first.target,
        "task": first.kind,
        "rows": first.rows,
        "held_out": first.held_out,
        "seed": first.seed,
        "recommended": recommended(facts),
        "baseline": first.baseline,
        "methods": {},
    }
    for name, one in facts.items():
        reasons = [finding.text for finding in doubts(one)]
        results["methods"][name] = {
            "figures": one.figures,
            "seconds": one.seconds,
            "reliable": not reasons,
            "doubts": reasons,
        }
    if boosting is not None:
        results["boosting"] = {"bayesian": False, "figures": boosting.figures, "seconds": boosting.seconds}
    write_atomic(folder / RESULTS, to_json(results) + "\n")


def _print(facts: dict[str, FitSummary], boosting: FitSummary | None) -> None:
    from rich.table import Table

    from credibly.report.reliability import doubts, recommendation_text
    from credibly.tables.boosting import NAME

    first = next(iter(facts.values()))
    title = in_markup(f"{first.target} in {first.table}, {first.on} rows")
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    shown = [*facts.values(), *([] if boosting is None else [boosting])]
    # On a narrow terminal headings wrap; numbers are never truncated.
    for key in first.figures:
        widest = max(len(format_number(one.figures[key])) for one in shown)
        table.add_column(key.replace("_", " "), justify="right", min_width=widest, overflow="fold")
    table.add_column("seconds", justify="right", min_width=6, overflow="fold")
    table.add_column("reliable", min_width=len(NOT_BAYESIAN), no_wrap=True)
    for name, one in facts.items():
        values = (format_number(value) for value in one.figures.values())
        table.add_row(name, *values, f"{one.seconds:.1f}", "no" if doubts(one) else "yes")
    if boosting is not None:
        values = (format_number(boosting.figures[key]) for key in first.figures)
        table.add_row(NAME, *values, f"{boosting.seconds:.1f}", NOT_BAYESIAN)
    plain = [format_number(first.baseline[key]) if key in first.baseline else "" for key in first.figures]
    table.add_row("no inputs", *plain, "", "")
    print_table(table)
    print_wrapped("", *recommendation_text(facts, boosting))
    print_wrapped(*(f"- {name} is unreliable: {doubts(one)[0].text}" for name, one in facts.items() if doubts(one)), "")
