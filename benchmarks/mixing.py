"""R-hat and bulk ESS of many coordinates against ArviZ, which works one coordinate at a time; ours works in blocks.

python -m benchmarks.mixing               # about a minute; needs arviz-stats for the peer
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from benchmarks.case import Case, Setting
from benchmarks.floors import Floor
from benchmarks.suite import print_rows
from benchmarks.timing import Goal, Row, interleaved, options, report
from credibly.diagnostics import convergence

CHAINS, DRAWS, COLUMNS = 4, 1_000, 10_000


def chains(draws: int, columns: int) -> torch.Tensor:
    """Return autocorrelated chains, (chain, draw, column)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(CHAINS, draws, columns, generator=generator)
    for t in range(1, draws):
        noise[:, t] += 0.7 * noise[:, t - 1]
    return noise


def arviz(library: Any, values: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            library.rhat(values, chain_axis=0, draw_axis=1, method="rank"),
            library.ess(values, chain_axis=0, draw_axis=1, method="bulk"),
        )


def comparisons(setting: Setting) -> Iterator[Row]:
    draws, columns = (100, 20) if setting.quick else (DRAWS, COLUMNS)
    values = chains(draws, columns)
    plain = values.double().numpy()
    implementations: dict[str, Callable[[], object]] = {
        "ours": lambda: (convergence.rhat(values), convergence.ess(values, "bulk"))
    }
    found = peers.module("arviz_stats.base")
    subset = min(columns, 1_000)
    if found is None:
        setting.note("arviz-stats is not installed")
    else:
        few = plain[..., :20]
        for mine, theirs in zip((convergence.rhat(few), convergence.ess(few, "bulk")), arviz(found.array_stats, few)):
            if not np.allclose(mine, theirs, rtol=1e-8):
                raise SystemExit("ArviZ gives other values: nothing to compare")
        part = np.ascontiguousarray(plain[..., :subset])
        implementations["arviz"] = lambda: arviz(found.array_stats, part)
        if subset < columns:
            setting.note(f"ArviZ is timed on {subset:,} coordinates; its time is multiplied by {columns // subset}")
    times = interleaved(implementations, repeats=min(3, setting.repeats), seconds=setting.seconds, warm=1)
    what = f"R-hat and bulk ESS of {CHAINS} x {draws:,} x {columns:,}"
    floor = Floor(0.0, values.numel() * 4)  # every draw is read once
    theirs = [columns / subset * t for t in times.get("arviz", [])]
    yield Row(what, times["ours"], theirs, Goal(">=", 1), inverse=True, peer="ArviZ" if theirs else "", floor=floor)
    everything = {"ours": lambda: convergence.measure(values)}
    seconds = interleaved(everything, repeats=min(3, setting.repeats), seconds=setting.seconds, warm=1)["ours"]
    setting.note(f"R-hat and all three kinds of ESS together take us {statistics.median(seconds):.3g} s")


def cases() -> list[Case]:
    return [
        Case(
            "mixing",
            "R-hat and bulk ESS of 4 chains of 1,000 draws of 10,000 coordinates.",
            "sorting every coordinate for its ranks, and one FFT each.",
            comparisons,
            0.7,
            goals="1",
            peers=("ArviZ",),
        )
    ]


def main() -> None:
    args = options(__doc__).parse_args()
    with report("mixing", args) as record:
        found = list(comparisons(Setting(args.repeats, args.seconds, args.threads)))
        print_rows(found, record)


if __name__ == "__main__":
    main()
