"""The page: title, lead, sections with text, tables and pictures, as one HTML file without scripts or network access."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from credibly.errors import InputError
from credibly.report.pictures import Picture

Value = str | int | float


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        best: which number is best: the highest, the lowest, or the one nearest to a given number. None marks nothing.
        digits: decimals of its numbers.
        note: a line on what it means, shown below the table.
    """

    title: str
    best: Literal["high", "low"] | float | None = None
    digits: int = 3
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers; the best number of a column is marked, and so are those that print alike."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                found = f"a row has {len(row)} cells for {len(self.columns)} columns"
                raise InputError("rows", found, "Pass one cell for each column")

    def cells(self) -> list[list[tuple[str, bool, bool]]]:
        """Each cell as (text, whether it stands in a column of numbers, whether it is the best)."""
        marked = [self._best(j, column) for j, column in enumerate(self.columns)]
        numbers = [any(not isinstance(row[j], str) for row in self.rows) for j in range(len(self.columns))]
        return [
            [
                (show(value, c.digits), number, show(value, c.digits) in best)
                for value, c, number, best in zip(row, self.columns, numbers, marked)
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
        # Where every row prints the same there is no best one.
        return texts if len({show(v, column.digits) for v in numbers}) > 1 else set()


@dataclass(frozen=True)
class Step:
    """Something to do next: in words, and as a command where there is one."""

    words: str
    command: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, at most one table, and pictures that stand side by side where there is room.

    Attributes:
        findings: sentences that stand out, after the pictures. marks: for each of them "for", "note", "care" or "stop",
            which gives it its sign; empty for plain ones.
        steps: what to do next, after these.
        tone: colours the section as a verdict: "good", "care" or "stop".
        links: pages beside this one, each as (relative address, text).
    """

    heading: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    pictures: tuple[Picture, ...] = ()
    findings: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    tone: Literal["", "good", "care", "stop"] = ""
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Page:
    """Everything on a page. All text is escaped; only the drawings go in as they are."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""


def show(value: Value, digits: int = 3) -> str:
    """A cell's text: numbers with a fixed count of decimals, and no minus before a zero."""
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if math.isfinite(value) and float(text) == 0 else text


def render(page: Page) -> str:
    """The page as HTML text; the same page gives the same text."""
    names = [picture.name for section in page.sections for picture in section.pictures]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            "pictures", f"two are named {twice!r}", "Give each its own name: ids inside them start with it"
        )
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
    """Renders the page into a file, which is whole or as it was before, never half-written."""
    target = Path(path)
    text = render(page)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target
