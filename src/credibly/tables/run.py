"""Fit, resume and load the run of a table. The run folder:

    run/table.json               preparation, configuration and metrics, with a checksum
    run/config.toml              the settings; `credibly fit --config run/config.toml --out new/` reproduces the run
    run/posterior/               the posterior, for `credibly.load` and `credibly.resume`
    run/folds/                   posteriors of fits to some of the rows, which predict the others
    run/held_out.parquet         the rows that those predict, for metrics and the guarantee
    run/training_sample.parquet  some of the training rows, for plots and missing cells
    run/report.html, run/results.json

Everything but the posteriors is written before the fit, so that it can be resumed: without the folds that are there,
and the final fit from its last checkpoint. A fit that cannot be resumed leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
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
from credibly.conformal.calibration import Calibration
from credibly.core.files import fsync_file, fsync_folder, write_atomic
from credibly.core.stages import show_stages, stage
from credibly.core.threads import torch_threads
from credibly.distributed import world
from credibly.errors import InputError, StoreError
from credibly.methods.resuming import resume_with_problem
from credibly.posterior.draws import SampledPosterior
from credibly.posterior.loading import load
from credibly.storage.guarding import as_store_errors
from credibly.storage.manifest import parse_manifest
from credibly.storage.run_folder import resume_command
from credibly.storage.sealed import read_facts, sealed_files, write_facts
from credibly.tables.config import Config, write_config
from credibly.tables.folder import (
    FOLDS,
    check_out,
    explain_disk_errors,
    is_complete,
    new_run,
)
from credibly.tables.folds import fit_folds, fold_rows, load_folds, predict_unseen
from credibly.tables.guarantee import calibration_of, guarantee_facts
from credibly.tables.model import TableModel, quantile_levels
from credibly.tables.preparation import Preparation
from credibly.tables.prepared import Prepared, prepare, requested_config, stored_config
from credibly.tables.stored_rows import stored_rows
from credibly.tables.targets.metrics import target_metrics
from credibly.tables.threads import threads_for

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.posterior.base import Posterior
    from credibly.predictive.base import Predictive

Array = npt.NDArray[Any]

CONFIG = "config.toml"
HELD_OUT = "held_out.parquet"
TRAINING_SAMPLE = "training_sample.parquet"
# Maximum number of training rows stored for plots, and to complete missing cells from.
SAMPLE = 2_000
# Number of held-out rows from which they are the reference for OOD scores; with fewer it is the training sample.
REFERENCE = 20


def fit_table(
    prepared: Prepared, out: str | os.PathLike[str], *, force: bool = False, progress: bool | None = None
) -> TableRun:
    """Fit a prepared table into a run folder. An interrupted fit can be resumed once a fold or a choice is kept.

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
        posterior = _fit(prepared, work, progress)
        if everyone.leader:
            with world.alone(), show_stages("evaluate", ("predictions", "metrics"), progress):
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
    posterior: Posterior
    # The same number of threads as before: another one would round differently.
    with torch_threads(facts["threads"]), explain_disk_errors(folder):
        if not everyone.gather((inner / "manifest.json").exists())[0]:
            # Stopped in its folds, after everything had been chosen.
            if everyone.leader:
                shutil.rmtree(inner, ignore_errors=True)
            everyone.barrier()
            posterior = _fit(_prepared_again(folder, facts), folder, progress)
        else:
            ended = everyone.gather(is_complete(parse_manifest(inner)))[0]
            posterior = load(inner) if ended else resume_with_problem(inner, None, progress=progress)[0]
    run = None
    if everyone.leader:
        with explain_disk_errors(folder), world.alone(), show_stages("evaluate", ("predictions", "metrics"), progress):
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
        folder, name = Path(path), os.fspath(path)
        facts = read_facts(folder)
        if facts["status"] != "complete":
            raise StoreError(f"path: the fit in {name!r} is not finished. Resume it with {resume_command(name)}")
        with as_store_errors(f"path: table.json of {name!r}"):
            return cls._build(folder, facts)

    @classmethod
    def _build(cls, folder: Path, facts: dict[str, Any]) -> TableRun:
        levels, calibration = facts["ood_levels"], facts["calibration"]
        preparation = Preparation.from_dict(facts["preparation"])
        model = TableModel(
            preparation,
            load(folder / "posterior"),
            None if levels is None else np.asarray(levels),
            folds=load_folds(folder, facts["folds"]),
            calibration=None if calibration is None else Calibration.from_dict(calibration),
            training_sample=partial(stored_rows, folder, TRAINING_SAMPLE, preparation, _sampled(facts["rows"])),
            ood_fitted=bool(facts.get("ood_fitted", False)),
        )
        inputs = preparation.scaling.outputs(preparation.inputs)
        if [part["shape"] for part in model.posterior.model.row["parts"]] != [[inputs]]:
            found = f"is not of this table's {inputs} inputs"
            raise StoreError(f"path: the posterior in {os.fspath(folder)!r} {found}")
        return cls(folder, facts, config_of(facts), model)

    @property
    def figures(self) -> dict[str, float]:
        """Metrics on the held-out rows, or on the training rows if none were held out."""
        found: dict[str, float] = self.facts["figures"]
        return found

    def rows(self) -> tuple[Table, str]:
        """Return the rows behind the metrics, and which they are: "cross-validated", "held-out" or "training"."""
        if self.facts["held_out"]:
            rows = stored_rows(self.path, HELD_OUT, self.model.preparation, self.facts["held_out"])
            return rows, "cross-validated" if self.facts["folds"] > 1 else "held-out"
        return self.sample(), "training"

    def predict_rows(self, inputs: Array) -> Predictive:
        """Return the predictions of the rows behind the metrics, by fits that have not seen them if there are any."""
        if not self.model.folds:
            return self.model.predict(inputs)
        return predict_unseen(self.model, inputs, np.asarray(self.facts["fold_of_row"] or [0] * len(inputs)))

    def sample(self) -> Table:
        """Return a sample of the training rows."""
        return stored_rows(self.path, TRAINING_SAMPLE, self.model.preparation, _sampled(self.facts["rows"]))


