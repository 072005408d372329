"""The types of a file's text columns (numbers, dates or words), decided over all rows, and which rows are totals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from credibly.tables.cells import number_formats
from credibly.tables.cells.conventions import USUAL, Conventions, attach
from credibly.tables.cells.date_formats import DATE, dates, day_first, looks_like_dates
from credibly.tables.cells.parsing import is_number, is_placeholder, numbers, parse_text, shown, texts, whole_column

# A column is numeric if all cells but these few, and but this fraction of them, are numbers.
STRAYS = 3
STRAY_FRACTION = 0.01
# Distinct numbers from which a column of fewer cells may have one stray cell too. With fewer, the digits and the one
# word may all be categories, such as 1, 2, 3 and "more".
DISTINCT = 10
# Labels of a row that summarises others, and the number of rows from which a table is searched for one.
TOTAL = r"(?i)^(grand |sub-?|overall )?(total|sum|average|mean|median|summe|gesamt)s?\s*:?$"
LEAST_ROWS = 10


def interpreted(
    table: Any, text: Collection[str] = (), known: Conventions = USUAL, decimal: str = ".", typed: bool = False
) -> Any:
    """Return a table with float64 for numbers, timestamps for dates and stripped text for everything else.

    The table carries the conventions that it was read by, see `conventions_of`.

    Args:
        table: columns of text, or of any type.
        text: columns that are text whatever they hold.
        known: conventions that are already decided.
        decimal: decimal mark of the file.
        typed: whether the file has types: then text of digits alone, such as the code 007, stays text.
    """
    learned = _Learned(known, decimal, typed)
    cells = {name: whole_column(table, name) for name in table.column_names}
    ready = {
        name: made for name, column in cells.items() if (made := learned.plain(name, column, name in text)) is not None
    }
    words = {name: texts(column, known.na) for name, column in cells.items() if name not in ready}
    totals = _total_rows(words, table.num_rows, text)
    if totals:
        kept = np.ones(table.num_rows, dtype=bool)
        kept[list(totals)] = False
        ready, words = ({n: c.filter(pa.array(kept)) for n, c in part.items()} for part in (ready, words))
        learned.skipped = sorted(totals)
        learned.notes += [f"row {row + 1} left out: {totals[row]} looks like a total" for row in learned.skipped]
    for name, column in words.items():
        ready[name] = column if name in text else learned.from_text(name, column)
    return attach(pa.table({name: ready[name] for name in table.column_names}), learned.conventions())


@dataclass
class _Learned:
    """The conventions of a table, as they are learned column by column."""

    known: Conventions
    decimal: str
    typed: bool
    decimals: dict[str, str] = field(default_factory=dict)
    days_first: dict[str, bool] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def conventions(self) -> Conventions:
        decimals, days_first = {**self.known.decimals, **self.decimals}, {**self.known.days_first, **self.days_first}
        return Conventions(self.known.na, decimals, days_first, self.remarks, tuple(self.notes), tuple(self.skipped))

    def plain(self, name: str, column: Any, text: bool) -> Any:
        """Return a column that needs no interpretation: typed, or text in which every cell is a plain number."""
        kind = column.type
        words = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        if not words and not text and is_number(kind):
            return numbers(column, na=self.known.na)[0]
        if pa.types.is_temporal(kind) and not text:
            return column
        if not words or text or self.typed or name in self.known.decimals:
            return None
        # A point in a file with decimal commas may separate thousands.
        if self.decimal != "." and pc.any(pc.match_substring(column, ".")).as_py():
            return None
        try:
            marked = column if self.decimal == "." else pc.replace_substring(column, self.decimal, ".")
            return numbers(marked.cast(pa.float64()), na=self.known.na)[0]
        except pa.ArrowInvalid:
            return None

    def from_text(self, name: str, column: Any) -> Any:
        """Return a column of stripped text as numbers, timestamps or text."""
        found = self._as_numbers(name, column) if name not in self.known.days_first else None
        if found is None:
            found = self._as_dates(name, column)
        return column if found is None else found

    def _as_numbers(self, name: str, column: Any) -> Any:
        present = column.drop_null()
        present = present.filter(pc.invert(is_placeholder(present)))
        # Most text columns end here: their cells have no digits and are not infinite.
        digits = pc.sum(pc.match_substring_regex(present, r"\d|(?i:inf)")).as_py() or 0
        # A column that was numeric in the training table stays so, however many cells of this one are not numbers.
        decided = name in self.known.decimals
        allowed = min(STRAYS, max(1, int(STRAY_FRACTION * len(present))))
        if len(present) - digits > allowed and not decided:
            return None
        mark = self.known.decimals.get(name) or number_formats.decimal_mark(present, self.decimal)
        good = present.filter(pa.array(number_formats.fits(present, mark)))
        strays = len(present) - len(good)
        if not decided and (not len(good) or strays > allowed):
            return None
        if not decided and strays > STRAY_FRACTION * len(present) and len(good.unique()) < DISTINCT:
            return None
        remark = number_formats.describe_format(present, mark)
        if self.typed and not decided and pc.all(pc.match_substring_regex(good, r"^\d+$")).as_py():
            return None
        if mark != self.decimal:
            self.decimals[name] = mark
            remark = remark or f"read with {'decimal commas' if mark == ',' else 'decimal points'}"
        if remark:
            self.remarks[name] = remark
        values, wrong = parse_text(column, mark, self.known.na)
        for row, cell in wrong:
            self.notes.append(f"row {self._file_row(row)}: {name} = {shown(cell)} is not a number; treated as missing")
        return numbers(values, na=self.known.na)[0]

    def _as_dates(self, name: str, column: Any) -> Any:
        if name not in self.known.days_first and not looks_like_dates(column):
            return None
        order, remark = day_first(column)
        self.days_first[name] = order = self.known.days_first.get(name, order)
        values, wrong = dates(column, order)
        if remark and name not in self.known.days_first:
            self.remarks[name] = remark
        if wrong:
            row, note = wrong[0]
            more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
            self.notes.append(f"row {self._file_row(row)}: {name} = {note}{more}; treated as missing")
        return pa.array(values, pa.timestamp("us"))

    def _file_row(self, row: int) -> int:
        return Conventions(skipped=tuple(self.skipped)).file_row(row)


def _total_rows(words: dict[str, Any], rows: int, text: Collection[str]) -> dict[int, str]:
    """Return the rows that summarise others, with the label and its column.

    The first word in such a row is "Total" or the like. That alone could be a category: the row must also be the last,
    or the word stand among numbers or dates. In the columns `text` it is a category anyway.
    """
    found: dict[int, str] = {}
    if rows < LEAST_ROWS:
        return found
    labels = {
        n: np.flatnonzero(_mask(pc.match_substring_regex(column, TOTAL)))
        for n, column in words.items()
        if n not in text
    }
    if not any(0 < len(at) <= STRAYS for at in labels.values()):
        return found
    earlier = np.zeros(rows, dtype=bool)
    for name, column in words.items():
        present, digits, at = np.asarray(column.is_valid()), number_formats.fits(column, "."), labels.get(name, ())
        if 0 < len(at) <= STRAYS:
            dated = _mask(pc.match_substring_regex(column, DATE))
            among_numbers = max(digits.sum(), dated.sum()) >= 0.9 * max(1, present.sum() - len(at))
            for row in at[~earlier[at]]:
                if among_numbers or row == rows - 1:
                    found[int(row)] = f"{shown(column[int(row)].as_py())} in {name}"
        earlier |= present & ~digits
    return found


def _mask(found: Any) -> Any:
    return np.asarray(pc.fill_null(found, False))
