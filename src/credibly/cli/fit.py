"""`credibly fit`: fits a table into a run folder with a report."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from credibly.cli import options
from credibly.cli.console import open_in_browser, print_wrapped, to_json
from credibly.cli.error_handling import exit_stopped, handle_errors
from credibly.cli.processes import is_leader
from credibly.cli.settings import config_from
from credibly.core.checks import check_choice
from credibly.errors import Interrupted, StoreError

if TYPE_CHECKING:
    from credibly.tables.fit_summary import FitSummary
    from credibly.tables.run import Prepared, TableRun


def run(
    table: Annotated[Path | None, options.TABLE] = None,
    target: options.Target = None,
    out: Annotated[Path, typer.Option(help="Folder for the run; created if needed.")] = Path("run"),
    method: options.Method = None,
    task: options.Task = None,
    drop: options.Drop = None,
    weight: options.Weight = None,
    na: options.Na = None,
    holdout: options.Holdout = None,
    hidden: options.Hidden = None,
    noise: options.Noise = None,
    prior_scale: options.PriorScale = None,
    tune: options.Tune = None,
    activation: options.Activation = None,
    settings: options.Set = None,
    seed: options.Seed = None,
    device: options.Device = None,
    config: options.ConfigFile = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    open_page: options.Open = False,
) -> None:
    """Fit a model that predicts one column of a table from the others, with uncertainty.

    credibly fit house.csv --target price --out run/

    Numbers are standardised, categories one-hot encoded, dates turned into elapsed
    time and cycles, missing values imputed and flagged. A fifth of the rows is held
    out for evaluation. run/report.html shows how accurate and calibrated the fit is,
    and what to do next. Then:

    credibly predict run/ new.csv --out predictions.csv

    Ctrl-C stops a sampler without losing work: `credibly resume run/` continues it.
    run/config.toml holds the settings; pass it to --config to reproduce the run.

    torchrun --nproc-per-node 4 -m credibly fit ... distributes the work.
    """
    given = {
        "table": table,
        "target": target,
        "method": method,
        "task": task,
        "drop": drop,
        "weight": weight,
        "na": na,
        "holdout": holdout,
        "hidden": hidden,
        "noise": noise,
        "prior_scale": prior_scale,
        "activation": activation,
        "seed": seed,
        "device": device,
    }
    with handle_errors(shared=True):
        wanted = config_from(config, given, settings)
        from credibly.tables.restarts import check_out_or_begun, fit_or_resume
        from credibly.tables.run import prepare

        check_out_or_begun(out, force)
        prepared = prepare(wanted)
        if tune is not None:
            prepared = _tune(prepared, tune, quiet=quiet or as_json)
        if not quiet and not as_json:
            print_wrapped(describe_table(prepared), f"Method: {prepared.method.name} ({prepared.why}).")
        try:
            done = fit_or_resume(prepared, out, force=force, progress=False if quiet or as_json else None)
        except Interrupted as error:
            exit_stopped(str(error))
        except KeyboardInterrupt:
            exit_stopped("nothing was kept")
        report_run(done, quiet=quiet, as_json=as_json, open_page=open_page)


def _tune(prepared: Prepared, rule: str, *, quiet: bool) -> Prepared:
    """Tune the settings and print the choice."""
    from credibly.tables.table_tuning import tune_table
    from credibly.tables.tuning import RULES

    check_choice("--tune", rule, RULES)
    try:
        ready, trials = tune_table(prepared, rule)
    except KeyboardInterrupt:
        exit_stopped("nothing was kept")
    if not quiet and trials:
        by = "evidence" if rule == "evidence" else "validation rows"
        chosen = ready.recipe
        found = f"prior scale {chosen.scale:g}, noise {chosen.noise}, hidden {list(chosen.hidden)}"
        print_wrapped(f"Best of {len(trials)} candidates by {by}: {found}.")
    return ready


def report_run(done: TableRun, *, quiet: bool, as_json: bool, open_page: bool) -> None:
    """Write the page and the results of a run and print a summary; the leader does so for all processes."""
    from credibly.distributed import world

    if not is_leader():
        return
    how = f"the fit is complete; write its page with `credibly report {shlex.quote(os.fspath(done.path))}`"
    try:
        with world.alone():
            facts, page = write_results(done)
    except OSError as error:
        raise StoreError(f"{error.filename or done.path}: {error.strerror or error}; {how}") from error
    except KeyboardInterrupt:
        exit_stopped(how)
    if as_json:
        typer.echo((done.path / "results.json").read_text(encoding="utf-8").strip())
    else:
        if not quiet:
            from credibly.cli.console import print_metrics
            from credibly.report import assess

            print_metrics(f"{facts.method} on {facts.target}, {facts.on} rows", facts.figures, facts.baseline)
            verdict, *reasons = assess(facts).sentences
            print_wrapped("", verdict, *(f"- {reason}" for reason in reasons), "")
        typer.echo(os.fspath(page))
    if open_page:
        open_in_browser(page)


def write_results(done: TableRun, final: Path | None = None) -> tuple[FitSummary, Path]:
    """Write report.html and results.json of a run; `final` is the final location of the folder."""
    from credibly.core.files import write_atomic
    from credibly.report import assess, fit_page, write
    from credibly.tables.summarise import summarise

    facts = summarise(done)
    html = fit_page(facts)
    folder = final or done.path
    results = {"run": os.fspath(folder), "report": os.fspath(folder / "report.html")} | results_of(facts)
    results["verdict"] = list(assess(facts).sentences)
    write_atomic(done.path / "results.json", to_json(results) + "\n")
    return facts, write(html, done.path / "report.html")


def results_of(facts: FitSummary) -> dict[str, Any]:
    """Return a summary as plain JSON values."""
    return {
        "table": facts.table,
        "target": facts.target,
        "task": facts.task,
        "classes": facts.classes,
        "rows": facts.rows,
        "held_out": facts.held_out,
        "method": facts.method,
        "why": facts.why,
        "seed": facts.seed,
        "parameters": facts.parameters,
        "seconds": facts.seconds,
        "on": facts.on,
        "figures": facts.figures,
        "baseline": facts.baseline,
        "diagnostics": None if facts.diagnostics is None else facts.diagnostics.to_dict(),
    }


def describe_table(prepared: Prepared) -> str:
    """Describe a table before it is fitted: rows, task and columns."""
    known = prepared.preparation
    return "\n".join(
        [
            f"{prepared.config.table}: {len(prepared.train):,} training rows, {len(prepared.held_out):,} held out.",
            f"Task: {known.task_reason}.",
            *(f"{note[:1].upper()}{note[1:]}." for note in known.notes),
            f"{known.inputs} network inputs from {len(known.names)} columns.",
            *(f"  {name}: {kind}, {note}" for name, kind, note in known.columns if note),
            *(f"Warning: {warning}." for warning in prepared.warnings),
        ]
    )
