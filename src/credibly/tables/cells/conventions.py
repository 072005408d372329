"""How the cells of a file are read, decided on the training table and stored with it for every later file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_KEY = b"credibly.reading"


@dataclass(frozen=True)
class Conventions:
    """How the cells of a file are read.

    Attributes:
        na: markers of missing values beside the usual ones.
        decimals: decimal mark by column, where it differs from that of the rest of the file.
        days_first: by column of dates, whether the day comes before the month.
        remarks: remarks for the user by column.
        notes: remarks for the user on rows, such as a row of totals that was left out.
        skipped: rows of the file that were left out, counted from 0.
    """

    na: tuple[str, ...] = ()
    decimals: Mapping[str, str] = field(default_factory=dict)
    days_first: Mapping[str, bool] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()

    def day_first(self, name: str) -> bool:
        """Return whether the day comes before the month in a column of dates."""
        return self.days_first.get(name, False)

    def remark(self, name: str) -> str:
        """Return the remark on a column; empty if there is none."""
        return self.remarks.get(name, "")

    def file_row(self, row: int) -> int:
        """Return the number that a row of the table has in the file, counted from 1 without the header."""
        skipped = np.asarray(self.skipped, dtype=np.int64)
        # `row` of the kept rows of the file come before the given one.
        return int(row + 1 + np.searchsorted(skipped - np.arange(len(skipped)), row, side="right"))

    def rules(self) -> Conventions:
        """Return the conventions that apply to other files too: without remarks and rows."""
        return Conventions(self.na, self.decimals, self.days_first)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain JSON."""
        plain = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else dict(value) for key, value in plain.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Conventions:
        """Restore a result of `to_dict`."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        return cls(**values)


USUAL = Conventions()


def attach(table: Any, conventions: Conventions) -> Any:
    """Return a table that carries its conventions, also through `take` and `select`."""
    metadata = {**(table.schema.metadata or {}), _KEY: json.dumps(conventions.to_dict()).encode()}
    return table.replace_schema_metadata(metadata)


def conventions_of(table: Any) -> Conventions:
    """Return the conventions that a table was read by; the usual ones if it was not read from a file."""
    stored = (table.schema.metadata or {}).get(_KEY)
    return USUAL if stored is None else Conventions.from_dict(json.loads(stored))
