"""`credibly fit`: fits a table into a run folder with a report."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from credibly.cli import options
from credibly.cli.console import open_in_browser, print_wrapped, to_json
from credibly.cli.early_checks import check_choices, check_fit, check_numbers, check_output_folder
from credibly.cli.error_handling import exit_stopped, handle_errors
from credibly.cli.output import echo
from credibly.cli.processes import is_leader
from credibly.cli.settings import config_from
from credibly.core.stages import show_stages, stage
from credibly.errors import Interrupted, StoreError

if TYPE_CHECKING:
    from credibly.tables.fit_summary import FitSummary
    from credibly.tables.prepared import Prepared
    from credibly.tables.run import TableRun

# Stages of writing the page of a run, after the fit.
STAGES = ("predictions", "diagnostics", "verdict", "pictures", "page")


def run(
    table: Annotated[Path | None, options.TABLE] = None,
    target: options.Target = None,
    out: Annotated[Path, typer.Option(help="Folder for the run; created if needed.")] = Path("run"),
    method: options.Method = None,
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
    holdout: options.Holdout = None,
    hidden: options.Hidden = None,
    noise: options.Noise = None,
    prior_scale: options.PriorScale = None,
    tune: options.Tune = None,
    inputs: options.Inputs = None,
    conformal: options.Conformal = None,
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
    time and cycles, missing values imputed and flagged. Cross-validation chooses the
    network, the prior and the noise; every row is then predicted by a fit to other
    rows, and run/report.html shows how accurate and calibrated these predictions are,
    and what to do next. The model itself is fitted to all rows. Then:

    credibly predict run/ new.csv --out predictions.csv

    After Ctrl-C or a lost machine `credibly resume run/` continues, once the model is
    chosen.
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
        "class_weight": class_weight,
        "transform": transform,
        "order": order,
        "event": event,
        "na": na,
        "group": group,
        "time": time,
        "tune": tune,
        "inputs": inputs,
        "conformal": conformal,
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
        check_choices(task=task, class_weight=class_weight, transform=transform, inputs=inputs, tune=tune)
        check_output_folder(out, force)
        wanted = config_from(config, given, settings)
        from credibly.tables.prepared import prepare
        from credibly.tables.restarts import check_out_or_begun, fit_or_resume

        check_out_or_begun(out, force)
        prepared = prepare(wanted)
        if not quiet and not as_json:
            print_wrapped(describe_table(prepared))
        choose = partial(_choose, quiet=quiet or as_json)
        try:
            done = fit_or_resume(prepared, out, choose, force=force, progress=False if quiet or as_json else None)
        except Interrupted as error:
            exit_stopped(str(error))
        except KeyboardInterrupt:
            exit_stopped("nothing was kept")
        report_run(done, quiet=quiet, as_json=as_json, open_page=open_page)


def _choose(prepared: Prepared, *, quiet: bool) -> Prepared:
    """Choose the settings that were left open, and print them and the method."""
    from credibly.core.progress import Progress
    from credibly.tables.choices.table_choice import choose_table

    try:
        with Progress("choosing the network, prior and noise", 1, False if quiet else None) as line:

            def show(done: int, most: int) -> None:
                line.total = most
                line.update(done, final=True)

            ready = choose_table(prepared, show)
    except KeyboardInterrupt:
        exit_stopped("nothing was kept, since the model was not chosen yet; run the same command again")
    if not quiet and ready is not prepared:
        recipe = ready.recipe
        found = [f"prior scale {recipe.scale:g}", f"hidden {list(recipe.hidden)}", f"inputs {recipe.inputs}"]
        if recipe.task == "regression":
            found += [f"noise {recipe.noise}", f"target {recipe.transform}"]
        rule = prepared.config.tune
        tried = f" by {rule}" if rule != "folds" else ""
        tried = f" from {len(ready.candidates)} candidates" if ready.candidates else tried
        print_wrapped(f"Chosen{tried}: {', '.join(found)}.")
    if not quiet:
        print_wrapped(f"Method: {ready.method.name} ({ready.why}).")
    return ready


def report_run(done: TableRun, *, quiet: bool, as_json: bool, open_page: bool) -> None:
    """Write the page and the results of a run and print a summary; the leader does so for all processes."""
    from credibly.distributed import world

    if not is_leader():
        return
    how = f"the fit is complete; write its page with `credibly report {shlex.quote(os.fspath(done.path))}`"
    try:
        with world.alone():
            facts, page = write_results(done, progress=False if quiet or as_json else None)
    except OSError as error:
        raise StoreError(f"{error.filename or done.path}: {error.strerror or error}; {how}") from error
    except KeyboardInterrupt:
        exit_stopped(how)
    if as_json:
        echo((done.path / "results.json").read_text(encoding="utf-8").strip())
    else:
        if not quiet:
            from credibly.cli.verdicts import print_summary

            several = None if facts.target == done.config.target else done.figures
            print_summary(f"{facts.method} on {done.config.target}, {facts.on} rows", facts, several)
        echo(os.fspath(page))
    if open_page:
        open_in_browser(page)


def write_results(
    done: TableRun, final: Path | None = None, *, progress: bool | None = None
) -> tuple[FitSummary, Path]:
    """Write report.html and results.json of a run; `final` is the final location of the folder."""
    from credibly.cli.verdicts import details_of, verdict_of
    from credibly.core.files import write_atomic
    from credibly.report import target_pages, write
    from credibly.tables.summarise import summarise_targets

    with show_stages("report", STAGES, progress):
        every = summarise_targets(done)
        facts, pages = every[0], target_pages(every)
        stage("page")
        folder = final or done.path
        results = {"run": os.fspath(folder), "report": os.fspath(folder / "report.html")} | results_of(facts)
        results |= {"verdict": verdict_of(facts)} | details_of(facts)
        if len(every) > 1:
            results |= {"target": done.config.target, "figures": done.figures}
            results["targets"] = [results_of(one) | {"verdict": verdict_of(one)} for one in every]
        write_atomic(done.path / "results.json", to_json(results) + "\n")
        written = [write(page, done.path / name) for name, page in pages.items()]
        return facts, written[0]


def results_of(facts: FitSummary) -> dict[str, Any]:
    """Return a summary as plain JSON values."""
    return {
        "table": facts.table,
        "target": facts.target,
        "task": facts.kind,
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
            f"{prepared.config.table}: {len(prepared.train):,} training rows{_evaluation(prepared)}.",
            f"Task: {known.task_reason}.",
            *(f"{note[:1].upper()}{note[1:]}." for note in known.notes),
            f"{_count(known.inputs, 'network input')} from {_count(len(known.names), 'column')}.",
            *(f"  {name}: {kind}, {note}" for name, kind, note in known.columns if note),
            *(f"Warning: {warning}." for warning in prepared.warnings),
        ]
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _evaluation(prepared: Prepared) -> str:
    """Describe which rows the metrics will come from."""
    if prepared.held_out.size:
        return f", {len(prepared.held_out):,} held out"
    by = ""
    if prepared.config.group is not None:
        by = f" without shared values of {prepared.config.group}"
    if len(prepared.splits) > 1:
        return f"; metrics from {len(prepared.splits)} folds{by}"
    if prepared.splits:
        count = len(prepared.splits[0][1])
        which = f"the latest {count:,} by {prepared.config.time}" if prepared.config.time else f"{count:,} of them"
        return f"; metrics from {which}, predicted by a fit to the others{by}"
    return ", none held out"
