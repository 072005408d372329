"""Permutation importance of the columns of a table: how much worse predictions become without a column's information.

For column j and R random permutations of its cells among the rows,

    importance = (1/N) sum_i [ (1/R) sum_r l(y_i | x_i with the cell of row k_r(i)) - l(y_i | x_i) ],

for the loss l = -log p(y | x), or -log P(T > y | x) of a time that is censored at y, and likewise for the error rate. A
row counts twice, by its own loss and by its cell in other rows, so the standard error is std(a_i + b_i) / sqrt(N), with
a_i the increase of its loss and b_i the increase for the rows that received its cell: the first-order term of a
two-sample statistic. Both contain the noise of the permutations divided by R, so it is slightly too large for few of
them. The increase of the RMSE has the error of its linearisation in the two mean squares. All inputs made from a column
(one-hot, missing indicator) move together, because cells are permuted before they are encoded. A column that others
repeat has a low importance, since they stand in for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.checks import check_integer
from credibly.core.rng import check_seed
from credibly.errors import InputError
from credibly.predictive.one_target import one_target

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.predictive.base import Predictive

Array = npt.NDArray[Any]
Predict = Callable[["Table"], "Predictive"]

ROWS, REPEATS = 300, 5
# Most columns that are permuted REPEATS times; of more, those that matter most in a screen with one permutation of a
# few rows.
COLUMNS, SCREEN_ROWS = 30, 100
# Rows predicted at a time: several permutations share the cost of a call.
BLOCK = 20_000
# Log densities below this (a prediction that rules out what was observed) count as this.
LOWEST = -700.0


@dataclass(frozen=True)
class ColumnImportance:
    """The loss from permuting a column.

    Attributes:
        name: the column.
        loss, loss_error: increase of the mean negative log density, in nats per row, and its standard error.
        score, score_error: increase of the RMSE or of the error rate, and its standard error; None for times, which may
            be censored.
    """

    name: str
    loss: float
    loss_error: float
    score: float | None
    score_error: float | None


@dataclass(frozen=True)
class Importance:
    """Permutation importance of the columns of a table.

    Attributes:
        columns: largest increase of the loss first.
        rows, repeats: number of rows and of permutations.
        skipped: columns that a screen found to matter less than all of these.
    """

    columns: tuple[ColumnImportance, ...]
    rows: int
    repeats: int
    skipped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain values, by column."""
        values = {c.name: {k: v for k, v in vars(c).items() if k != "name"} for c in self.columns}
        return {"rows": self.rows, "repeats": self.repeats, "columns": values, "skipped": list(self.skipped)}


def permutation_importance(
    predict: Predict,
    table: Table,
    y: Array,
    columns: Sequence[str],
    *,
    repeats: int = REPEATS,
    rows: int | None = ROWS,
    most: int = COLUMNS,
    seed: int = 0,
) -> Importance:
    """Return the importance of columns on rows with known targets, which the fit should not have seen.

    Args:
        predict: maps a table to the predictive of its rows, such as `TableModel.predict_table`.
        table: the rows, with all columns that `predict` needs.
        y: their targets, (N,): numbers, class indices, or times that are negative if censored.
        columns: names of the columns to permute.
        repeats: number of permutations of each column.
        rows: the most rows that are used, evenly spaced; None for all.
        most: the most columns that are permuted `repeats` times; of more, a screen selects them.
        seed: random seed of the permutations.
    """
    if np.ndim(y) != 1:
        raise InputError("y", f"must have one target per row, got shape {np.shape(y)}", "Use importance_by_target")
    return importance_by_target(predict, table, y, columns, repeats=repeats, rows=rows, most=most, seed=seed)[0]


def importance_by_target(
    predict: Predict,
    table: Table,
    y: Array,
    columns: Sequence[str],
    *,
    repeats: int = REPEATS,
    rows: int | None = ROWS,
    most: int = COLUMNS,
    seed: int = 0,
) -> tuple[Importance, ...]:
    """Return the importance of columns for each of K targets, y of shape (N, K), from the same permutations.

    The arguments are those of `permutation_importance`. A screen of many columns sums their losses over the targets.
    """
    check_integer("repeats", repeats)
    check_integer("most", most)
    check_seed(seed)
    absent = [name for name in columns if name not in table.column_names]
    if absent:
        raise InputError("columns", f"must be columns of the table, got {absent[0]!r}")
    if len(table) != len(y) or len(y) < 2:
        raise InputError("y", f"must have one value for each of at least 2 rows, got {len(y)} for {len(table)} rows")
    if rows is not None:
        check_integer("rows", rows, least=2)
        table, y = spaced(table, y, rows)
    kept, skipped = list(columns), []
    if len(kept) > most:
        some, targets = spaced(table, y, SCREEN_ROWS)
        screened = _measure(predict, some, targets, kept, 1, seed)
        order = sorted(zip(*screened), key=lambda each: -sum(column.loss for column in each))
        skipped = [each[0].name for each in order[most:]]
        kept = [name for name in kept if name not in set(skipped)]
    found = _measure(predict, table, y, kept, repeats, seed)
    ordered = [tuple(sorted(each, key=lambda c: -c.loss)) for each in found]
    return tuple(Importance(each, len(y), repeats, tuple(skipped)) for each in ordered)


