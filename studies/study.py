"""A study: a question, a run that answers it with numbers, and whether a published finding was reproduced.

Each study module has a dict `STUDIES` of `Study` values by name; `MODULES` in this package's `__init__` maps every name
to its module, and that is all the command line needs. A run returns plain values and pictures; its page and files are
written from them.
"""

from __future__ import annotations

import json
import math
import os
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

Progress = Callable[[str, int, int], None]  # (next part, parts done, parts in total)


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        root: the folder with the data; None for a study that generates its own.
        seed: the source of all randomness.
        quick: run a small size, for a first look and for tests; the conclusions are not reliable.
        device: "cpu" or "cuda".
        progress: called before each part.
        extra: options specific to the study (`--set NAME=VALUE`), by name.
        budget: seconds that a study with a time budget may take; None for its usual size.
        state: the file that such a study continues from; None for none.
        show: called with lines of interim results.
    """

    root: Path | None = None
    seed: int = 0
    quick: bool = False
    device: str = "cpu"
    progress: Progress | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    budget: float | None = None
    state: Path | None = None
    show: Callable[[str], None] | None = None

    def report(self, what: str, done: int, total: int) -> None:
        """Report progress if there is a callback."""
        if self.progress is not None:
            self.progress(what, done, total)

    def file(self, name: str) -> Path:
        """Return the path of a data file under the root. Raise if it is missing."""
        if self.root is None:
            raise InputError("--root", f"must be the folder that contains {name}, got none")
        path = self.root / name
        if not path.is_file():
            raise InputError("--root", f"{self.root} has no {name}", "Pass the folder that contains the data files")
        return path


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of a study.

    Attributes:
        sentences: the conclusions, computed from the numbers and stated with their uncertainty; the first is the
            verdict.
        reproduced: whether the finding was reproduced at this size; None if inconclusive. Stored as "held" in
            results.json.
        table: the numbers.
        pictures: at least one.
        numbers: the same as plain values, for results.json.
        notes: sizes, settings, and where this falls short of the published experiment.
    """

    sentences: tuple[str, ...]
    reproduced: bool | None
    table: Table
    pictures: tuple[Picture, ...]
    numbers: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A question and the run that answers it.

    Attributes:
        name: the name on the command line.
        title: the title of the page.
        finding: the published finding in a sentence or two, with its source.
        run: the function that does the work.
        files: the data files it needs under the root.
        budgeted: whether it can run to a time budget.
    """

    name: str
    title: str
    finding: str
    run: Callable[[Options], Result]
    files: tuple[str, ...] = ()
    budgeted: bool = False


def page_of(study: Study, result: Result, options: Options, seconds: float) -> Page:
    """Return the HTML page of a study."""
    verdict = {
        True: "The finding was reproduced.",
        False: "The finding was not reproduced.",
        None: "The result is inconclusive.",
    }
    sections = (
        Section("Results", (verdict[result.reproduced],), result.table, result.pictures, result.sentences),
        Section("Setup", result.notes) if result.notes else None,
    )
    return Page(
        study.title, study.finding, tuple(s for s in sections if s is not None), footer_of(study, options, seconds)
    )


def footer_of(study: Study, options: Options, seconds: float) -> str:
    """Return the command that reproduces the page, the versions and the run time."""
    words = [
        f"credibly study {study.name}",
        *(["--root DIR"] if study.files or options.root is not None else []),
        f"--seed {options.seed}",
    ]
    words += (["--quick"] if options.quick else []) + [f"--set {k}={v}" for k, v in options.extra.items()]
    words += [f"--device {options.device}"] if options.device != "cpu" else []
    words += [f"--budget {options.budget:g}"] if options.budget is not None else []
    versions = f"credibly {__version__}, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
    return f"Generated by: {' '.join(words)} ({versions}; {seconds:,.0f} s)."


def markdown_of(study: Study, result: Result, options: Options, seconds: float) -> str:
    """Return the page as Markdown; it refers to the pictures as files in the same folder."""
    lines = [f"# {study.title}", "", study.finding, "", *(f"- {sentence}" for sentence in result.sentences), ""]
    lines += [markdown_table(result.table), ""]
    for picture in result.pictures:
        lines += [f"![{picture.alt}]({picture.name}.svg)", "", *([picture.caption, ""] if picture.caption else [])]
    lines += [*(f"{note}\n" for note in result.notes), footer_of(study, options, seconds)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> str:
    """Return a table as Markdown, with the best number of each column in bold."""
    cells = table.cells()
    head = [column.title for column in table.columns]
    rule = [":--" if not cells or not cells[0][j][1] else "--:" for j in range(len(head))]
    body = [[f"**{text}**" if best else text for text, _, best in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])


def write_result(study: Study, result: Result, options: Options, seconds: float, folder: Path) -> Path:
    """Write index.html, README.md, results.json and the pictures to an existing folder. Return the path of the page."""
    for picture in result.pictures:
        (folder / f"{picture.name}.svg").write_text(standalone(picture), encoding="utf-8")
    (folder / "README.md").write_text(markdown_of(study, result, options, seconds), encoding="utf-8")
    stored = {
        "study": study.name,
        "seed": options.seed,
        "quick": options.quick,
        "held": result.reproduced,
        "sentences": list(result.sentences),
        "seconds": round(seconds, 1),
        "numbers": finite(result.numbers),
    }
    (folder / "results.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    return write(page_of(study, result, options, seconds), folder / "index.html")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically: a reader sees the old file or the whole new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def standalone(picture: Picture) -> str:
    """Return an inline picture as a standalone SVG file with a white background."""
    opening, rest = picture.svg.split(">", 1)
    head = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" color="#1f2328" style="background:#fff"', 1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>{rest}\n'


def finite(value: Any) -> Any:
    """Convert to plain JSON values. A number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else finite(float(value))


def mean_error(values: list[float]) -> tuple[float, float]:
    """Return the mean over repeats and its standard error."""
    n = len(values)
    mean = sum(values) / n
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


def plus_minus(mean: float, error: float, digits: int = 3) -> str:
    """Format a mean with its standard error."""
    return f"{show(mean, digits)} ± {show(error, digits)}" if math.isfinite(error) else show(mean, digits)
