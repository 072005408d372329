"""Warnings before a fit: target leakage, duplicates across the split, identifiers, entities, time stamps, outliers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from credibly.tables.cells.missing_codes import missing_code
from credibly.tables.cells.parsing import whole_column
from credibly.tables.columns.leaks import leaks
from credibly.tables.columns.screened import Array, ScreenedColumns
from credibly.tables.preparation import Preparation

# Robust standard deviations from the median, on the scale of the values and on that of their logarithms if they are
# positive: 50 alone is common in columns such as incomes.
FAR = 50.0
FAR_IN_LOGS = 10.0
# With more distant values than this, and than this fraction, a column has heavy tails rather than errors.
FEW = 3
FEW_FRACTION = 0.001
# Ratio of equal rows to those expected from independent columns from which they are not an accident.
MORE_THAN_CHANCE = 100
# Fraction of held-out rows with a duplicate in training from which they distort the metrics.
TWINS = 0.01
# Number of rows per value and of distinct values of a column that names entities, such as customers.
ROWS_EACH = (2, 50)
LEAST_VALUES = 10
ENTITY = re.compile(
    r"(^|[_\W])(id|ids|key|nr|customer|client|user|patient|subject|person|people|household|hh|family|firm|company|"
    r"employee|worker|student|school|teacher|store|shop|account|device|sensor|machine|vehicle|animal|plot|site|station|"
    r"player|team|village|commune)($|[_\W])"
)
TIME = re.compile(r"(^|[_\W])(date|time|timestamp|datetime|year|yr|epoch|day|week|month|period|quarter)($|[_\W])")
# Values that often stand for a missing one.
SENTINEL = re.compile(r"^(-1|-?9{2,}|-?8{3,})$")
NAMED = 5


def screen(
    table: Any,
    preparation: Preparation,
    splits: Sequence[tuple[Array, Array]],
    *,
    group: str | None = None,
    time: str | None = None,
) -> tuple[str, ...]:
    """Return warnings about what may make a fit misleading, as sentences without a full stop.

    Args:
        table: result of `read_table`.
        preparation: the preparation fitted to the training rows.
        splits: (fitted, predicted) row indices of every split that metrics come from, at least one.
        group, time: columns that the split already respects.
    """
    rows = np.sort(np.concatenate(splits[0]))
    names = list(preparation.names)
    columns = ScreenedColumns(table, preparation, rows)
    numbered = dict(_row_numbers(columns, names))
    found = [*leaks(columns, names), *numbered.values()]
    # A row number would make every row unique.
    fitted = [np.isin(rows, train) for train, _ in splits]
    found += _twins(columns, [name for name in names if name not in numbered], fitted)
    found += _constants(preparation)
    found += _outliers(columns, names)
    if group is None:
        candidates = [n for n, kind, note in preparation.columns if kind != "dropped" and "constant" not in note]
        found += _entities(columns, [name for name in candidates if name != time])
    if time is None:
        found += _times(columns, names)
    return tuple(found)


def _row_numbers(columns: ScreenedColumns, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield columns that identify the row, each with its warning."""
    for name in names:
        x = columns.numbers(name)
        if x is None or len(x) < LEAST_VALUES or not np.isfinite(x).all():
            continue
        number = np.diff(columns.rows)
        if (np.diff(x) == number).all() or (np.diff(x) == -number).all():
            yield name, f"{name} counts the rows ({x[0]:.0f}, {x[1]:.0f}, {x[2]:.0f}, ...); pass --drop {name}"
        elif columns.distinct(name) == len(x) and (x == np.trunc(x)).all() and ENTITY.search(_plain(name)):
            yield name, f"{name} looks like an identifier: a different integer in every row; pass --drop {name}"


