"""Cells: one model on one split of one table, kept in a JSON file under TABLE/MODEL/SPLIT, and how to run them."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from benchmarks.tables.data import Table, read_cache
from benchmarks.tables.peers import PEERS
from benchmarks.tables.rows import rows_of
from benchmarks.tables.scores import evaluate
from benchmarks.tables.sources import Absent

Record = dict[str, Any]

MODELS = ("ours", "estimator", *PEERS)


def start_worker(site: Path | None) -> None:
    """Prepare a worker process: further packages, and no warnings of the models."""
    if site is not None:
        sys.path.append(str(site))
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def measure(cache: Path, name: str, model: str, split: int) -> Record:
    """Run one cell; plain values. What is not installed or fails is recorded as the reason."""
    rows = rows_of(read_cache(cache, name), split)
    cell: Record = {"table": name, "model": model, "split": split, "task": rows.table.task}
    cell |= {"rows": len(rows.y), "test_rows": len(rows.y_test), "inputs": len(rows.table.inputs)}
    try:
        fit = _fit(model)
        started, used = time.perf_counter(), _cpu_seconds()
        found = fit(rows)
        seconds, used = time.perf_counter() - started, _cpu_seconds() - used
        metrics = evaluate(found, rows)
    except Absent as reason:
        return cell | {"absent": str(reason)}
    except Exception as error:  # a cell that fails must not cost the others
        return cell | {"error": f"{type(error).__name__}: {error}"[:400]}
    scores, notes = metrics.pop("scores", None), metrics.pop("notes", {})
    cell |= {key: float(f"{value:.6g}") for key, value in metrics.items()}
    cell |= {"seconds": round(seconds, 2), "cpu_seconds": round(used, 2)}
    cell |= {"threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or None} | notes
    return cell if scores is None else cell | {"scores": [round(float(score), 5) for score in scores]}


def _cpu_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _fit(model: str) -> Any:
    if model in PEERS:
        return PEERS[model]
    from benchmarks.tables.ours import OURS  # imports torch

    return OURS[model]


def key(cell: Record) -> str:
    """Return the key of a cell: TABLE/MODEL/SPLIT."""
    return f"{cell['table']}/{cell['model']}/{cell['split']}"


def read(path: Path) -> Record:
    """Return the record of a file: the machine and the cells; empty without the file."""
    if not path.is_file():
        return {"machine": {}, "cells": {}}
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(path: Path, record: Record) -> None:
    """Write a record, one line per cell, in one step."""
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(record['cells'][k])}" for k in sorted(record["cells"]))
    partial = path.with_suffix(".partial")
    partial.write_text(f'{{"machine": {json.dumps(record["machine"])},\n"cells": {{\n{lines}\n}}}}\n', encoding="utf-8")
    partial.replace(path)


def finished(record: Record) -> Iterator[Record]:
    """Yield the cells that have results."""
    return (cell for cell in record["cells"].values() if "error" not in cell and "absent" not in cell)


def run(
    cache: Path,
    site: Path | None,
    tables: list[Table],
    models: list[str],
    splits: int,
    workers: int,
    out: Path,
    *,
    limit: float | None = None,
    known: Sequence[Path] = (),
) -> Record:
    """Run the cells that are not in the file yet, split by split and large tables first, and return all of them.

    Args:
        cache: folder with the tables.
        site: folder with further packages.
        tables: the tables.
        models: names of the models.
        splits: how many splits of each table.
        workers: number of processes.
        out: file of finished cells, written after each.
        limit: seconds after which cells that are still running are given up; None for none.
        known: files with cells that are not run again.
    """
    from benchmarks.timing import machine  # imports torch, which the workers of the peers do not need

    record = merge(read(out), [read(path) for path in known])
    record["machine"] = machine() | {"workers": workers}
    done = {key(cell) for cell in finished(record)}
    wanted = [
        (table.name, model, split)
        for split in range(splits)
        for table in sorted(tables, key=lambda t: -t.columns.num_rows)
        for model in models
        if split < len(table.splits) and f"{table.name}/{model}/{split}" not in done
    ]
    write(out, record)
    started = time.perf_counter()
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(site,)) as pool:
        futures = [pool.submit(measure, cache, *cell) for cell in wanted]
        try:
            for count, future in enumerate(as_completed(futures, limit), 1):
                cell = future.result()
                record["cells"][key(cell)] = cell
                write(out, record)
                result = cell.get("error") or cell.get("absent") or f"{cell['seconds']} s"
                passed = time.perf_counter() - started
                print(f"{count} of {len(wanted)}, {passed:.0f} s: {key(cell)}: {result}", flush=True)
        except TimeoutError:
            left = sum(not future.done() for future in futures)
            print(f"stopped after {limit:.0f} s with {left} cells left; the same command continues", flush=True)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
    return record


def merge(record: Record, others: list[Record]) -> Record:
    """Return a record with the cells of all; finished ones replace those that are not."""
    cells = dict(record["cells"])
    for other in others:
        for name, cell in other["cells"].items():
            if name not in cells or "error" in cells[name] or "absent" in cells[name]:
                cells[name] = cell
    return {"machine": record["machine"] or (others[0]["machine"] if others else {}), "cells": cells}


def with_stored(record: Record, stored: Record) -> Record:
    """Return a record with the cells of other models that an earlier page has stored.

    Those have no per-row scores. The standard errors of their differences to `credibly fit` are kept as `errors`, for
    one split each.
    """
    cells, old = dict(record["cells"]), stored["cells"]
    for name, cell in old.items():
        if cell["model"] != "ours" and (name not in cells or "error" in cells[name] or "absent" in cells[name]):
            cells[name] = cell
    errors = {}
    for name, gap in stored.get("differences_of_scores", {}).items():
        table = name.split("/")[0]
        both = [c for c in finished(stored) if key(c).startswith(f"{name}/") and f"{table}/ours/{c['split']}" in old]
        errors[name] = gap["standard_error"] * math.sqrt(max(1, len(both)))
    return {"machine": record["machine"], "cells": cells, "errors": errors}
