"""What a study is: a question, a run that answers it with numbers, and whether a published finding held, with its uncertainty.

A study module holds one `Study` value; `STUDIES` in this package's `__init__` lists them by name, and that is all that the
command line knows. What a run gives is plain values and pictures, from which its page and files are written.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from credibly import __version__
from credibly.errors import InputError
from credibly.report.page import Page, Section, Table, show, write
from credibly.report.pictures import Picture

Progress = Callable[[str, int, int], None]  # what comes next, parts done, parts in all


@dataclass(frozen=True)
class Options:
    """What a study is run with.

    Attributes:
        root: the folder with the data; None for a study that makes its own.
        seed: of everything.
        quick: a small size, for a first look and for tests: the answer is not to be relied on.
        device: "cpu" or "cuda".
        progress: called before each part.
        extra: options of the study's own, as text by name.
    """

    root: Path | None = None
    seed: int = 0
    quick: bool = False
    device: str = "cpu"
    progress: Progress | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def tell(self, what: str, done: int, total: int) -> None:
        """Reports progress where somebody listens."""
        if self.progress is not None:
            self.progress(what, done, total)

    def file(self, name: str) -> Path:
        """A data file under the root; one that is missing is refused with what was looked for."""
        if self.root is None:
            raise InputError("--root", "none was given", f"Name the folder that holds {name}")
        path = self.root / name
        if not path.is_file():
            raise InputError("--root", f"{self.root} has no {name}", "Name the folder that holds the data files")
        return path


@dataclass(frozen=True, eq=False)
class Result:
    """What a study found.

    Attributes:
        sentences: the answer in words, each from the numbers and with their uncertainty; the first says whether it held.
        held: whether the finding held at this size; None where the numbers cannot tell.
        table: the numbers. pictures: at least one.
        numbers: the same as plain values, for results.json.
        notes: how it was run: sizes, settings, where this falls short of the published experiment.
    """

    sentences: tuple[str, ...]
    held: bool | None
    table: Table
    pictures: tuple[Picture, ...]
    numbers: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A question and the run that answers it.

    Attributes:
        name: as the command line has it. title: for the page.
        finding: the published finding in a sentence or two, with its source.
        files: that it needs under the root.
        run: the work.
    """

    name: str
    title: str
    finding: str
    run: Callable[[Options], Result]
    files: tuple[str, ...] = ()


def page_of(study: Study, result: Result, options: Options, seconds: float) -> Page:
    """The page of a study."""
    verdict = {
        True: "The finding held here.",
        False: "The finding did not hold here.",
        None: "The numbers cannot tell.",
    }
    sections = (
        Section("What was found", (verdict[result.held],), result.table, result.pictures, result.sentences),
        Section("How it was run", result.notes) if result.notes else None,
    )
    return Page(
        study.title, study.finding, tuple(s for s in sections if s is not None), footer_of(study, options, seconds)
    )


def footer_of(study: Study, options: Options, seconds: float) -> str:
    """The command that makes the same again, the versions, and the time it took."""
    words = [
        f"credibly study {study.name}",
        *(["--root DIR"] if study.files or options.root is not None else []),
        f"--seed {options.seed}",
    ]
    words += (["--quick"] if options.quick else []) + [f"--set {k}={v}" for k, v in options.extra.items()]
    words += [f"--device {options.device}"] if options.device != "cpu" else []
    versions = f"credibly {__version__}, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
    return f"Made by: {' '.join(words)} ({versions}; {seconds:,.0f} s)."


def markdown_of(study: Study, result: Result, options: Options, seconds: float) -> str:
    """The same as Markdown, with the pictures beside it as files."""
    lines = [f"# {study.title}", "", study.finding, "", *(f"- {said}" for said in result.sentences), ""]
    lines += [markdown_table(result.table), ""]
    for picture in result.pictures:
        lines += [f"![{picture.alt}]({picture.name}.svg)", "", *([picture.caption, ""] if picture.caption else [])]
    lines += [*(f"{note}\n" for note in result.notes), footer_of(study, options, seconds)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> str:
    """A table as Markdown; the best number of a column is bold."""
    cells = table.cells()
    head = [column.title for column in table.columns]
    rule = [":--" if not cells or not cells[0][j][1] else "--:" for j in range(len(head))]
    body = [[f"**{text}**" if best else text for text, _, best in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])


def write_result(study: Study, result: Result, options: Options, seconds: float, folder: Path) -> Path:
    """index.html, README.md, results.json and the pictures in a folder that is there; the path of the page."""
    for picture in result.pictures:
        (folder / f"{picture.name}.svg").write_text(standalone(picture), encoding="utf-8")
    (folder / "README.md").write_text(markdown_of(study, result, options, seconds), encoding="utf-8")
    told = {
        "study": study.name,
        "seed": options.seed,
        "quick": options.quick,
        "held": result.held,
        "sentences": list(result.sentences),
        "seconds": round(seconds, 1),
        "numbers": finite(result.numbers),
    }
    (folder / "results.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return write(page_of(study, result, options, seconds), folder / "index.html")


def standalone(picture: Picture) -> str:
    """An inline picture as a file of its own, on a white ground."""
    opening, rest = picture.svg.split(">", 1)
    head = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" color="#1f2328" style="background:#fff"', 1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>{rest}\n'


def finite(value: Any) -> Any:
    """Plain JSON values; a number that is not finite is None."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else finite(float(value))


def mean_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error over repeats."""
    n = len(values)
    mean = sum(values) / n
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


def plus_minus(mean: float, error: float, digits: int = 3) -> str:
    """A mean with its standard error, as text."""
    return f"{show(mean, digits)} ± {show(error, digits)}" if math.isfinite(error) else show(mean, digits)
