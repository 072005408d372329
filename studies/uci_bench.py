"""The UCI regression benchmark: every method on every split, resumable cell by cell, next to the published results."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from credibly import __version__, data
from credibly.core.checks import check_choice, check_integer
from credibly.distributed import world
from credibly.errors import InputError, SamplingError, TrainingError
from credibly.report.page import Column, Page, Section, Table, Value, write
from credibly.report.pictures import Picture, picture
from studies.published import DIGITS, LABELS, PUBLISHED
from studies.shared_cells import share_out
from studies.study import markdown_table, mean_error, plus_minus, standalone, write_json
from studies.uci_cell import METHODS, choose, one_thread, run_cell

Cells = dict[tuple[str, str], list[dict[str, Any]]]  # by (data set, method): one entry per split


@dataclass(frozen=True)
class Plan:
    """The data sets, methods and splits to run, and where."""

    root: Path
    out: Path
    names: tuple[str, ...]
    methods: tuple[str, ...]
    splits: int = 20
    seed: int = 0
    quick: bool = False
    device: str = "cpu"
    jobs: int = 2

    def cells(self) -> list[tuple[str, int]]:
        """Return all pairs (data set, split), small data sets first: the first results come early."""
        sizes = {name: data.uci(self.root, name, 0).x_train.numel() for name in self.names}
        ordered = sorted(self.names, key=lambda name: sizes[name])
        return [(n, s) for n in ordered for s in range(min(self.splits, data.uci_splits(self.root, n)))]


def check(plan: Plan) -> None:
    """Raise for unknown names, a malformed split or a folder with cells of other settings, before any work starts."""
    there = data.uci_names(plan.root)
    if not there:
        raise InputError(
            "--root",
            f"{plan.root} has no data sets",
            "Pass a folder with files uci/NAME.npz that contain X, y, train_idx and test_idx",
        )
    for name in plan.names:
        check_choice("--data", name, there)
    for name in plan.methods:
        check_choice("--methods", name, METHODS)
    check_integer("--splits", plan.splits)
    check_integer("--jobs", plan.jobs)
    for name, split in plan.cells():
        data.uci(plan.root, name, split)  # raises for a malformed split
    settings = plan.out / "settings.json"
    mine = _settings(plan)
    if settings.is_file() and json.loads(settings.read_text(encoding="utf-8")) != mine:
        raise InputError("--out", f"{plan.out} contains cells of other settings", "Choose another folder")


def _settings(plan: Plan) -> dict[str, Any]:
    return {"credibly": __version__, "seed": plan.seed, "quick": plan.quick, "device": plan.device}


def run(plan: Plan, progress: Callable[[str, int, int], None] | None = None) -> Cells:
    """Run the missing cells in `plan.jobs` processes, or in those started by torchrun. Return all cells."""
    check(plan)
    folder, everyone = plan.out / "cells", world.current()
    folder.mkdir(parents=True, exist_ok=True)
    if everyone.leader:
        write_json(plan.out / "settings.json", _settings(plan))
    todo = [(n, s) for n, s in plan.cells() if any(not _path(folder, n, s, m).is_file() for m in plan.methods)]
    total = len(todo)
    if everyone.size > 1:
        same = [(n, s) for n, s in everyone.gather(todo)[0]]

        def started(cell: tuple[str, int], done: int) -> None:
            if progress is not None:
                progress(f"{cell[0]}, split {cell[1]}", done, len(same))

        share_out(everyone, same, lambda cell: _split(plan, *cell), started)
    elif plan.jobs == 1:
        for done, (name, split) in enumerate(todo):
            if progress is not None:
                progress(f"{name}, split {split}", done, total)
            _split(plan, name, split)
    else:
        # Spawned: a fork of a process whose thread pool is running may deadlock.
        with ProcessPoolExecutor(plan.jobs, mp_context=get_context("spawn"), initializer=one_thread) as pool:
            waiting = {pool.submit(_split, plan, name, split): (name, split) for name, split in todo}
            try:
                for done, future in enumerate(as_completed(waiting)):
                    future.result()
                    if progress is not None:
                        progress(f"{waiting[future][0]}, split {waiting[future][1]}", done + 1, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return collect(plan)


def _split(plan: Plan, name: str, split: int) -> None:
    """Run all methods on one split, except those whose cells are on disk."""
    folder = plan.out / "cells"
    missing = [method for method in plan.methods if not _path(folder, name, split, method).is_file()]
    if not missing:
        return
    options: dict[str, Any] = {"seed": plan.seed, "quick": plan.quick}
    path = _path(folder, name, split, "choice")
    if not path.is_file():
        write_json(path, choose(plan.root, name, split, **options))
    chosen = json.loads(path.read_text(encoding="utf-8"))
    for method in missing:
        try:
            found = run_cell(plan.root, name, split, method, chosen, device=plan.device, **options)
        except (TrainingError, SamplingError) as error:  # a failed fit is recorded, and the run continues without it
            found = {"data": name, "split": split, "method": method, "seed": plan.seed, "error": str(error)}
        write_json(_path(folder, name, split, method), found)


def _path(folder: Path, name: str, split: int, method: str) -> Path:
    return folder / f"{name}-{split:02d}-{method}.json"


def collect(plan: Plan) -> Cells:
    """Return the cells on disk."""
    found: Cells = {}
    for name, split in plan.cells():
        for method in plan.methods:
            path = _path(plan.out / "cells", name, split, method)
            if path.is_file():
                found.setdefault((name, method), []).append(json.loads(path.read_text(encoding="utf-8")))
    return found


def fitted(cells: Cells) -> Cells:
    """Return the cells whose fit did not fail."""
    there = {key: [cell for cell in values if "error" not in cell] for key, values in cells.items()}
    return {key: values for key, values in there.items() if values}


# -- tables, findings and the page -------------------------------------------------------------------------------------
def table_of(cells: Cells, metric: str, digits: int) -> Table:
    """Return a table with one row per data set: our mean ± standard error over splits, then the published columns."""
    names = list(dict.fromkeys(name for name, _ in cells))
    methods = [m for m in METHODS if any(method == m for _, method in cells)]
    columns = [Column("Data"), Column("Splits"), *(Column(m) for m in methods), *(Column(LABELS[p]) for p in PUBLISHED)]
    rows: list[tuple[Value, ...]] = []
    for name in names:
        ours = [_cell(cells.get((name, m), []), metric, digits) for m in methods]
        count = max(len(cells.get((name, m), [])) for m in methods)
        others = [_known(p, name, metric) for p in PUBLISHED]
        rows.append((name, count, *ours, *others))
    return Table(tuple(columns), tuple(rows))


def _cell(values: list[dict[str, Any]], metric: str, digits: int) -> str:
    numbers = [v[metric] for v in values if metric in v]
    return plus_minus(*mean_error(numbers), digits) if numbers else "–"


def _known(source: str, name: str, metric: str) -> str:
    if name not in PUBLISHED[source] or metric not in ("rmse", "log_likelihood"):
        return "–"
    mean, error = PUBLISHED[source][name][0 if metric == "rmse" else 1]
    return plus_minus(mean, error, DIGITS[source])


def findings(cells: Cells) -> tuple[str, ...]:
    """Return failed fits, dropout and the ensemble against their papers, and HMC against the best other method."""
    sentences = []
    for (name, method), values in cells.items():
        lost = [cell for cell in values if "error" in cell]
        if lost:
            sentences.append(f"{name}: {method} failed on {len(lost)} of {len(values)} splits. {lost[0]['error']}")
    cells = fitted(cells)
    names = list(dict.fromkeys(name for name, _ in cells))
    for method, source in (("dropout", "dropout"), ("ensemble", "ensemble")):
        for metric, column, sign in (("log_likelihood", 1, 1), ("rmse", 0, -1)):
            known = [n for n in names if (n, method) in cells and n in PUBLISHED[source]]
            better = [
                n
                for n in known
                if sign * (mean_error(_numbers(cells, n, method, metric))[0] - PUBLISHED[source][n][column][0]) >= 0
            ]
            if known:
                behind = [n for n in known if n not in better]
                tail = f"; behind on {', '.join(behind)}" if behind else ""
                sentences.append(
                    f"{method}, {metric.replace('_', '-')}: matches or beats {LABELS[source]} on {len(better)} of "
                    f"{len(known)}{tail}."
                )
    for name in names:
        scores = {m: _numbers(cells, name, m, "log_likelihood") for m in METHODS if (name, m) in cells}
        if "hmc" not in scores or len(scores) < 2 or len(scores["hmc"]) < 2:
            continue
        best = max((m for m in scores if m != "hmc"), key=lambda m: mean_error(scores[m])[0])
        other = {v["split"]: float(v["log_likelihood"]) for v in cells[name, best]}
        pairs = [(float(v["log_likelihood"]), other[v["split"]]) for v in cells[name, "hmc"] if v["split"] in other]
        gap, error = mean_error([a - b for a, b in pairs])
        word = "ahead of" if gap > 2 * error else "behind" if gap < -2 * error else "tied with"
        sentences.append(
            f"{name}: HMC is {word} the best other method, {best} (difference {gap:+.3f} ± {error:.3f} nats per row, "
            "paired splits)."
        )
    return tuple(sentences)


def _numbers(cells: Cells, name: str, method: str, metric: str) -> list[float]:
    return [float(v[metric]) for v in sorted(cells[name, method], key=lambda v: v["split"])]


def write_all(cells: Cells, plan: Plan, command: str) -> Path:
    """Write index.html, README.md, results.csv and the picture. Return the path of index.html."""
    sentences = findings(cells)
    every, cells = cells, fitted(cells)
    digits = 3
    tables = {
        "Log-likelihood per test row": table_of(cells, "log_likelihood", digits),
        "RMSE": table_of(cells, "rmse", digits),
    }
    tables |= {
        "Coverage of the 90 % interval": table_of(cells, "coverage", digits),
        "Seconds per fit": table_of(cells, "seconds", 1),
    }
    drawn = _picture(cells)
    text = [
        "# UCI regression benchmark",
        "",
        f"Generated by `{command}` with credibly {__version__}. Mean ± standard error over splits.",
        "",
    ]
    text += [*(f"- {line}" for line in sentences), ""]
    for title, table in tables.items():
        text += [f"## {title}", "", markdown_table(table), ""]
    text += [f"![{drawn.alt}]({drawn.name}.svg)", ""]
    (plan.out / "README.md").write_text("\n".join(text), encoding="utf-8")
    (plan.out / f"{drawn.name}.svg").write_text(standalone(drawn), encoding="utf-8")
    (plan.out / "results.csv").write_text(_csv(every), encoding="utf-8")
    sections = [Section(title, (), table) for title, table in tables.items()]
    sections[0] = Section("Log-likelihood per test row", (), tables["Log-likelihood per test row"], (drawn,), sentences)
    lead = (
        "RMSE and log-likelihood on the standard splits, in the units of the target: mean ± standard error over splits."
    )
    return write(
        Page("UCI regression benchmark", lead, tuple(sections), f"Generated by: {command}"), plan.out / "index.html"
    )


def _csv(cells: Cells) -> str:
    keys = (
        "data",
        "method",
        "split",
        "rmse",
        "log_likelihood",
        "coverage",
        "seconds",
        "prior_scale",
        "noise",
        "rhat",
        "seed",
        "error",
    )
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, keys, extrasaction="ignore", restval="")
    writer.writeheader()
    for values in cells.values():
        writer.writerows(values)
    return buffer.getvalue()


def _picture(cells: Cells) -> Picture:
    methods: Sequence[str] = [m for m in METHODS if any(method == m for _, method in cells)] or METHODS[-1:]
    # Differences are taken from the last method: data sets it was not run on appear in the tables only.
    names = [name for name in dict.fromkeys(name for name, _ in cells) if (name, methods[-1]) in cells]

    def paint(ax: Any) -> None:
        for j, method in enumerate(methods):
            for i, name in enumerate(names):
                if (name, method) not in cells:
                    continue
                reference = mean_error(_numbers(cells, name, methods[-1], "log_likelihood"))[0]
                mean, error = mean_error(_numbers(cells, name, method, "log_likelihood"))
                ax.errorbar(
                    mean - reference,
                    len(names) - 1 - i + (j - len(methods) / 2) * 0.12,
                    xerr=error if math.isfinite(error) else 0,
                    fmt="o",
                    color=f"C{j}",
                    markersize=4,
                    label=method if i == 0 else None,
                )
        ax.set_yticks(range(len(names)), names[::-1])
        ax.axvline(0, lw=0.8, ls=":")
        ax.set(xlabel=f"log-likelihood per test row minus that of {methods[-1]}")
        if names:
            ax.legend()

    return picture(
        "uci",
        paint,
        title="Log-likelihood by method",
        size=(6.0, 1.5 + 0.7 * len(names)),
        alt=f"Log-likelihood of {', '.join(methods)} on {', '.join(names)}, as differences from {methods[-1]}.",
        caption="Further right is better; bars are standard errors over splits.",
    )