def spaced(table: Table, y: Array, most: int) -> tuple[Table, Array]:
    """Return at most `most` evenly spaced rows of a table, and their targets."""
    if len(table) <= most:
        return table, np.asarray(y)
    picks = np.linspace(0, len(table) - 1, most).round().astype(int)
    return table.take(picks), np.asarray(y)[picks]


def _measure(
    predict: Predict, table: Table, y: Array, columns: Sequence[str], repeats: int, seed: int
) -> list[list[ColumnImportance]]:
    """Return the importance of each column, for each target."""
    base, scored = _losses(predict, [table], y)
    base = base[0]
    jobs = [(i, r) for i in range(len(columns)) for r in range(repeats)]
    # Per column the mean loss of each row, and the mean increase for the rows that received its cell.
    own, given = (np.zeros((len(columns), *base.shape)) for _ in range(2))
    size = max(1, BLOCK // len(y))
    for start in range(0, len(jobs), size):
        part = jobs[start : start + size]
        orders = [np.random.default_rng([seed, 0x1A9, i, r]).permutation(len(y)) for i, r in part]
        shuffled = [_permuted(table, columns[i], order) for (i, _), order in zip(part, orders)]
        for (i, _), order, found in zip(part, orders, _losses(predict, shuffled, y)[0]):
            own[i] += found / repeats
            given[i][..., order] += (found - base) / repeats
    regression = y.dtype.kind == "f"
    return [
        [_summary(name, base[k], own[i, k], given[i, k], regression, scored) for i, name in enumerate(columns)]
        for k in range(len(base))
    ]


def _permuted(table: Table, name: str, order: Array) -> Table:
    at = table.column_names.index(name)
    return table.set_column(at, table.schema.field(at), table.column(at).take(order))


def _losses(predict: Predict, tables: Sequence[Table], y: Array) -> tuple[Array, bool]:
    """Return -log p(y) and the squared error, or whether the answer is wrong: (tables, targets, 2, N).

    The second result is False for times, which have no such error.
    """
    import pyarrow as pa

    predictive = predict(pa.concat_tables(tables) if len(tables) > 1 else tables[0])
    observed = torch.from_numpy(np.concatenate([np.asarray(y)] * len(tables)))
    targets = 1 if observed.ndim == 1 else observed.shape[1]
    scored = y.dtype.kind != "f" or predictive.likelihood.support != "time"
    found = []
    for k in range(targets):
        one, target = (predictive, observed) if observed.ndim == 1 else (one_target(predictive, k), observed[:, k])
        loss = -one.log_prob(target).cpu().double().clamp(min=LOWEST).reshape(len(target))
        if not scored:
            score = torch.zeros_like(loss)
        elif y.dtype.kind == "f":
            score = (one.mean.cpu().double().reshape(len(target)) - target).square()
        else:
            score = (one.probabilities.cpu().argmax(-1) != target).double()
        found.append(torch.stack([loss, score]).reshape(2, len(tables), len(y)))
    return np.ascontiguousarray(torch.stack(found).permute(2, 0, 1, 3).numpy()), scored


def _summary(name: str, base: Array, own: Array, given: Array, regression: bool, scored: bool) -> ColumnImportance:
    """Return the importance from (loss, score) per row: as it is, with another cell, increase where its cell went."""
    loss, increase = (float(value) for value in (own - base).mean(1))
    influence = own + given - base
    if not scored:
        return ColumnImportance(name, loss, _error(influence[0]), None, None)
    if regression:
        before, after = (max(math.sqrt(float(part[1].mean())), 1e-300) for part in (base, own))
        increase = after - before
        # sqrt(m) changes by dm / (2 sqrt(m)).
        influence[1] = (own[1] + given[1]) / (2 * after) - base[1] / (2 * before)
    return ColumnImportance(name, loss, _error(influence[0]), increase, _error(influence[1]))


def _error(values: Array) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))
