"""The folder of a fit to a table: made, gone on with, opened.

    run/table.json           what was fitted and how: preparation, configuration, figures, with a checksum of itself
    run/config.toml          the settings; `credibly fit --config run/config.toml --out new/` makes the same run again
    run/posterior/           the posterior, as `credibly.load` and `credibly.resume` know it
    run/held_out.parquet     the rows kept back; run/training_sample.parquet: some of the others, for pictures
    run/report.html, run/results.json

Everything but the posterior is there from the beginning, so that a sampler's run can be gone on with; a fit that cannot go on
leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly import __version__
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
from credibly.tables.folder import check_out, has_ended, making, read_facts, write_facts, write_whole, writing
from credibly.tables.model import TableModel, doubt, quantile_levels
from credibly.tables.preparation import Preparation
from credibly.tables.reading import read_table
from credibly.tables.recipe import Recipe
from credibly.tables.threads import threads_for

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.posterior.base import Posterior

Array = npt.NDArray[Any]

SAMPLE = 2_000  # training rows that are kept for pictures
REFERENCE = 20  # held-out rows that are enough to know what doubt is usual


@dataclass(frozen=True, eq=False)
class Prepared:
    """A table ready to be fitted: the split, the preparation from its training part, and the problem."""

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
    """Reads, checks and splits; nothing is written and no long work is done. Everything wrong with the input shows here."""
    if config.table_sha256 is not None and _digest(config.table) != config.table_sha256:
        raise InputError(
            "--config", f"{config.table} is not the file that the run was made from", "Take table_sha256 out to use it all the same"
        )  # fmt: skip
    table = read_table(config.table) if table is None else table
    known = Preparation.fit(table, config.target, task=config.task, drop=config.drop)
    rows = known.usable_rows(table)
    labels = known.target_values(table.take(rows)) if known.task == "classification" else None
    train, held_out = (rows[part] for part in split(len(rows), config.holdout, config.seed, labels))
    preparation = Preparation.fit(table, config.target, task=known.task, drop=config.drop, rows=train)
    preparation = dataclasses.replace(preparation, task_reason=known.task_reason)
    recipe = config.recipe(known.task)
    chosen = table.take(train)
    x, y = preparation.transform(chosen)[0], preparation.target_values(chosen)
    classes = None if preparation.classes is None else len(preparation.classes)
    if classes is None:
        y = (y - preparation.y_mean) / preparation.y_std
    _check_device(config.device)
    problem = recipe.problem(x, y, classes=classes, seed=config.seed, device=config.device)
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
    """Refuses what is no device, or is not here."""
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0][:120]
        raise InputError("--device", f"{device!r} cannot be used ({said})", "Leave it out for the processor") from None


def fitter_of(recipe: Recipe, rows: int, parameters: int) -> Method:
    """The method with its settings; what it cannot take is refused as the option it came from."""
    try:
        with as_options():
            return recipe.fitter(rows, parameters)
    except InputError as error:
        if error.argument.startswith("--"):
            raise
        raise InputError("--set", f"{error.argument}: {error.found}", error.advice) from None
    except TypeError as error:  # a value of a kind that the method does not even compare
        raise InputError(
            "--set", f"found {dict(recipe.settings)} ({error})", "Pass numbers where the method has them"
        ) from None


def split(rows: int, share: float, seed: int, labels: Array | None = None) -> tuple[Array, Array]:
    """Places of the training and of the held-out rows, each in order; every class keeps its share and a training row."""
    order = np.random.default_rng([seed, 0x5917]).permutation(rows)
    groups = [order] if labels is None else [order[labels[order] == label] for label in np.unique(labels)]
    kept_back = np.zeros(rows, dtype=bool)
    for group in groups:
        kept_back[group[: min(round(share * len(group)), len(group) - 1)]] = True
    return np.flatnonzero(~kept_back), np.flatnonzero(kept_back)


def fit_table(
    prepared: Prepared, out: str | os.PathLike[str], *, force: bool = False, progress: bool | None = None
) -> TableRun:
    """Fits what was prepared and leaves a run folder. A sampler that is stopped can be gone on with; others leave nothing.

    Of many processes all fit, and the first one makes the folder.
    """
    folder, everyone = Path(out), world.current()
    started = time.perf_counter()
    run = None
    if everyone.leader:
        check_out(folder, force)
    with making(folder) if everyone.leader else nullcontext(folder) as made:
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
    everyone.barrier()  # what was made beside another has moved now
    return run if run is not None and work == folder else TableRun.load(folder)


def resume_table(path: str | os.PathLike[str], *, progress: bool | None = None) -> TableRun:
    """Goes on with a run that was stopped, to the same figures as if it never had been."""
    folder, everyone = Path(path), world.current()
    facts = read_facts(folder)
    if everyone.gather(facts["status"])[0] == "complete":
        return TableRun.load(folder)
    inner = folder / "posterior"
    if not inner.exists():
        raise StoreError(
            f"path: {os.fspath(path)!r} was stopped before there was anything to go on with. Begin again: `credibly fit --config"
            f" {folder / 'config.toml'} --out NEW`"
        )
    posterior: Posterior
    with torch_threads(facts["threads"]), writing(folder):  # as it was begun: another number would round otherwise
        ended = everyone.gather(has_ended(parse_manifest(inner)))[0]
        posterior = load(inner) if ended else resume_with_problem(inner, None, progress=progress)[0]
    run = None
    if everyone.leader:
        with writing(folder), world.alone():
            run = _finish(folder, posterior, float(posterior.record.history.get("seconds", 0.0)))
    everyone.barrier()
    return TableRun.load(folder) if run is None else run


@dataclass(frozen=True, eq=False)
class TableRun:
    """A run folder of a table, opened."""

    path: Path
    facts: dict[str, Any]
    config: Config
    model: TableModel

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TableRun:
        """Opens a folder that `credibly fit` made; one that has not ended, was altered or is of another version is refused."""
        folder = Path(path)
        facts = read_facts(folder)
        if facts["status"] != "complete":
            raise StoreError(
                f"path: the fit in {os.fspath(path)!r} has not ended. Go on with it by {resume_command(os.fspath(path))}"
            )
        levels = facts["ood_levels"]
        model = TableModel(
            Preparation.from_dict(facts["preparation"]), load(folder / "posterior"), None if levels is None else np.asarray(levels)
        )  # fmt: skip
        return cls(folder, facts, config_of(facts), model)

    @property
    def figures(self) -> dict[str, float]:
        """Figures of merit on the held-out rows, or on the training rows where none were held out."""
        found: dict[str, float] = self.facts["figures"]
        return found

    def rows(self) -> tuple[Table, str]:
        """The rows that figures are of, and which they are: "held-out" or "training"."""
        if self.facts["held_out"]:
            return self._kept("held_out.parquet"), "held-out"
        return self.sample(), "training"

    def sample(self) -> Table:
        """Some of the training rows."""
        return self._kept("training_sample.parquet")

    def _kept(self, name: str) -> Table:
        known = self.model.preparation
        try:
            found = read_table(self.path / name, text=known.text_names)
        except InputError as error:
            raise StoreError(
                f"path: {name} of {os.fspath(self.path)!r} is gone or was altered ({error.found})"
            ) from error
        if set(known.names) | {known.target} != set(found.column_names):
            raise StoreError(f"path: {name} of {os.fspath(self.path)!r} was altered (it has other columns)")
        return found


def stored_config(prepared: Prepared) -> Config:
    """The configuration that a folder keeps: all of it said, so that the same run can be made again."""
    size = prepared.problem.n, prepared.problem.layout.dim
    usual = to_spec(dataclasses.replace(prepared.recipe, method=prepared.method.name, settings={}).fitter(*size))
    return dataclasses.replace(
        prepared.config, table=os.fspath(Path(prepared.config.table).resolve()), task=prepared.preparation.task,
        method=prepared.method.name, table_sha256=_digest(prepared.config.table),
        settings={k: v for k, v in to_spec(prepared.method).items() if k != "kind" and not (v is usual[k] is None)},
    )  # fmt: skip


def _begin(prepared: Prepared, folder: Path) -> None:
    """Everything that is known before the fit."""
    config = stored_config(prepared)
    # table.json first: whatever stops this, the folder is known as a run and may be replaced.
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
    write_whole(folder / "config.toml", write_config(config, {"method": prepared.why}))
    names = [*prepared.preparation.names, prepared.preparation.target]
    for file, places in (("held_out.parquet", prepared.held_out), ("training_sample.parquet", _some(prepared.train))):
        _write_parquet(prepared.table.select(names).take(places), folder / file)


def _finish(folder: Path, posterior: Posterior, seconds: float) -> TableRun:
    """Figures and the reference for doubt, from the rows that were kept."""
    facts = read_facts(folder)
    model = TableModel(Preparation.from_dict(facts["preparation"]), posterior)
    run = TableRun(folder, facts, config_of(facts), model)
    rows, on = run.rows()
    predictive = model.predict_table(rows)
    y = torch.from_numpy(model.preparation.target_values(rows))
    usual = predictive if len(predictive) >= REFERENCE else model.predict_table(run.sample())
    levels = quantile_levels(doubt(usual))
    figures = evaluation.evaluate(predictive, y, seed=run.config.seed)
    facts |= {
        "status": "complete", "seconds": round(seconds, 3), "on": on, "figures": figures,
        "ood_levels": None if levels is None else levels.tolist(),
    }  # fmt: skip
    write_facts(folder, facts)
    return TableRun(folder, facts, run.config, dataclasses.replace(model, ood_levels=levels))


def config_of(facts: dict[str, Any]) -> Config:
    """The configuration that a folder was made with."""
    try:
        values = dict(facts["config"])
        values |= {key: tuple(values[key]) for key in ("drop", "hidden")}
        return Config(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"path: the configuration in table.json cannot be used ({error})") from error


def _digest(table: str) -> str:
    try:
        return sha256(Path(table))
    except OSError as error:
        raise InputError("table", f"{table} cannot be read ({error.strerror})", "Name a CSV or Parquet file") from None


def _write_parquet(table: Table, path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path)


def _some(places: Array) -> Array:
    return places if len(places) <= SAMPLE else places[np.linspace(0, len(places) - 1, SAMPLE).round().astype(int)]
