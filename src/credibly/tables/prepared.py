"""A table ready to be fitted: read, checked, encoded, and split into folds for its metrics."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.specs import to_spec
from credibly.errors import InputError
from credibly.inference.method import Method
from credibly.posterior.base import Posterior
from credibly.problem import Problem
from credibly.storage.manifest import sha256
from credibly.tables.cells.conventions import Conventions
from credibly.tables.choices.changes import MANY
from credibly.tables.choices.rowset import Rowset
from credibly.tables.columns.roles import group_values, time_values
from credibly.tables.columns.screening import screen
from credibly.tables.config import Config, as_options
from credibly.tables.estimating.arrays import weights_by_class
from credibly.tables.files.reading import read_table
from credibly.tables.files.row_samples import MOST_BYTES
from credibly.tables.fit_summary import Candidate
from credibly.tables.missing.imputation import training_inputs
from credibly.tables.missing.training_gaps import TrainingGaps, completed_inputs
from credibly.tables.preparation import Preparation
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import Rows, folds_of, held_out_split, requested_split
from credibly.tables.targets.checks import check_column, target_names, weight_column

if TYPE_CHECKING:
    from pyarrow import Table

Array = npt.NDArray[Any]

# Methods that are fast enough to be fitted once more for each of five folds; others have one held-out part.
CROSS_VALIDATED = ("hmc", "ensemble", "map", "mle")
HELD_OUT = 0.2
# Fraction held out of tables with many rows, whatever the method.
MANY_HELD_OUT = 0.1
# Number of rows below which the folds would be too small to be informative: one part is held out.
FEW = 50


@dataclass(frozen=True, eq=False)
class Prepared:
    """A table ready to be fitted.

    Attributes:
        config: the configuration.
        table: all rows.
        preparation: preprocessing, fitted to the rows in `train`.
        train: rows of the final fit, indices into the table.
        held_out: rows that the final fit does not see; empty if it is fitted to all of them.
        splits: (fitted, predicted) positions in `train`: for each a further fit gives the metrics.
        data: the rows in `train` as arrays.
        recipe: network, prior, noise and method.
        problem: the problem of the final fit.
        method: the method with its settings.
        why: why it was chosen.
        warnings: remarks on the table that may invalidate the fit.
        candidates: candidates that were tried to choose the recipe.
        requested: the configuration before anything was chosen.
        fold_fits: fits to the first parts of `splits` that the choice of the method has made already, by position.
    """

    config: Config
    table: Table
    preparation: Preparation
    train: Array
    held_out: Array
    splits: tuple[tuple[Array, Array], ...]
    data: Rowset
    recipe: Recipe
    problem: Problem
    method: Method
    why: str
    warnings: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    requested: Config | None = None
    fold_fits: Mapping[int, Posterior] = field(default_factory=dict)

    def with_recipe(self, recipe: Recipe, candidates: tuple[Candidate, ...] = ()) -> Prepared:
        """Return the table with another recipe, and the preparation and the problem that follow from it."""
        config = dataclasses.replace(
            self.config,
            method=recipe.method,
            hidden=recipe.hidden,
            activation=recipe.activation,
            prior_scale=recipe.scale,
            noise=recipe.noise,
            noise_floor=recipe.noise_floor,
            transform=recipe.transform,
            inputs=recipe.inputs,
            embedding=recipe.embedding,
            settings=recipe.settings,
            tune="none",
        )
        preparation = _preparation(config, self.table, self.preparation.task, self.train)
        preparation = dataclasses.replace(preparation, task_reason=self.preparation.task_reason)
        preparation = preparation.with_scaling(recipe.inputs, self.data.x)
        made = dataclasses.replace(
            self, config=config, preparation=preparation, recipe=recipe, candidates=candidates, fold_fits={}
        )
        problem = made.problem_of(np.arange(len(self.train)))
        size = problem.n, problem.layout.dim
        return dataclasses.replace(made, problem=problem, method=fitter_of(recipe, *size))

    def completed_problem(self, rows: Array | None = None) -> Problem:
        """Return the problem of some of the rows in `train`, or all, with draws of their missing cells.

        Without missing cells it is `problem_of(rows)`; otherwise short fits to these rows come first.
        """
        if self.data.gaps is None:
            return self.problem if rows is None else self.problem_of(rows)
        chosen = np.arange(len(self.train)) if rows is None else rows
        part, known = self.data.at(chosen), self.preparation
        assert part.gaps is not None
        x = completed_inputs(
            self.recipe,
            part.x,
            known.standardise(part.y),
            part.gaps,
            sample_weight=part.weight,
            classes=part.classes,
            numeric=part.numeric,
            scaling=known.scaling,
            seed=self.config.seed,
        )
        return self.problem_of(chosen, x)

    def problem_of(self, rows: Array, x: Array | None = None) -> Problem:
        """Return the problem of some of the rows in `train`, with their inputs or others."""
        part, known = self.data.at(rows), self.preparation
        return self.recipe.problem(
            known.scaling(part.x if x is None else x),
            known.standardise(part.y),
            sample_weight=part.weight,
            classes=part.classes,
            seed=self.config.seed,
            device=self.config.device,
            numeric=part.numeric,
        )


def _read(config: Config) -> Table:
    """Return the rows of a configuration's table, or a sample of them if they are too many."""
    return read_table(config.table, conventions=Conventions(config.na), most=MOST_BYTES)


