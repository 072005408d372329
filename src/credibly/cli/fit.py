"""`credibly fit`: a table in, a run folder with a report out."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from credibly.cli import options
from credibly.cli.console import as_text, say, show_page
from credibly.cli.error_handling import plainly, stopped
from credibly.cli.processes import speaks
from credibly.cli.settings import config_from
from credibly.errors import InputError, Interrupted, StoreError

if TYPE_CHECKING:
    from credibly.tables.fit_summary import Facts
    from credibly.tables.run import Prepared, TableRun


def run(
    table: Annotated[Path | None, options.TABLE] = None,
    target: options.Target = None,
    out: Annotated[Path, typer.Option(help="Folder for the run; made here, with those it is in.")] = Path("run"),
    method: options.Method = None,
    task: options.Task = None,
    drop: options.Drop = None,
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
    """Fit a table: what its target column is, given the others, with how sure one can be.

    credibly fit house.csv --target price --out run/

    Numbers are standardised, words become yes-or-no columns, gaps are filled and
    flagged. A fifth of the rows is kept back and predicted; run/report.html tells
    how good, how calibrated and how sure the fit is, and what to do next. Then:

    credibly predict run/ new.csv --out predictions.csv

    Ctrl-C stops a sampler without loss: go on with `credibly resume run/`. The
    settings are in run/config.toml, which gives the same run again by --config.

    torchrun --nproc-per-node 4 -m credibly fit ... shares the work out.
    """
    given = {
        "table": table, "target": target, "method": method, "task": task, "drop": drop, "holdout": holdout, "hidden": hidden,
        "noise": noise, "prior_scale": prior_scale, "activation": activation, "seed": seed, "device": device,
    }  # fmt: skip
    with plainly(shared=True):
        wanted = config_from(config, given, settings)
        from credibly.tables.restarts import check_out_or_begun, fit_or_resume
        from credibly.tables.run import prepare

        check_out_or_begun(out, force)
        prepared = prepare(wanted)
        if tune is not None:
            prepared = _tune(prepared, tune, quiet=quiet or as_json)
        if not quiet and not as_json:
            say(about_table(prepared), f"Method: {prepared.method.name} ({prepared.why}).")
        try:
            done = fit_or_resume(prepared, out, force=force, progress=False if quiet or as_json else None)
        except Interrupted as error:
            stopped(str(error))
        except KeyboardInterrupt:
            stopped("nothing was kept")
        tell(done, quiet=quiet, as_json=as_json, open_page=open_page)


def _tune(prepared: Prepared, rule: str, *, quiet: bool) -> Prepared:
    """What was prepared, with the settings that did best, which are said."""
    from credibly.tables.table_tuning import tune_table
    from credibly.tables.tuning import RULES

    if rule not in RULES:
        raise InputError("--tune", f"found {rule!r}", f"Pass {' or '.join(RULES)}")
    try:
        ready, trials = tune_table(prepared, rule)
    except KeyboardInterrupt:
        stopped("nothing was kept")
    if not quiet and trials:
        by = "evidence" if rule == "evidence" else "rows held back"
        chosen = ready.recipe
        say(
            f"Chosen of {len(trials)} by {by}: prior scale {chosen.scale:g}, noise {chosen.noise}, hidden {list(chosen.hidden)}."
        )
    return ready


def tell(done: TableRun, *, quiet: bool, as_json: bool, open_page: bool) -> None:
    """Writes the page and the results of a run, and says what came out; of many processes the first one does."""
    from credibly.distributed import world

    if not speaks():
        return
    how = f"the fit itself is whole; make its page by `credibly report {shlex.quote(os.fspath(done.path))}`"
    try:
        with world.alone():
            facts, page = write_results(done)
    except OSError as error:
        raise StoreError(f"{error.filename or done.path}: {error.strerror or error}; {how}") from error
    except KeyboardInterrupt:
        stopped(how)
    if as_json:
        typer.echo((done.path / "results.json").read_text(encoding="utf-8").strip())
    else:
        if not quiet:
            from credibly.cli.console import figures_table
            from credibly.report.judgement import judge

            figures_table(f"{facts.method} on {facts.target}, {facts.on} rows", facts.figures, facts.baseline)
            verdict, *reasons = judge(facts)
            say("", verdict, *(f"- {reason}" for reason in reasons), "")
        typer.echo(os.fspath(page))
    if open_page:
        show_page(page)


def write_results(done: TableRun, place: Path | None = None) -> tuple[Facts, Path]:
    """report.html and results.json of a run; `place` is where the folder will be in the end."""
    from credibly.report import fit_page, write
    from credibly.report.judgement import judge
    from credibly.tables.folder import write_atomic
    from credibly.tables.summarise import summarise

    facts = summarise(done)
    html = fit_page(facts)
    folder = place or done.path
    results = {"run": os.fspath(folder), "report": os.fspath(folder / "report.html")} | results_of(facts)
    results["verdict"] = list(judge(facts))
    write_atomic(done.path / "results.json", as_text(results) + "\n")
    return facts, write(html, done.path / "report.html")


def results_of(facts: Facts) -> dict[str, Any]:
    """A run as plain JSON values."""
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


def about_table(prepared: Prepared) -> str:
    """What was found in a table, before it is fitted."""
    known = prepared.preparation
    return "\n".join(
        [
            f"{prepared.config.table}: {len(prepared.train):,} rows to fit, {len(prepared.held_out):,} kept back.",
            f"Task: {known.task_reason}.",
            *(f"{note[:1].upper()}{note[1:]}." for note in known.notes),
            f"{known.inputs} network inputs from {len(known.names)} columns.",
            *(f"  {name}: {kind}, {note}" for name, kind, note in known.columns if note),
        ]
    )
