"""The results page of the coverage benchmark, written from its cells."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.coverage_tables import tables
from benchmarks.timing import table

Cells = list[dict[str, Any]]

# The goal: the mean over tables within these limits, and no table below the lowest.
LOW, HIGH, LOWEST = 0.87, 0.93, 0.84
TITLES = {"default": "`BayesianRegressor()`", "fit": "`credibly fit`"}
METRICS = (
    ("coverage", "Coverage of the 90 % interval", 3),
    ("log_likelihood", "Log-likelihood per test row", 3),
    ("rmse", "RMSE", 3),
    ("width", "Width of the 90 % interval, in standard deviations of the training targets", 2),
    ("seconds", "Seconds per fit", 1),
)
INTRODUCTION = """# Coverage of the defaults on small tables

How often do the 90 % intervals of the defaults contain the target of a new row? Every default is fitted to {splits}
splits of {count} tables of {fewest:,} to {most:,} training rows. The goal is a coverage between {low:.2f} and
{high:.2f} on average over the tables, and of at least {lowest:.2f} on every table.
"""
SETUP = """## Setup

Nothing was tuned: inputs and targets are standardised by the training rows, and everything else is the default. The
network has one hidden layer of 50 SiLU units and a learned noise scale, also on the tables whose noise depends on x or
has heavy tails: `BayesianRegressor()` has `tune=None`, which was its default when this was run. It picks HMC on all of
these tables. `credibly fit` has the same defaults, but holds out a fifth of the training rows for its report, so it is
fitted to fewer. The columns named by a method are
`BayesianRegressor(method=...)`. "joint-mode ensemble" takes the noise of the training rows
(`settings={{"noise_from": "training"}}`), which was the default before; the ensemble now takes the noise that maximises
the density of the rows that each member has held out.

Test rows were not used for any choice within a fit. The rules for the noise (held-out rows for ensembles and point
estimates, evidence for Laplace) were chosen before this run, by the coverage and log-likelihood of test rows on two to
four splits of four to seven of these tables, so the numbers of these rules are slightly optimistic. HMC's settings were
not changed.

Synthetic tables have new training rows and 500 test rows in every split; a number in the name of a real table is that
of its training rows, drawn at random, with up to 500 others for testing; real tables without one have the standard
splits of the UCI benchmark.
"""


def write_page(record: dict[str, Any], folder: Path) -> None:
    """Write README.md and the cells, results.json, into a folder of docs/results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(page(record), encoding="utf-8")
    lines = ",\n".join(json.dumps(cell) for cell in record["cells"])
    machine = json.dumps(record["machine"])
    print(index_line(record))
    (folder / "results.json").write_text(f'{{"machine": {machine},\n"cells": [\n{lines}\n]}}\n', encoding="utf-8")


def index_line(record: dict[str, Any]) -> str:
    """Return the line for docs/results/index.md."""
    cells = [c for c in record["cells"] if "error" not in c]
    names = _names(cells)
    found = []
    for way in _ways(cells):
        means = _means(cells, names, way, "coverage")
        low = min(means, key=lambda n: means[n])
        found.append(f"{TITLES.get(way, way)} {fmean(means.values()):.3f} (lowest {means[low]:.3f}, {low})")
    return (
        f"- [Coverage of the defaults on small tables](table-coverage/README.md). Over {len(names)} tables and "
        f"{len({c['split'] for c in cells})} splits, 90 % intervals cover: {'; '.join(found)}."
    )


