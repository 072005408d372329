"""Counters and histograms in the text format of Prometheus. All labels come from fixed sets, so memory is bounded."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
TEXT = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts of values up to each of some bounds, with their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: Labels) -> list[str]:
        """Return the lines of the text format."""
        found, total = [], 0
        for bound, count in zip((*(f"{b:g}" for b in self.bounds), "+Inf"), self.counts):
            total += count
            found.append(f"{name}_bucket{_labels((*labels, ('le', bound)))} {total}")
        return [*found, f"{name}_sum{_labels(labels)} {self.sum!r}", f"{name}_count{_labels(labels)} {total}"]


HELP = {
    "credibly_requests_total": ("counter", "Requests by path, method and status."),
    "credibly_request_seconds": ("histogram", "Time from the first byte of a request to the last of its answer."),
    "credibly_in_flight": ("gauge", "Requests in progress."),
    "credibly_rows_total": ("counter", "Rows predicted."),
    "credibly_rows_with_notes_total": ("counter", "Rows with a missing, unknown or out-of-range cell."),
    "credibly_rows_unusual_total": ("counter", "Rows with an ood score above 0.99."),
    "credibly_rows_abstained_total": ("counter", "Rows that the reject option abstained from."),
    "credibly_batch_rows": ("histogram", "Rows that were predicted together."),
    "credibly_queue_rows": ("gauge", "Rows waiting for a prediction."),
    "credibly_reloads_total": ("counter", "Times that a replaced run folder was loaded, or failed to."),
    "credibly_run_loaded_timestamp_seconds": ("gauge", "When the current run was loaded."),
    "process_resident_memory_bytes": ("gauge", "Resident memory."),
    "process_start_time_seconds": ("gauge", "When the server started."),
}


class Metrics:
    """All values of `HELP`, by name and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, Labels], float] = {}
        self.histograms: dict[tuple[str, Labels], Histogram] = {}
        self.started = time.time()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter or gauge."""
        key = name, tuple(labels.items())
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.values[name, tuple(labels.items())] = value

    def observe(self, name: str, value: float, bounds: Sequence[float], **labels: str) -> None:
        """Count a value in a histogram."""
        key = name, tuple(labels.items())
        if key not in self.histograms:
            self.histograms[key] = Histogram(bounds)
        self.histograms[key].observe(value)

    def text(self) -> str:
        """Return everything in the text format of Prometheus."""
        self.set("process_start_time_seconds", self.started)
        memory = resident_bytes()
        if memory is not None:
            self.set("process_resident_memory_bytes", memory)
        lines: list[str] = []
        for name, (kind, about) in HELP.items():
            own = [f"{n}{_labels(labels)} {_number(v)}" for (n, labels), v in self.values.items() if n == name]
            for (n, labels), histogram in self.histograms.items():
                own += histogram.lines(n, labels) if n == name else []
            if own:
                lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *own]
        return "\n".join(lines) + "\n"


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not report it."""
    try:
        with open("/proc/self/statm") as handle:
            return int(handle.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _labels(labels: Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels) + "}" if labels else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
