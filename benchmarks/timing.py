"""Shared by all benchmarks: interleaved timing, ratios with their spread, tables, the machine line, the options.

Implementations alternate (A B A B ...), so that a slow phase of the machine affects all of them and each repetition
gives a paired ratio. Reported are the ratio of the medians and the lowest and highest ratio of any one repetition.
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

Times = list[float]  # seconds per call, one entry per repetition


def interleaved(
    implementations: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    seconds: float,
    multiple: int = 1,
    warm: int = 3,
) -> dict[str, Times]:
    """Return the seconds per call of each implementation, one entry per repetition.

    Args:
        implementations: name -> the call to time. Each is called a few times first, so that compilation is not timed.
        repeats: number of repetitions.
        seconds: target duration of one repetition of one implementation; determines the number of calls.
        multiple: the number of calls per repetition is a multiple of this, such as the steps of an epoch, so that work
            done once per epoch has the same weight in every repetition as in a long run.
        warm: minimum number of warm-up calls.
    """
    calls = {}
    for name, call in implementations.items():
        for _ in range(max(warm, multiple)):
            call()
        calls[name] = multiple * max(1, math.ceil(seconds / (multiple * _time_calls(call, multiple))))
    times: dict[str, Times] = {name: [] for name in implementations}
    for _ in range(repeats):
        for name, call in implementations.items():
            times[name].append(_time_calls(call, calls[name]))
    return times


def _time_calls(call: Callable[[], object], calls: int) -> float:
    remote = getattr(call, "time_calls", None)  # an implementation in another process, timed there
    if remote is not None:
        return float(remote(calls))
    gc.collect()
    gc.disable()  # as timeit does: a garbage collection during a repetition is not that implementation's cost
    try:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


@dataclass(frozen=True)
class Goal:
    """A limit on a ratio: Goal("<=", 1.1)."""

    sign: Literal["<", "<=", ">="]
    value: float

    def met(self, ratio: float) -> bool:
        return {"<": ratio < self.value, "<=": ratio <= self.value, ">=": ratio >= self.value}[self.sign]

    def __str__(self) -> str:
        return f"{self.sign} {self.value:g}"


@dataclass(frozen=True)
class Row:
    """One comparison. The ratio is ours / baseline, or with `inverse` baseline / ours (our speed-up).

    Without a baseline (no peer installed) there is no ratio and only our time is reported. Rows of the suite also name
    the peer and hold the minimum time of the work at the machine's measured rates (`floor`).
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
        """Lowest and highest ratio of any one repetition."""
        paired = [self._ratio(a, b) for a, b in zip(self.ours, self.baseline)]
        return (min(paired), max(paired)) if paired else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or a baseline."""
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
    """Multiply times by a factor: a loop over 20 members takes 20 times the time of one."""
    return [factor * t for t in times]


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, padded to be readable as plain text."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    rule = ["-" * w for w in widths]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |" for line in (header, rule, *lines)
    )


def duration(seconds: float) -> str:
    """Format a duration with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return the facts that timings depend on, without anything that identifies the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
        # A load that is not far below the number of cores means that the machine was loaded: run again.
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options common to all benchmarks."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="repetitions per implementation (default 9)")
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of one repetition (default 0.5)")
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="also write the results here")
    return parser


@contextmanager
def report(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Set the threads, print the machine line, and at the end write the record that the block filled to --json."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    here = machine()
    line = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in here.items())
    print(f"# {name}\n\n{line}\n", flush=True)
    record: dict[str, Any] = {"benchmark": name, "machine": here}
    yield record
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def cold_compiler() -> Iterator[float]:
    """Give the block an empty compiler cache, so that compile times are cold; yield torch's start-up seconds.

    Loading the compiler and using it once takes some seconds regardless of the function, so a trivial one goes first.
    """
    names = ("TORCHINDUCTOR_CACHE_DIR",)
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(dict.fromkeys(names, folder))
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
    """Print the comparisons and add them to the record."""
    print(table(HEADER, [row.cells() for row in rows]) + "\n", flush=True)
    record[key] = record.get(key, []) + [row.record() for row in rows]