def page(record: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    cells = [c for c in record["cells"] if "error" not in c]
    names, ways = _names(cells), _ways(cells)
    sizes = [c["rows"] for c in cells]
    head = INTRODUCTION.format(
        splits=len({c["split"] for c in cells}), count=len(names), fewest=min(sizes), most=max(sizes),
        low=LOW, high=HIGH, lowest=LOWEST,
    )  # fmt: skip
    parts = [head, "## Summary\n", summary(cells, names, ways), _findings(cells, names, ways)]
    for metric, title, digits in METRICS:
        parts += [f"## {title}\n", by_table(cells, names, ways, metric, digits)]
    parts += ["## Tables\n", _about(cells, names), SETUP.format(), _footer(record)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def summary(cells: Cells, names: list[str], ways: list[str]) -> str:
    """Return the mean over tables of each way, and its lowest and highest table."""
    lines = []
    for way in ways:
        means = _means(cells, names, way, "coverage")
        low, high = min(means, key=lambda n: means[n]), max(means, key=lambda n: means[n])
        average = fmean(means.values())
        scores = _means(cells, names, way, "log_likelihood")
        gain = fmean(_means(cells, names, "default", "log_likelihood")[n] - scores[n] for n in scores)
        met = LOW <= average <= HIGH and means[low] >= LOWEST
        lines.append(
            [
                TITLES.get(way, way),
                f"{average:.3f}",
                f"{means[low]:.3f} ({low})",
                f"{means[high]:.3f} ({high})",
                "yes" if met else "no",
                "" if way == "default" else f"{-gain:+.3f}",
                f"{fmean(_means(cells, names, way, 'seconds').values()):.1f}",
            ]
        )
    header = ["fit", "mean coverage", "lowest", "highest", "goal met", "log-likelihood against the default", "seconds"]
    return table(header, lines)


def by_table(cells: Cells, names: list[str], ways: list[str], metric: str, digits: int) -> str:
    """Return mean and standard error over splits, one line per table."""
    lines = []
    for name in names:
        line = [name]
        for way in ways:
            values = [c[metric] for c in cells if (c["table"], c["way"]) == (name, way)]
            error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            small = digits == 1 or math.isnan(error)
            line.append("" if not values else _number(values, digits) + ("" if small else f" ± {error:.{digits}f}"))
        lines.append(line)
    return table(["table", *(TITLES.get(way, way) for way in ways)], lines)


def _number(values: list[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f}"


def _findings(cells: Cells, names: list[str], ways: list[str]) -> str:
    """Return as a list which method the default picked, and which fits miss the goal and where."""
    missed = []
    for way in ways:
        means = _means(cells, names, way, "coverage")
        if not (LOW <= fmean(means.values()) <= HIGH and min(means.values()) >= LOWEST):
            below = [f"{n} {v:.3f}" for n, v in means.items() if v < LOWEST]
            where = f"; below {LOWEST:.2f} on {', '.join(below)}" if below else ""
            missed.append(f"- {TITLES.get(way, way)} misses the goal: mean {fmean(means.values()):.3f}{where}.")
    used = sorted({c["method"] for c in cells if c["way"] == "default"})
    return "\n".join([f"- The default picked {' or '.join(used)}.", *missed])


def _about(cells: Cells, names: list[str]) -> str:
    known = {t.name: t.about for t in tables(Path())}
    first = {c["table"]: c for c in cells}
    lines = [
        [n, known.get(n, ""), f"{first[n]['rows']:,}", str(first[n]["columns"]), f"{first[n]['test_rows']:,}"]
        for n in names
    ]
    return table(["table", "target", "training rows", "columns", "test rows"], lines)


def _means(cells: Cells, names: list[str], way: str, metric: str) -> dict[str, float]:
    found = {n: [c[metric] for c in cells if (c["table"], c["way"]) == (n, way)] for n in names}
    return {name: fmean(values) for name, values in found.items() if values}


def _names(cells: Cells) -> list[str]:
    sizes = {c["table"]: c["rows"] for c in cells}
    return sorted(sizes, key=lambda name: (sizes[name], name))


def _ways(cells: Cells) -> list[str]:
    order = ["default", "fit", "ensemble", "joint-mode ensemble", "laplace", "map", "mle", "dropout", "swag", "bbb"]
    found = {c["way"] for c in cells}
    return [way for way in order if way in found] + sorted(found - set(order))


def _footer(record: dict[str, Any]) -> str:
    found = record["machine"]
    return (
        "Generated by: `python -m benchmarks.coverage --root DIR --out coverage.json`, then `--page "
        f"docs/results/table-coverage` (torch {found['torch']}, Python {found['python']}, {found['cores']} cores, "
        f"{found['workers']} processes with one thread each). The cells are in [results.json](results.json)."
    )