def _twins(columns: ScreenedColumns, names: list[str], fitted: Sequence[Array]) -> Iterator[str]:
    """Yield a warning about rows that occur twice, target included, if that is unlikely by chance.

    `fitted` marks, for every split, the rows of the fit that predicts the others.
    """
    rng = np.random.default_rng(0)
    key = np.zeros(len(columns.rows), dtype=np.uint64)
    # Fraction of pairs of rows that would be equal if the columns were independent.
    every = max(1.0, len(key) * (len(key) - 1.0))
    chance = 1.0
    for name in [*names, *columns.targets]:
        codes = columns.codes(name)
        count = np.bincount(codes)
        chance *= float((count * (count - 1.0)).sum()) / every
        # A random number per value; the sum over the columns identifies the row.
        key += rng.integers(0, 2**64, len(count), dtype=np.uint64)[codes]
    _, first, which, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    repeated = len(key) - len(count)
    pairs = float((count * (count - 1.0)).sum()) / 2
    if not repeated or pairs < MORE_THAN_CHANCE * chance * every / 2:
        return
    a = int(np.flatnonzero(which == int(np.argmax(count > 1)))[1])
    both = held_out = 0
    for training in fitted:
        seen = np.zeros(len(count), dtype=bool)
        seen[which[training]] = True
        both, held_out = both + int(seen[which[~training]].sum()), held_out + int((~training).sum())
    kind, among = ("cross-validated", "the rows of their fit") if len(fitted) > 1 else ("held-out", "the training rows")
    split = f"; {both:,} of {held_out:,} {kind} rows have a duplicate among {among}" if both else ""
    split += ", which makes the metrics look too good" if both > TWINS * held_out else ""
    yield (
        f"{_rows(repeated)} {'repeats' if repeated == 1 else 'repeat'} an earlier one, target included (row"
        f" {columns.file_row(a)} = row {columns.file_row(int(first[which[a]]))}){split}; remove repeated rows unless"
        " they are separate observations"
    )


def _constants(preparation: Preparation) -> Iterator[str]:
    constant = [name for name, kind, note in preparation.columns if kind == "left out" and note.startswith("constant")]
    if constant:
        verb = "has the same value" if len(constant) == 1 else "have the same value"
        yield f"{_listed(constant)} {verb} in every training row and {'is' if len(constant) == 1 else 'are'} left out"


def _outliers(columns: ScreenedColumns, names: list[str]) -> Iterator[str]:
    targets = columns.targets if columns.preparation.classes is None else ()
    for name in [*names, *targets]:
        x = columns.numbers(name)
        if x is None:
            continue
        known = missing_code(x)
        far = _far_rows(x) if known is None else np.flatnonzero(x == known)
        if not len(far):
            continue
        values = np.unique(x[far])
        if len(values) == 1 and SENTINEL.match(f"{values[0]:.0f}") and values[0] == np.trunc(values[0]):
            code = f"{values[0]:.0f}"
            where = f"{name} is {code} in {_rows(len(far))}, far from all other values"
            yield f"{where}; if it means missing, pass --na {code}"
            continue
        far = _far_rows(x, tails=True)
        if 0 < len(far) <= max(FEW, FEW_FRACTION * len(x)):
            worst = int(far[np.argmax(np.abs(x[far] - np.nanmedian(x)))])
            others = f" (and {len(far) - 1:,} more)" if len(far) > 1 else ""
            yield (
                f"{name} is {x[worst]:.6g} in row {columns.file_row(worst)}{others}, where the median is"
                f" {np.nanmedian(x):.6g}; check it"
            )


def _far_rows(x: Array, tails: bool = False) -> Array:
    """Return the positions of values that are absurdly far from the others, optionally measured by their tails too."""
    present = np.flatnonzero(np.isfinite(x))
    values = x[present]
    if len(values) < LEAST_VALUES:
        return present[:0]
    with np.errstate(over="ignore"):
        far = _robust_distance(values, tails) > FAR
        if far.any() and (values[~far] > 0).all():
            # Incomes and populations: distant values are ordinary unless they are distant in orders of magnitude.
            positive = values > 0
            distance = np.full(len(values), np.inf)
            distance[positive] = _robust_distance(np.log(values[positive]), tails)
            far &= distance > FAR_IN_LOGS
    return present[far]