def prepare(config: Config, table: Table | None = None, *, refit: bool = True) -> Prepared:
    """Read, check and split a table. Writes nothing and is fast; every problem with the input is raised here.

    Args:
        config: the configuration.
        table: the rows, if they have been read already.
        refit: whether the final fit is to all rows, after further fits to some of them have given the metrics;
            otherwise held-out rows stay unseen.
    """
    if config.table_sha256 is not None and digest(config.table) != config.table_sha256:
        raise InputError(
            "--config", f"{config.table} has changed since the run", "Remove table_sha256 to use it anyway"
        )
    table = _read(config) if table is None else table
    _check_roles(config, table.column_names)
    known = _preparation(config, table, config.task)
    usable = known.usable_rows(table)
    weights = None if config.weight is None else weight_column(table, config.weight, usable)
    rows = _rows(config, table, known, usable)
    train, held_out = usable, usable[:0]
    splits: tuple[tuple[Array, Array], ...] = ()
    if refit:
        splits = _splits(config, rows)
    else:
        split = held_out_split if config.holdout is None else requested_split
        kept, left = split(rows, HELD_OUT if config.holdout is None else config.holdout, config.seed)
        train, held_out, rows = usable[kept], usable[left], rows.at(kept)
    preparation = _preparation(config, table, known.task, train)
    preparation = dataclasses.replace(preparation, task_reason=known.task_reason)
    chosen = table.take(train)
    gapped = preparation.transform(chosen, gaps=True)[0]
    x, gaps = training_inputs(gapped), TrainingGaps.of(gapped)
    y = preparation.target_values(chosen)
    classes = None if preparation.classes is None else len(preparation.classes)
    _check_device(config.device)
    weights = None if weights is None else weights[train]
    weights = weights_by_class(config.class_weight, preparation.classes, y, weights)
    # Embedding a column of two values would gain nothing.
    numeric = tuple(i for i in preparation.numeric_features if len(np.unique(x[:1000, i])) > 2)
    data = Rowset(x, y, numeric, rows, weights, classes, gaps)
    recipe = config.recipe(known.task)
    preparation = preparation.with_scaling(recipe.inputs, x)
    unfinished = Prepared(config, table, preparation, train, held_out, splits, data, recipe, None, None, "")  # type: ignore[arg-type]
    problem = unfinished.problem_of(np.arange(len(train)))
    size = problem.n, problem.layout.dim
    parts = [(train[fitted], train[predicted]) for fitted, predicted in splits] or [(train, held_out)]
    return dataclasses.replace(
        unfinished,
        problem=problem,
        method=fitter_of(recipe, *size),
        why=recipe.resolved(*size)[1],
        warnings=screen(table, preparation, parts, group=config.group, time=config.time),
        requested=config,
    )


