"""Fit, resume and load the run of a table. The run folder:

    run/table.json               preparation, configuration and metrics, with a checksum
    run/config.toml              the settings; `credibly fit --config run/config.toml --out new/` reproduces the run
    run/posterior/               the posterior, for `credibly.load` and `credibly.resume`
    run/held_out.parquet         the held-out rows
    run/training_sample.parquet  some of the training rows, for plots and missing cells
    run/report.html, run/results.json

Everything but the posterior is written before the fit, so that a sampler can be resumed. A fit that cannot be resumed
leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly import __version__
from credibly.core.files import write_atomic
from credibly.core.specs import to_spec
from credibly.core.threads import torch_threads
from credibly.distributed import world
from credibly.errors import InputError, StoreError
from credibly.inference.method import Method
from credibly.methods.resuming import resume_with_problem
from credibly.metrics import evaluation
from credibly.posterior.loading import load
from credibly.problem import Problem
from credibly.storage.manifest import parse_manifest, sha256
from credibly.storage.run_folder import resume_command
from credibly.tables.config import Config, as_options, write_config
from credibly.tables.folder import (
    check_out,
    explain_disk_errors,
    is_complete,
    new_run,
    read_facts,
    write_facts,
)
from credibly.tables.imputation import training_inputs
from credibly.tables.model import TableModel, epistemic_of, quantile_levels
from credibly.tables.preparation import Preparation
from credibly.tables.reading import read_table
from credibly.tables.recipe import Recipe
from credibly.tables.stored_rows import stored_rows
from credibly.tables.targets import weight_column
from credibly.tables.threads import threads_for

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.posterior.base import Posterior

Array = npt.NDArray[Any]

TRAINING_SAMPLE = "training_sample.parquet"
# Maximum number of training rows stored for plots, and to complete missing cells from.
SAMPLE = 2_000
# Number of held-out rows from which they are the reference for OOD scores; with fewer it is the training sample.
REFERENCE = 20


@dataclass(frozen=True, eq=False)
class Prepared:
    """A table ready to be fitted: the split, the preparation from the training rows, and the problem."""

    config: Config
    table: Table
    preparation: Preparation
    train: Array
    held_out: Array
    recipe: Recipe
    problem: Problem
    method: Method
    why: str


def prepare(config: Config, table: Table | None = None) -> Prepared:
    """Read, check and split a table. Writes nothing and is fast; every problem with the input is raised here."""
    if config.table_sha256 is not None and _digest(config.table) != config.table_sha256:
        raise InputError(
            "--config", f"{config.table} has changed since the run", "Remove table_sha256 to use it anyway"
        )
    table = read_table(config.table) if table is None else table
    weights = None if config.weight is None else weight_column(table, config.weight, config.target)
    drop = config.drop if config.weight is None else (*config.drop, config.weight)
    known = Preparation.fit(table, config.target, task=config.task, drop=drop)
    rows = known.usable_rows(table)
    labels = known.target_values(table.take(rows)) if known.task == "classification" else None
    train, held_out = (rows[part] for part in split(len(rows), config.holdout, config.seed, labels))
    preparation = Preparation.fit(table, config.target, task=known.task, drop=drop, rows=train)
    preparation = dataclasses.replace(preparation, task_reason=known.task_reason)
    recipe = config.recipe(known.task)
    chosen = table.take(train)
    x, y = training_inputs(preparation.transform(chosen, gaps=True)[0]), preparation.target_values(chosen)
    classes = None if preparation.classes is None else len(preparation.classes)
    if classes is None:
        y = (y - preparation.y_mean) / preparation.y_std
    _check_device(config.device)
    weights = None if weights is None else weights[train]
    problem = recipe.problem(x, y, sample_weight=weights, classes=classes, seed=config.seed, device=config.device)
    size = problem.n, problem.layout.dim
    return Prepared(
        config,
        table,
        preparation,
        train,
        held_out,
        recipe,
        problem,
        fitter_of(recipe, *size),
        recipe.resolved(*size)[1],
    )


def _check_device(device: str | None) -> None:
    """Raise unless the device exists on this machine."""
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InputError("--device", f"cannot use {device!r} ({reason})", "Leave it out to use the CPU") from None


def fitter_of(recipe: Recipe, rows: int, parameters: int) -> Method:
    """Return the method with its settings. Errors name the command-line option."""
    try:
        with as_options():
            return recipe.fitter(rows, parameters)
    except InputError as error:
        if error.argument.startswith("--"):
            raise
        raise InputError("--set", str(error)) from None
    except TypeError as error:
        # A value of a type that the method cannot even compare.
        raise InputError("--set", f"invalid settings {dict(recipe.settings)} ({error})") from None


def split(rows: int, fraction: float, seed: int, labels: Array | None = None) -> tuple[Array, Array]:
    """Return sorted indices of training and held-out rows, stratified by class with a training row for every class."""
    order = np.random.default_rng([seed, 0x5917]).permutation(rows)
    groups = [order] if labels is None else [order[labels[order] == label] for label in np.unique(labels)]
    kept_back = np.zeros(rows, dtype=bool)
    for group in groups:
        kept_back[group[: min(round(fraction * len(group)), len(group) - 1)]] = True
    return np.flatnonzero(~kept_back), np.flatnonzero(kept_back)


def fit_table(
    prepared: Prepared, out: str | os.PathLike[str], *, force: bool = False, progress: bool | None = None
) -> TableRun:
    """Fit a prepared table into a run folder. An interrupted sampler can be resumed; other methods leave nothing.

    With many processes all of them fit, and the leader writes the folder.
    """
    folder, everyone = Path(out), world.current()
    started = time.perf_counter()
    run = None
    if everyone.leader:
        check_out(folder, force)
    with new_run(folder) if everyone.leader else nullcontext(folder) as made:
        if everyone.leader:
            _begin(prepared, made)
        work = Path(everyone.gather(os.fspath(made))[0])
        with torch_threads(threads_for(prepared.problem, prepared.method)):
            posterior = prepared.method.fit(
                prepared.problem, seed=prepared.config.seed, out=work / "posterior", progress=progress
            )
        if everyone.leader:
            with world.alone():
                run = _finish(work, posterior, time.perf_counter() - started)
    # After the barrier a replacement has been moved into place.
    everyone.barrier()
    return run if run is not None and work == folder else TableRun.load(folder)


def resume_table(path: str | os.PathLike[str], *, progress: bool | None = None) -> TableRun:
    """Resume a run that was stopped, with results identical to those of an uninterrupted run."""
    folder, everyone = Path(path), world.current()
    facts = read_facts(folder)
    if everyone.gather(facts["status"])[0] == "complete":
        return TableRun.load(folder)
    inner = folder / "posterior"
    if not inner.exists():
        raise StoreError(
            f"path: {os.fspath(path)!r} was stopped before there was anything to resume. Start again with `credibly fit"
            f" --config {folder / 'config.toml'} --out NEW`"
        )
    posterior: Posterior
    # The same number of threads as before: another one would round differently.
    with torch_threads(facts["threads"]), explain_disk_errors(folder):
        ended = everyone.gather(is_complete(parse_manifest(inner)))[0]
        posterior = load(inner) if ended else resume_with_problem(inner, None, progress=progress)[0]
    run = None
    if everyone.leader:
        with explain_disk_errors(folder), world.alone():
            run = _finish(folder, posterior, float(posterior.record.history.get("seconds", 0.0)))
    everyone.barrier()
    return TableRun.load(folder) if run is None else run


@dataclass(frozen=True, eq=False)
class TableRun:
    """The run folder of a table, loaded."""

    path: Path
    facts: dict[str, Any]
    config: Config
    model: TableModel

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableRun:
        """Load a folder written by `credibly fit`. Raise if it is unfinished, modified or of another version."""
        folder = Path(path)
        facts = read_facts(folder)
        if facts["status"] != "complete":
            name = os.fspath(path)
            raise StoreError(f"path: the fit in {name!r} is not finished. Resume it with {resume_command(name)}")
        levels = facts["ood_levels"]
        preparation = Preparation.from_dict(facts["preparation"])
        model = TableModel(
            preparation,
            load(folder / "posterior"),
            None if levels is None else np.asarray(levels),
            partial(stored_rows, folder, TRAINING_SAMPLE, preparation),
        )
        return cls(folder, facts, config_of(facts), model)

    @property
    def figures(self) -> dict[str, float]:
        """Metrics on the held-out rows, or on the training rows if none were held out."""
        found: dict[str, float] = self.facts["figures"]
        return found

    def rows(self) -> tuple[Table, str]:
        """Return the rows behind the metrics, and which they are: "held-out" or "training"."""
        if self.facts["held_out"]:
            return stored_rows(self.path, "held_out.parquet", self.model.preparation), "held-out"
        return self.sample(), "training"

    def sample(self) -> Table:
        """Return a sample of the training rows."""
        return stored_rows(self.path, TRAINING_SAMPLE, self.model.preparation)


def stored_config(prepared: Prepared) -> Config:
    """Return the configuration that the run folder stores: fully explicit, so that the run can be reproduced."""
    size = prepared.problem.n, prepared.problem.layout.dim
    defaults = to_spec(dataclasses.replace(prepared.recipe, method=prepared.method.name, settings={}).fitter(*size))
    return dataclasses.replace(
        prepared.config,
        table=os.fspath(Path(prepared.config.table).resolve()),
        task=prepared.preparation.task,
        method=prepared.method.name,
        table_sha256=_digest(prepared.config.table),
        settings={k: v for k, v in to_spec(prepared.method).items() if k != "kind" and not (v is defaults[k] is None)},
    )


def _begin(prepared: Prepared, folder: Path) -> None:
    """Write everything that is known before the fit."""
    config = stored_config(prepared)
    # table.json first: if this is interrupted, the folder is still recognised as a run and may be replaced.
    write_facts(
        folder,
        {
            "status": "fitting",
            "versions": {"credibly": __version__, "torch": torch.__version__},
            "config": dataclasses.asdict(config),
            "preparation": prepared.preparation.to_dict(),
            "why": prepared.why,
            "rows": len(prepared.train),
            "held_out": len(prepared.held_out),
            "parameters": prepared.problem.layout.dim,
            "threads": threads_for(prepared.problem, prepared.method),
        },
    )
    write_atomic(folder / "config.toml", write_config(config, {"method": prepared.why}))
    names = [*prepared.preparation.names, prepared.preparation.target]
    for file, rows in (("held_out.parquet", prepared.held_out), (TRAINING_SAMPLE, _sample(prepared.train))):
        _write_parquet(prepared.table.select(names).take(rows), folder / file)


def _finish(folder: Path, posterior: Posterior, seconds: float) -> TableRun:
    """Compute metrics and the reference for OOD scores from the stored rows."""
    facts = read_facts(folder)
    preparation = Preparation.from_dict(facts["preparation"])
    sample = partial(stored_rows, folder, TRAINING_SAMPLE, preparation)
    model = TableModel(preparation, posterior, training_sample=sample)
    run = TableRun(folder, facts, config_of(facts), model)
    rows, on = run.rows()
    predictive = model.predict_table(rows)
    y = torch.from_numpy(model.preparation.target_values(rows))
    reference = predictive if len(predictive) >= REFERENCE else model.predict_table(run.sample())
    levels = quantile_levels(epistemic_of(reference))
    metrics = evaluation.evaluate(predictive, y, seed=run.config.seed)
    facts |= {
        "status": "complete",
        "seconds": round(seconds, 3),
        "on": on,
        "figures": metrics,
        "ood_levels": None if levels is None else levels.tolist(),
    }
    write_facts(folder, facts)
    return TableRun(folder, facts, run.config, dataclasses.replace(model, ood_levels=levels))


def config_of(facts: dict[str, Any]) -> Config:
    """Return the configuration stored in table.json."""
    try:
        values = dict(facts["config"])
        values |= {key: tuple(values[key]) for key in ("drop", "hidden")}
        return Config(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"path: the configuration in table.json is invalid ({error})") from error


def _digest(table: str) -> str:
    try:
        return sha256(Path(table))
    except OSError as error:
        raise InputError("table", f"cannot read {table} ({error.strerror})") from None


def _write_parquet(table: Table, path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path)


def _sample(rows: Array) -> Array:
    return rows if len(rows) <= SAMPLE else rows[np.linspace(0, len(rows) - 1, SAMPLE).round().astype(int)]
