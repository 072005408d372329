"""The columns of a run as a client needs them: for the form, the schema, and what is unusual about a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from credibly.core.levels import LEVELS
from credibly.tables.cells.date_formats import DAY, dates
from credibly.tables.cells.parsing import finite, numbers, texts, whole_column
from credibly.tables.columns.encoders import Categorical, Column, Numeric
from credibly.tables.prediction_columns import prediction_names

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

    from credibly.web.serve.runs import ServedRun

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
# Most levels of a category that a form offers.
OFFERED = 100
# A value is unusual if at most this fraction of the training rows is as extreme, or in the same category.
RARE = 0.01


def describe_columns(run: ServedRun) -> list[dict[str, Any]]:
    """Return name, kind and distribution of every input column, from the training rows that the run keeps."""
    return [_describe(column, run.sample) for column in run.model.preparation.used]


def _describe(column: Column, sample: Table) -> dict[str, Any]:
    found: dict[str, Any] = {"name": column.name, "kind": column.kind, "note": column.note}
    values = _values(column, sample)
    if isinstance(column, Categorical):
        counts = pc.value_counts(values.drop_null()).to_pylist()
        share = {one["values"]: one["counts"] / max(1, len(values)) for one in counts}
        levels = sorted([*column.levels, *column.rare], key=lambda level: -share.get(level, 0.0))
        found["levels"] = [{"value": level, "fraction": share.get(level, 0.0)} for level in levels[:OFFERED]]
        found["example"] = levels[0] if levels else None
        found["missing"] = column.missing
        return found
    known = values[np.isfinite(values)]
    ends = np.quantile(known, QUANTILES).tolist() if len(known) else []
    found["quantiles"] = {f"{q:g}": _plain(column, end) for q, end in zip(QUANTILES, ends)}
    found["low"], found["high"] = _plain(column, _low(column)), _plain(column, _high(column))
    found["example"] = _plain(column, float(np.sort(known)[len(known) // 2])) if len(known) else found["low"]
    found["missing"] = column.indicator
    found["integers"] = bool(len(known) and isinstance(column, Numeric) and (known == np.round(known)).all())
    return found


def unusual_inputs(run: ServedRun, block: RecordBatch) -> list[dict[str, Any]]:
    """Return how the first row of a block compares with the training rows, for every column."""
    return [_compare(column, run.sample, block) for column in run.model.preparation.used]


def _compare(column: Column, sample: Table, block: RecordBatch) -> dict[str, Any]:
    found: dict[str, Any] = {"name": column.name, "kind": column.kind, "unusual": False, "why": ""}
    training, own = _values(column, sample), _values(column, block)
    if isinstance(column, Categorical):
        value = own[0].as_py()
        fraction = (pc.sum(pc.equal(training, value)).as_py() or 0) / len(training) if value is not None else None
        found |= {"value": value, "fraction": fraction}
        if value is None:
            found |= {"unusual": not column.missing, "why": "missing"}
        elif value not in (*column.levels, *column.rare):
            found |= {"unusual": True, "why": "not among the training rows"}
        elif fraction is not None and fraction <= RARE:
            found |= {"unusual": True, "why": f"rare: {100 * fraction:.2g} % of the training rows"}
        return found
    value = float(own[0])
    if not np.isfinite(value):
        return found | {"value": None, "position": None, "unusual": not column.indicator, "why": "missing"}
    known = training[np.isfinite(training)]
    below, above = float((known < value).mean()), float((known > value).mean())
    found |= {"value": _plain(column, value), "position": 0.5 * (1 + below - above)}
    if value < _low(column) or value > _high(column):
        side = "below" if value < _low(column) else "above"
        found |= {"unusual": True, "why": f"{side} all training rows"}
    elif min(1 - below, 1 - above) <= RARE:
        side = "lower" if above > below else "higher"
        found |= {"unusual": True, "why": f"{side} than {100 * max(below, above):.3g} % of the training rows"}
    return found


def _values(column: Column, table: Table | RecordBatch) -> Any:
    """Return the cells of a column: text, or numbers with NaN for missing ones (dates in microseconds since 1970)."""
    cells = whole_column(table, column.name)
    if cells is None:
        cells = pa.nulls(table.num_rows, pa.string())
    if isinstance(column, Categorical):
        return texts(cells)
    if isinstance(column, Numeric):
        return np.asarray(finite(numbers(cells)[0])[0].to_numpy(zero_copy_only=False), dtype=np.float64)
    moments = dates(cells, column.day_first)[0]
    return np.where(np.isnat(moments), np.nan, moments.astype(np.int64).astype(np.float64))


def _low(column: Numeric | Any) -> float:
    return float(column.low) if isinstance(column, Numeric) else float(column.first + column.low * DAY)


def _high(column: Numeric | Any) -> float:
    return float(column.high) if isinstance(column, Numeric) else float(column.first + column.high * DAY)


def _plain(column: Column, value: float) -> Any:
    """Return a value as JSON has it: a number, or the text of a date."""
    if isinstance(column, Numeric):
        return value
    text = str(np.datetime64(round(value), "us").astype("datetime64[s]"))
    return text.removesuffix("T00:00:00").replace("T", " ")


def answer_columns(run: ServedRun) -> list[str]:
    """Return the names of the columns of an answer at the default level."""
    names = prediction_names(run.model.preparation, LEVELS)
    if run.model.calibration is None:
        names = [n for n in names if not n.startswith(("bayes_", "joint_", "set_", "at_least_"))]
    return names
