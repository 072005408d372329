"""A report page: sections of text, tables and pictures in one HTML file without scripts or network access."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from credibly.core.files import write_atomic
from credibly.errors import InputError
from credibly.report.pictures import Picture

Value = str | int | float


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: heading.
        best: which value is best: the highest, the lowest, or the one nearest to a number. None highlights nothing.
        digits: number of decimals.
        note: one-line explanation, shown below the table.
    """

    title: str
    best: Literal["high", "low"] | float | None = None
    digits: int = 3
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers; the best value of a column is highlighted, and so are values that print the same."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                found = f"got {len(row)} cells for {len(self.columns)} columns"
                raise InputError("rows", f"must have one cell per column, {found}")

    def cells(self) -> list[list[tuple[str, bool, bool]]]:
        """Return each cell as (text, whether its column is numeric, whether it is the best)."""
        best_texts = [self._best(j, column) for j, column in enumerate(self.columns)]
        numbers = [any(not isinstance(row[j], str) for row in self.rows) for j in range(len(self.columns))]
        return [
            [
                (show(value, c.digits), number, show(value, c.digits) in best)
                for value, c, number, best in zip(row, self.columns, numbers, best_texts)
            ]
            for row in self.rows
        ]

    def _best(self, j: int, column: Column) -> set[str]:
        numbers = [v for row in self.rows if not isinstance(v := row[j], str) and math.isfinite(v)]
        if column.best is None or len(numbers) < 2:
            return set()
        target = {"high": math.inf, "low": -math.inf}.get(str(column.best), column.best)
        distance = {
            v: -v if target == math.inf else v if target == -math.inf else abs(v - float(target)) for v in numbers
        }
        least = min(distance.values())
        texts = {show(v, column.digits) for v in numbers if distance[v] == least}
        # If every row prints the same, none is the best.
        return texts if len({show(v, column.digits) for v in numbers}) > 1 else set()


@dataclass(frozen=True)
class Recommendation:
    """Advice on what to do next: a sentence, and a shell command if there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, at most one table, and pictures laid out side by side.

    Attributes:
        findings: highlighted sentences, after the pictures.
        marks: bullet of each finding: "pass", "note", "warn" or "fail". Empty for plain bullets.
        recommendations: what to do next, after the findings.
        tone: colours the section as a verdict: "pass", "warn" or "fail".
        links: other pages, each as (relative address, text).
    """

    heading: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    pictures: tuple[Picture, ...] = ()
    findings: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    recommendations: tuple[Recommendation, ...] = ()
    tone: Literal["", "pass", "warn", "fail"] = ""
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Page:
    """A page. All text is escaped; only the SVG of pictures is inserted as is."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""


def show(value: Value, digits: int = 3) -> str:
    """Format a cell: floats with a fixed number of decimals and without a minus sign before zero."""
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if math.isfinite(value) and float(text) == 0 else text


def joined(names: Sequence[str]) -> str:
    """Join names as "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def render(page: Page) -> str:
    """Return the page as HTML. The output is deterministic."""
    names = [picture.name for section in page.sections for picture in section.pictures]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError("pictures", f"must have unique names, got two named {twice!r}")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("credibly", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(page=page) + "\n"


def write(page: Page, path: str | os.PathLike[str]) -> Path:
    """Render the page into a file, atomically."""
    target = Path(path)
    write_atomic(target, render(page))
    return target