def _fit(prepared: Prepared, folder: Path, progress: bool | None) -> Posterior:
    """Fit the folds that are not in the folder yet, and all rows."""
    fit_folds(prepared, folder, progress)
    with torch_threads(threads_for(prepared.problem, prepared.method)):
        problem = prepared.completed_problem()
        return prepared.method.fit(problem, seed=prepared.config.seed, out=folder / "posterior", progress=progress)


def _prepared_again(folder: Path, facts: dict[str, Any]) -> Prepared:
    """Return the table of a run whose choices are stored. Raise if its file has changed since."""
    again = f"Start again with `credibly fit --config {folder / CONFIG} --out NEW`"
    if not facts["files"]:
        raise StoreError(f"path: {os.fspath(folder)!r} was stopped before there was anything to resume. {again}")
    try:
        return prepare(config_of(facts))
    except InputError as error:
        raise StoreError(f"path: {os.fspath(folder)!r} cannot be resumed ({error}). {again}") from error


def _begin(prepared: Prepared, folder: Path) -> None:
    """Write everything that is known before the fit."""
    config = stored_config(prepared)
    rows, fold = fold_rows(prepared)
    facts = {
        "status": "fitting",
        "versions": {"credibly": __version__, "torch": torch.__version__},
        "config": dataclasses.asdict(config),
        "requested": requested_config(prepared),
        "preparation": prepared.preparation.to_dict(),
        "why": prepared.why,
        "warnings": list(prepared.warnings),
        "candidates": [dataclasses.asdict(candidate) for candidate in prepared.candidates],
        "rows": len(prepared.train),
        "held_out": len(rows),
        "folds": len(prepared.splits),
        "fold_of_row": fold.tolist() if len(prepared.splits) > 1 else [],
        "parameters": prepared.problem.layout.dim,
        "threads": threads_for(prepared.problem, prepared.method),
    }
    # First without the list of its files: if interrupted, the folder is still recognised as a run and may be replaced.
    write_facts(folder, facts)
    write_atomic(folder / CONFIG, write_config(config, {"method": prepared.why}))
    names = [*prepared.preparation.names, *prepared.preparation.target_columns]
    for file, part in ((HELD_OUT, rows), (TRAINING_SAMPLE, _sample(prepared.train))):
        _write_parquet(prepared.table.select(names).take(part), folder / file)
    write_facts(folder, {**facts, "files": sealed_files(folder, [CONFIG, HELD_OUT, TRAINING_SAMPLE])})


def _finish(folder: Path, posterior: Posterior, seconds: float) -> TableRun:
    """Compute metrics, the calibration of intervals and the reference for OOD scores from the stored rows."""
    facts = read_facts(folder)
    preparation = Preparation.from_dict(facts["preparation"])
    sample = partial(stored_rows, folder, TRAINING_SAMPLE, preparation, _sampled(facts["rows"]))
    model = TableModel(preparation, posterior, folds=load_folds(folder, facts["folds"]), training_sample=sample)
    run = TableRun(folder, facts, config_of(facts), model)
    rows, on = run.rows()
    inputs, y = model.inputs(rows)[0], preparation.target_values(rows)
    predictive = run.predict_rows(inputs)
    # A fold has few members, so their disagreement is a noisy estimate.
    comparable = not model.folds or isinstance(posterior, SampledPosterior)
    reference = predictive if comparable else model.predict(inputs)
    reference = reference if len(reference) >= REFERENCE else model.predict_table(run.sample())
    levels = quantile_levels(model.epistemic(reference))
    stage("metrics")
    metrics = target_metrics(predictive, torch.from_numpy(y), preparation.targets, seed=run.config.seed)
    fold = np.asarray(facts["fold_of_row"] or [0] * len(y))
    calibration = None
    if run.config.conformal and on != "training":
        calibration = calibration_of(predictive, y, fold)
    facts |= {
        "status": "complete",
        "seconds": round(seconds, 3),
        "on": on,
        "figures": metrics,
        "ood_levels": None if levels is None else levels.tolist(),
        "ood_fitted": model.ood_fitted,
        "calibration": None if calibration is None else calibration.to_dict(),
        "guarantee": guarantee_facts(calibration, predictive, y, fold),
    }
    manifests = ["posterior/manifest.json", *(f"{FOLDS}/{k}/manifest.json" for k in range(facts["folds"]))]
    facts["files"] = {**facts["files"], **sealed_files(folder, manifests)}
    write_facts(folder, facts)
    return TableRun(folder, facts, run.config, dataclasses.replace(model, ood_levels=levels, calibration=calibration))


def config_of(facts: dict[str, Any]) -> Config:
    """Return the configuration stored in table.json."""
    try:
        values = dict(facts["config"])
        values |= {key: tuple(values.get(key, ())) for key in ("drop", "hidden", "order", "na")}
        return Config(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"path: the configuration in table.json is invalid ({error})") from error


def _write_parquet(table: Table, path: Path) -> None:
    from pyarrow import parquet

    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        parquet.write_table(table, draft)
        fsync_file(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def _sampled(rows: int) -> int:
    """Return how many of the training rows are stored."""
    return min(rows, SAMPLE)


def _sample(rows: Array) -> Array:
    return rows if len(rows) <= SAMPLE else rows[np.linspace(0, len(rows) - 1, SAMPLE).round().astype(int)]