def _preparation(config: Config, table: Table, task: str, rows: Array | None = None) -> Preparation:
    """Fit the preprocessing to the given rows; None for all."""
    drop = tuple(dict.fromkeys((*config.drop, *(name for name in (config.weight, config.group) if name is not None))))
    return Preparation.fit(
        table,
        config.target,
        task=task,
        drop=drop,
        rows=rows,
        transform="none" if config.transform == "auto" else config.transform,
        order=config.order,
        event=config.event,
    )


def _check_roles(config: Config, names: list[str]) -> None:
    """Raise if a column of weights or of the split does not exist, or is a target too."""
    if config.group is not None and config.time is not None:
        raise InputError("--time", "cannot be given with --group", "Pass the one that new rows will differ by")
    targets = target_names(config.target, names)
    for option, name in (("--weight", config.weight), ("--group", config.group), ("--time", config.time)):
        if name is None:
            continue
        check_column(option, name, names)
        if name in targets:
            raise InputError(option, f"{name!r} is {'the' if len(targets) == 1 else 'a'} target")


def _rows(config: Config, table: Table, known: Preparation, usable: Array) -> Rows:
    """Return the strata, groups and times that splits have to respect."""
    groups = None if config.group is None else group_values(table, config.group, usable)
    times = None if config.time is None else time_values(table, config.time, usable)
    return Rows(len(usable), known.strata(table.take(usable)), groups, times)


def _splits(config: Config, rows: Rows) -> tuple[tuple[Array, Array], ...]:
    """Return the (fitted, predicted) parts that the metrics come from."""
    if config.holdout == 0:
        return ()
    if config.holdout is not None:
        return (requested_split(rows, config.holdout, config.seed),)
    if rows.count > MANY and rows.groups is None:
        return (held_out_split(rows, MANY_HELD_OUT, config.seed),)
    if rows.count < FEW or config.method not in ("auto", *CROSS_VALIDATED):
        return (held_out_split(rows, HELD_OUT, config.seed),)
    return tuple(folds_of(rows, config.seed))


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


def stored_config(prepared: Prepared) -> Config:
    """Return the configuration that the run folder stores: fully explicit, so that the run can be reproduced."""
    size = prepared.problem.n, prepared.problem.layout.dim
    recipe = prepared.recipe
    defaults = to_spec(dataclasses.replace(recipe, method=prepared.method.name, settings={}).fitter(*size))
    return dataclasses.replace(
        prepared.config,
        table=os.fspath(Path(prepared.config.table).resolve()),
        task=prepared.preparation.task,
        method=prepared.method.name,
        hidden=recipe.hidden,
        noise=recipe.noise,
        noise_floor=recipe.noise_floor,
        transform=recipe.transform,
        inputs=recipe.inputs,
        embedding=recipe.embedding,
        tune="none",
        table_sha256=digest(prepared.config.table),
        settings={k: v for k, v in to_spec(prepared.method).items() if k != "kind" and not (v is defaults[k] is None)},
    )


def requested_config(prepared: Prepared) -> dict[str, Any]:
    """Return the configuration before anything was chosen, as JSON, with the checksum of the table."""
    asked = prepared.requested or prepared.config
    path = os.fspath(Path(asked.table).resolve())
    values = dataclasses.asdict(dataclasses.replace(asked, table=path, table_sha256=digest(asked.table)))
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def digest(table: str) -> str:
    """Return the checksum of a file."""
    try:
        return sha256(Path(table))
    except OSError as error:
        raise InputError("table", f"cannot read {table} ({error.strerror})") from None
