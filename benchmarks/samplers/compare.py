"""Comparisons of stored runs: medians over repetitions, our best sampler against the best peer, and the goals."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.samplers.settings import UNADJUSTED

# Least ratio of effective samples per second to the best peer.
GOALS = {"cpu": 10.0, "cuda": 5.0}
ROWS = {"worst": "worst test row", "median": "median test row"}


@dataclass(frozen=True)
class Entry:
    """The repetitions of one sampler on one posterior and device."""

    device: str
    data: str
    chains: int
    sampler: str
    runs: tuple[dict[str, Any], ...]

    @property
    def mine(self) -> bool:
        """Whether the sampler is ours."""
        return bool(self.runs[0]["side"] == "credibly")

    @property
    def comparable(self) -> bool:
        """Whether the sampler has the density of all others."""
        return bool(self.runs[0]["comparable"])

    @property
    def exact(self) -> bool:
        """Whether the draws are free of bias, which ESS would not detect."""
        return self.sampler not in UNADJUSTED

    def median(self, name: str) -> float | None:
        """Return the median of a measure over the repetitions, None if none has it."""
        values = [run[name] for run in self.runs if run.get(name) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Comparison:
    """Our best exact sampler and the best peer in one measure."""

    device: str
    data: str
    chains: int
    row: str
    ours: Entry
    peer: Entry

    @property
    def ratio(self) -> float:
        """Effective samples per second of ours over those of the peer."""
        mine, theirs = (entry.median(f"ess_{self.row}_per_second") for entry in (self.ours, self.peer))
        assert mine is not None
        assert theirs is not None
        return mine / max(theirs, 1e-12)

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.ratio >= GOALS[self.device]


def entries(record: dict[str, Any]) -> list[Entry]:
    """Return the samplers with finished runs, by device, posterior and speed, fastest first."""
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for run in record["runs"].values():
        if "seconds" in run:
            groups.setdefault((run["device"], run["data"], run["chains"], run["sampler"]), []).append(run)
    found = [Entry(*key, tuple(sorted(runs, key=lambda run: run["seed"]))) for key, runs in groups.items()]
    return sorted(found, key=lambda e: (e.device, e.data, e.chains, -(e.median("ess_worst_per_second") or 0.0)))


def comparisons(found: list[Entry]) -> list[Comparison]:
    """Return our best exact sampler against the best peer, which may have a bias, per device, posterior and row."""
    result = []
    for device, data, chains in sorted({(e.device, e.data, e.chains) for e in found}):
        here = [e for e in found if (e.device, e.data, e.chains) == (device, data, chains) and e.comparable]
        for row in ROWS:
            ranked = sorted(here, key=lambda e: -(e.median(f"ess_{row}_per_second") or 0.0))
            ours = next((e for e in ranked if e.mine and e.exact), None)
            peer = next((e for e in ranked if not e.mine), None)
            if ours is not None and peer is not None and ours.median("ess_worst") and peer.median("ess_worst"):
                result.append(Comparison(device, data, chains, row, ours, peer))
    return result
