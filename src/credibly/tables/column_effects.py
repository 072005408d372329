"""Importance and effect curves of the columns of a finished run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from credibly.core.stages import stage
from credibly.tables.effects import Effect, effect_curves
from credibly.tables.folds import predict_unseen
from credibly.tables.importance import Array, Importance, importance_by_target
from credibly.tables.run import TableRun

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.predictive.base import Predictive

# Most draws of the weights, fewest rows, and most effect curves.
DRAWS, LEAST_ROWS, CURVES = 200, 10, 6
# Column that carries the fold of each row along with its cells.
FOLD = "__fold of the row"


def column_effects(run: TableRun, rows: Table, y: Array) -> tuple[tuple[Importance, ...], tuple[Effect, ...]]:
    """Return the importance of the columns on the evaluated rows, and effect curves of the most important ones.

    Importance uses the fits that have not seen the rows, effect curves the final fit. Several targets have an
    importance each, and effect curves with an output each, of the columns that matter most to any of them.
    """
    model = run.model
    if len(rows) < LEAST_ROWS:
        return (), ()
    stage("columns")
    folds = run.facts.get("fold_of_row") if model.folds else None

    def unseen(table: Table) -> Predictive:
        inputs = model.inputs(table)[0]
        return predict_unseen(model, inputs, table[FOLD].to_numpy()) if model.folds else model.predict(inputs)

    def final(table: Table) -> Predictive:
        return model.predict(model.inputs(table)[0], draws=DRAWS)

    marked = rows.append_column(FOLD, pa.array(np.asarray(folds or [0] * len(rows))))
    names = [name for name in model.preparation.names if name in rows.column_names]
    importance = importance_by_target(unseen, marked, y, names, seed=run.config.seed)
    every = [{column.name: column.loss for column in one.columns} for one in importance]
    largest = {name: max(each[name] for each in every) for name in every[0]}
    shown = sorted((name for name, loss in largest.items() if loss > 0), key=lambda name: -largest[name])[:CURVES]
    return importance, effect_curves(final, rows, shown)


def effects_of_target(effects: Sequence[Effect], target: int) -> tuple[Effect, ...]:
    """Return the effect curves of one of several targets."""
    own = slice(target, target + 1)
    parts = ({name: getattr(one, name)[:, own] for name in ("mean", "low", "high")} for one in effects)
    return tuple(dataclasses.replace(one, **part) for one, part in zip(effects, parts))


def guarantee_of(stored: dict[str, Any] | None, rows: int) -> dict[str, Any] | None:
    """Return the coverage guarantee in the form the report shows; None without a measured coverage."""
    if not stored or "level" not in stored or stored.get("measured") is None:
        return None
    return {"level": stored["level"], "measured": stored["measured"], "rows": stored.get("rows", rows)} | stored
