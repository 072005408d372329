"""The suite: all cases, each in its own process, so that a failure does not stop the others.

python -m benchmarks.suite NAME --setting JSON --out PATH      # one case, as started by the parent
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Case, Setting
from benchmarks.timing import HEADER, table

ROOT = Path(__file__).resolve().parents[1]
# The modules whose `cases()` make up the suite, in table order.
MODULES = (
    "hmc",
    "efficiency",
    "ensemble",
    "bbb",
    "dropout",
    "sgmcmc",
    "prediction",
    "mixing",
    "first_draw",
    "scale",
    "gpu",
)


def all_cases(modules: Sequence[str] = MODULES) -> list[Case]:
    """Return the cases of all modules in table order."""
    found: list[Case] = []
    for name in modules:
        found += importlib.import_module(f"benchmarks.{name}").cases()
    return found


def choose(cases: Sequence[Case], names: str | None, device: str) -> list[Case]:
    """Return the named cases, or all of the device. A name also selects the cases it prefixes: hmc for hmc-small."""
    here = [case for case in cases if case.device == device]
    if names is None:
        return here
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(_is_named(case, name) for case in here):
            known = ", ".join(case.name for case in here)
            raise SystemExit(f"--cases: no case {name!r} for {device}. Known cases: {known}")
    return [case for case in here if any(_is_named(case, name) for name in wanted)]


def _is_named(case: Case, name: str) -> bool:
    return case.name == name or case.name.startswith(f"{name}-")


def run_all(cases: Iterable[Case], setting: Setting, out: Path, budget: float) -> list[dict[str, Any]]:
    """Run the cases one after another. Returns the result of each or why it has none. `budget` is in minutes."""
    cases, start, results = list(cases), time.perf_counter(), []
    for number, case in enumerate(cases, 1):
        spent = (time.perf_counter() - start) / 60
        print(f"\n[{number}/{len(cases)}] {case.name}: {case.work}", flush=True)
        if spent + case.minutes > budget and not setting.quick:
            failure = f"left out: {case.minutes:g} more minutes would exceed the budget of {budget:g}"
            print(f"  {failure}", flush=True)
            results.append(_empty(case, failure))
        else:
            results.append(run_in_subprocess(case, setting, out))
    return results


def run_in_subprocess(case: Case, setting: Setting, out: Path) -> dict[str, Any]:
    """Run one case in its own process."""
    path = out / f"{case.name}.json"
    path.unlink(missing_ok=True)
    fields = {**dataclasses.asdict(setting), "notes": [], "root": None if setting.root is None else str(setting.root)}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "benchmarks.suite", case.name, "--setting", json.dumps(fields), "--out", str(path)]
    start = time.perf_counter()
    try:
        status = subprocess.run(command, env=environment, timeout=120 + 240 * case.minutes, check=False).returncode
    except subprocess.TimeoutExpired:
        return _empty(case, "timed out: it took more than four times its expected duration")
    if not path.exists():
        return _empty(case, f"exited with status {status} and no result")
    found: dict[str, Any] = json.loads(path.read_text())
    return {**found, "seconds": time.perf_counter() - start}


def _empty(case: Case, failure: str) -> dict[str, Any]:
    return {"case": case.name, "work": case.work, "limits": case.limits, "rows": [], "notes": [], "failure": failure}


def run_in_process(case: Case, setting: Setting) -> dict[str, Any]:
    """Run one case in this process; return its rows as plain values. An error is recorded; earlier rows are kept."""
    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    rows, failure = [], None
    try:
        for row in case.run(setting):
            rows.append(row)
            print("  " + " | ".join(cell for cell in (row.peer, *row.cells()) if cell), flush=True)
    except (Exception, SystemExit) as error:
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        traceback.print_exc()
    found = _empty(case, "")
    return {**found, "rows": [row.record() for row in rows], "notes": setting.notes, "failure": failure}


def print_rows(rows: Iterable[Any], record: dict[str, Any]) -> None:
    """Print rows as a table and add them to the record, for a module run on its own."""
    rows = list(rows)
    record["rows"] = [row.record() for row in rows]
    print("\n" + table(["peer", *HEADER], [[row.peer, *row.cells()] for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one case of the suite in this process.")
    parser.add_argument("name")
    parser.add_argument("--setting", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    fields = json.loads(args.setting)
    setting = Setting(**{**fields, "root": Path(fields["root"]) if fields["root"] else None})
    case = next(case for case in all_cases() if case.name == args.name)
    found = run_in_process(case, setting)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
