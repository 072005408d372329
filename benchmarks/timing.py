"""What every benchmark shares: interleaved timing, ratios with their spread, the table, the machine line, the options.

Contestants take turns (A B A B ...), so that a slow spell of the machine hits all of them, and a ratio is made of times taken
within the same turn. What is reported is the ratio of the medians, with the lowest and the highest ratio of any one turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.floors import Floor
from credibly.backends.cpp.library import library

Times = list[float]  # seconds a call, one number a turn


def interleaved(
    contestants: Mapping[str, Callable[[], object]], *, repeats: int, seconds: float, multiple: int = 1, warm: int = 3
) -> dict[str, Times]:
    """Seconds a call of each contestant, turn by turn.

    Args:
        contestants: name -> the call to time. Each is called a few times first, which is where compilation would happen.
        repeats: turns of each.
        seconds: how long one turn of one contestant should last; the number of calls follows from it.
        multiple: a turn has a multiple of so many calls, such as the steps of an epoch, so that work that is done once
            in so many calls weighs in every turn what it weighs in a long run.
        warm: calls of each before the first turn, at least.
    """
    calls = {}
    for name, call in contestants.items():
        for _ in range(max(warm, multiple)):
            call()
        calls[name] = multiple * max(1, math.ceil(seconds / (multiple * _turn(call, multiple))))
    times: dict[str, Times] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, call in contestants.items():
            times[name].append(_turn(call, calls[name]))
    return times


def _turn(call: Callable[[], object], calls: int) -> float:
    elsewhere = getattr(call, "turn", None)  # a contestant in another process, which has the clock there
    if elsewhere is not None:
        return float(elsewhere(calls))
    gc.collect()
    gc.disable()  # as timeit does: a collection that falls into one contestant's turn is not its work
    try:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


@dataclass(frozen=True)
class Goal:
    """What a ratio should be: Goal("<=", 1.1)."""

    sign: Literal["<", "<=", ">="]
    value: float

    def met(self, ratio: float) -> bool:
        return {"<": ratio < self.value, "<=": ratio <= self.value, ">=": ratio >= self.value}[self.sign]

    def __str__(self) -> str:
        return f"{self.sign} {self.value:g}"


@dataclass(frozen=True)
class Row:
    """One comparison. The ratio is ours / baseline, or with `inverse` baseline / ours (how many times faster we are).

    Without a baseline (no peer was found) there is no ratio: our time alone is reported. Rows of the suite also say who the
    peer is and what our work would take at the rates of the machine (`floor`).
    """

    what: str
    ours: Times
    baseline: Times
    goal: Goal | None = None
    inverse: bool = False
    peer: str = ""
    floor: Floor | None = None

    @property
    def ratio(self) -> float | None:
        if not self.baseline:
            return None
        return self._ratio(statistics.median(self.ours), statistics.median(self.baseline))

    @property
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest ratio of one turn."""
        paired = [self._ratio(a, b) for a, b in zip(self.ours, self.baseline)]
        return (min(paired), max(paired)) if paired else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is no goal or nothing to compare with."""
        return None if self.goal is None or self.ratio is None else self.goal.met(self.ratio)

    def _ratio(self, ours: float, baseline: float) -> float:
        return baseline / ours if self.inverse else ours / baseline

    def cells(self) -> list[str]:
        ratio, spread = self.ratio, self.spread
        return [
            self.what,
            duration(statistics.median(self.ours)),
            duration(statistics.median(self.baseline)) if self.baseline else "",
            "" if ratio is None else f"{ratio:.3g}{' x faster' if self.inverse else ''}",
            "" if spread is None else f"{spread[0]:.3g} .. {spread[1]:.3g}",
            "" if self.goal is None else str(self.goal),
            "" if self.met is None else ("met" if self.met else "MISSED"),
        ]

    def record(self) -> dict[str, Any]:
        low, high = self.spread or (None, None)
        return {
            "what": self.what,
            "peer": self.peer,
            "credibly_s": statistics.median(self.ours),
            "baseline_s": statistics.median(self.baseline) if self.baseline else None,
            "ratio_is": "baseline / credibly" if self.inverse else "credibly / baseline",
            "ratio": self.ratio,
            "lowest": low,
            "highest": high,
            "goal": None if self.goal is None else str(self.goal),
            "met": self.met,
            "turns": len(self.ours),
            "floor": None if self.floor is None else {"flops": self.floor.flops, "bytes": self.floor.bytes},
        }


HEADER = ["what", "credibly", "baseline", "ratio", "spread", "goal", "verdict"]


def scaled(times: Times, factor: float) -> Times:
    """The times multiplied by a factor: a loop over 20 members takes 20 times one member's time."""
    return [factor * t for t in times]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it can be read as text too."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    rule = ["-" * w for w in widths]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |" for line in (header, rule, *lines)
    )


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the numbers depend on, and nothing that names the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
        # A load that is not far below the number of cores means that somebody else was at work: time again.
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="turns of each contestant (default 9)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn (default 0.5)")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="also write the results here")
    return parser


@contextmanager
def report(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Sets the threads, prints the machine line, and at the end writes what the block put in the record to --json."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    facts = machine()
    print(
        f"# {name}\n\n" + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()) + "\n",
        flush=True,
    )
    record: dict[str, Any] = {"benchmark": name, "machine": facts}
    yield record
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def cold_compiler() -> Iterator[float]:
    """A compiler cache of the block's own, so that compile times are cold ones; gives the seconds that torch takes to get ready.

    Loading the compiler and its first use cost some seconds whoever is first, so a trivial function goes first.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR", "CREDIBLY_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, folder))
        library.cache_clear()
        try:
            start = time.perf_counter()
            torch.compile(lambda t: t.sin() + 1)(torch.zeros(8))
            yield time.perf_counter() - start
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value


def show(rows: Sequence[Row], record: dict[str, Any], key: str = "rows") -> None:
    """Prints the comparisons and puts them in the record."""
    print(table(HEADER, [row.cells() for row in rows]) + "\n", flush=True)
    record[key] = record.get(key, []) + [row.record() for row in rows]
