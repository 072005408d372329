"""Effect curves: the mean prediction over the rows of a table if one of its columns had the same cell everywhere.

Under draw s of the weights the partial dependence on column j is

    f_s(v) = (1/N) sum_i E(y | x_i with cell j set to v, w_s),

and the band is the central 90 % of f_s(v) over the draws: the posterior uncertainty about the averaged function. It
contains neither the noise nor the variation between rows. Cells are set as they are in the table, so everything that is
made from the column changes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from credibly.core.checks import check_integer
from credibly.errors import InputError
from credibly.tables.cells.parsing import is_number, numbers, texts, whole_column
from credibly.tables.importance import spaced

if TYPE_CHECKING:
    from pyarrow import Table

    from credibly.predictive.base import Predictive

Array = npt.NDArray[Any]
Predict = Callable[["Table"], "Predictive"]

ROWS, POINTS, DRAWS = 200, 15, 200
# Most categories on a curve, the most frequent ones first; and most that a column may have to get a curve.
LEVELS, MAX_LEVELS = 8, 100
# Fraction of the cells of a text column that must be numbers for it to count as numeric.
NUMERIC = 0.95
LEVEL = 0.9


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect curve of a column.

    Attributes:
        name: the column.
        at: its values: numbers, (G,), or for categories their names.
        mean, low, high: posterior mean and ends of the 90 % band of the averaged function, (G, outputs): one output for
            a real target, one per class for labels.
        rows: number of rows that were averaged.
    """

    name: str
    at: Array | tuple[str, ...]
    mean: Array
    low: Array
    high: Array
    rows: int

    @property
    def numeric(self) -> bool:
        """Whether the column holds numbers."""
        return not isinstance(self.at, tuple)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain values."""
        at = list(self.at) if isinstance(self.at, tuple) else self.at.tolist()
        return {"at": at} | {key: getattr(self, key).tolist() for key in ("mean", "low", "high")} | {"rows": self.rows}


def effect_curve(
    predict: Predict, table: Table, name: str, *, points: int = POINTS, rows: int = ROWS, draws: int = DRAWS
) -> Effect | None:
    """Return the effect curve of a column; None if it has a single value, or too many that are not numbers.

    Args:
        predict: maps a table to the predictive of its rows, such as `TableModel.predict_table`.
        table: rows to average over, with all columns that `predict` needs.
        name: the column.
        points: the most values of a numeric column, at evenly spaced quantiles.
        rows: the most rows that are averaged, evenly spaced.
        draws: the most draws of the weights, evenly spaced.
    """
    for argument, value in (("points", points), ("rows", rows), ("draws", draws)):
        check_integer(argument, value, least=2)
    if name not in table.column_names:
        raise InputError("name", f"must be a column of the table, got {name!r}")
    cells = _cells(table, name, points)
    if cells is None:
        return None
    import pyarrow as pa

    at, chosen = cells
    some = spaced(table, np.zeros(len(table)), rows)[0]
    column = some.column_names.index(name)
    field = some.schema.field(column)
    copies = [
        some.set_column(column, field, pa.repeat(chosen[i], len(some)).cast(field.type)) for i in range(len(chosen))
    ]
    predictive = predict(pa.concat_tables(copies))
    functions = predictive.functions(draws).cpu().double().numpy()
    # (draws, points, rows, outputs), averaged over rows
    averaged = functions.reshape(len(functions), len(copies), len(some), -1).mean(2)
    if predictive.likelihood.support == "binary":
        averaged = np.concatenate([1 - averaged, averaged], -1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(averaged, (tail, 1 - tail), axis=0)
    return Effect(name, at, averaged.mean(0), low, high, len(some))


def _cells(table: Table, name: str, points: int) -> tuple[Array | tuple[str, ...], Any] | None:
    """Return the values of the axis and the cells behind them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    present = whole_column(table, name).drop_null()
    if pa.types.is_temporal(present.type):
        return None
    if not is_number(present.type):
        present = texts(present).drop_null()
    values = numbers(present)[0].to_numpy(zero_copy_only=False).astype(float)
    finite = np.flatnonzero(np.isfinite(values))
    # A few cells that are not numbers do not make categories of the others.
    if len(finite) and (is_number(present.type) or len(finite) >= NUMERIC * len(present)):
        order = finite[np.argsort(values[finite], kind="stable")]
        # From the 2nd to the 98th hundredth, so that a single far cell does not stretch the axis.
        picks = order[np.linspace(0.02 * (len(order) - 1), 0.98 * (len(order) - 1), points).round().astype(int)]
        at, first = np.unique(values[picks], return_index=True)
        return (at, present.take(pa.array(picks[first]))) if len(at) > 1 else None
    counts = pc.value_counts(present)
    names, times = counts.field("values"), counts.field("counts").to_numpy()
    if not 2 <= len(names) <= MAX_LEVELS:
        return None
    chosen = names.take(pa.array(np.argsort(-times, kind="stable")[:LEVELS]))
    return tuple(chosen.to_pylist()), chosen


def effect_curves(predict: Predict, table: Table, names: Sequence[str], **options: Any) -> tuple[Effect, ...]:
    """Return the effect curves of the columns that have one; the options are those of `effect_curve`."""
    found = (effect_curve(predict, table, name, **options) for name in names)
    return tuple(one for one in found if one is not None)