def _robust_distance(values: Array, tails: bool) -> Array:
    """Return distances from the median in robust standard deviations; zeros if most values are the same.

    With `tails`, the central nine tenths of the values count as well as the central half: if most values are the same,
    or nearly so, the others are not errors.
    """
    least, low, middle, high, most = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
    scale = max(1.4826 * float(np.median(np.abs(values - middle))), float(high - low) / 1.349)
    if tails:
        scale = max(scale, float(most - least) / 3.29)
    found: Array = np.abs(values - middle) / scale if scale > 0 and np.isfinite(scale) else np.zeros(len(values))
    return found


def _entities(columns: ScreenedColumns, candidates: list[str]) -> Iterator[str]:
    """Yield warnings about columns that name what several rows belong to, such as a customer."""
    for name in candidates:
        x = columns.numbers(name)
        cells = whole_column(columns.table, name)
        if x is None and pa.types.is_temporal(cells.type):
            continue
        if x is not None and (not np.isfinite(x).all() or (x != np.trunc(x)).any()):
            continue
        count, rows = columns.distinct(name), len(columns.rows)
        each = rows / max(1, count)
        if count < LEAST_VALUES or not ROWS_EACH[0] <= each <= ROWS_EACH[1] or TIME.search(_plain(name)):
            continue
        if ENTITY.search(_plain(name)) or _behaves_like_entity(columns, name, candidates, text=x is None):
            yield (
                f"{name} looks like an entity, with {each:.3g} rows for each of its {count:,} values, which the split"
                f" divides between training and held-out rows; pass --group {name} if new ones are to be predicted"
            )


def _behaves_like_entity(columns: ScreenedColumns, name: str, others: list[str], text: bool) -> bool:
    """Return whether rows with the same value are consecutive and share other columns, as in panel data."""
    codes, count = columns.codes(name), columns.distinct(name)
    runs = 1 + int((np.diff(codes) != 0).sum())
    sizes = np.bincount(codes)
    balanced = float((sizes == np.bincount(sizes).argmax()).mean()) > 0.9
    if runs > 1.1 * count or not (text or balanced):
        return False
    # Another column that varies, but not within these groups.
    for other in others:
        if other != name and 1 < columns.distinct(other) < count:
            pairs = len(np.unique(codes * columns.distinct(other) + columns.codes(other)))
            if pairs <= 1.05 * count:
                return True
    return balanced and text


def _times(columns: ScreenedColumns, names: list[str]) -> Iterator[str]:
    kinds = {name: kind for name, kind, _ in columns.preparation.columns}
    found = [name for name in names if kinds[name] == "date" and columns.distinct(name) >= LEAST_VALUES]
    for name in names:
        x = columns.numbers(name)
        if x is not None and _is_year(name, x):
            found.append(name)
    if found:
        which = found[0]
        looks = "looks like a time stamp" if len(found) == 1 else "look like time stamps"
        yield (
            f"{_listed(found)} {looks}, and the held-out rows are drawn from all times; pass --time {which} if later"
            " rows are to be predicted"
        )


def _is_year(name: str, x: Array) -> bool:
    """Return whether a numeric column holds calendar years, or seconds since 1970, by its name and its values."""
    known = x[np.isfinite(x)]
    if not len(known) or not TIME.search(_plain(name)) or (known != np.trunc(known)).any():
        return False
    years = known.min() >= 1800 and known.max() <= 2200
    epoch = known.min() >= 1e8 and known.max() <= 1e13
    return bool((years or epoch) and len(np.unique(known)) >= 3)


def _plain(name: str) -> str:
    """Return a column name in lower case, with the words of customerId apart."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _listed(names: list[str]) -> str:
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED:,} more columns"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
