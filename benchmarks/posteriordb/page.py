"""The results page and its CSV, written from the outcomes of a run."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from benchmarks.posteriordb.models import KINDS
from benchmarks.posteriordb.reference import read_reference
from benchmarks.posteriordb.run import Outcome
from benchmarks.timing import table

SAMPLERS = ("NUTS", "HMC", "BlackJAX NUTS")
MARKERS = ("<!-- results -->", "<!-- end of results -->")
COLUMNS = (
    *("posterior", "kind", "reference", "sampler", "dim", "seed", "verdict"),
    *("z_mean", "z_square", "z_lower_tail", "z_upper_tail", "z_limit", "rhat", "ess", "steps_per_draw"),
    *("ess_per_1000_gradients", "warmup_gradients", "divergent", "failure"),
)


def rows_of(outcomes: Iterable[Outcome]) -> list[dict[str, object]]:
    """Return the rows of the CSV, by kind and posterior in the order of the models."""
    order = {(p, s): (i, SAMPLERS.index(s)) for i, p in enumerate(_kinds()) for s in SAMPLERS}
    found = []
    for one in sorted(outcomes, key=lambda o: (*order[o.posterior, o.sampler], o.seed)):
        source = read_reference(one.posterior).source.split(":")[0]
        first = (one.posterior, _kinds()[one.posterior], source, one.sampler, one.dim, one.seed, one.verdict)
        numbers = (*one.z, one.limit, one.rhat, one.ess, one.steps, 1000 * one.per_gradient)
        numbers = (*numbers, one.warmup_gradients, one.divergent)
        rounded = ["" if math.isnan(v) else f"{v:.4g}" for v in numbers]
        found.append(dict(zip(COLUMNS, (*first, *rounded, one.failure))))
    return found


def _kinds() -> dict[str, str]:
    return {name: kind for kind, group in KINDS.items() for name in group}


def results(outcomes: list[Outcome]) -> str:
    """Return the summary and the tables of the page."""
    by = {(o.posterior, o.sampler): o for o in outcomes}
    lines = []
    for sampler in SAMPLERS:
        some = [o for o in outcomes if o.sampler == sampler]
        if some:
            counts: dict[str, int] = {}
            for one in some:
                counts[one.verdict] = counts.get(one.verdict, 0) + 1
            words = ", ".join(f"{word} {counts[word]}" for word in sorted(counts))
            lines.append(f"- {sampler}, {len(some)} posteriors: {words}.")
    for sampler in SAMPLERS[:-1]:
        ratios = sorted(
            by[p, sampler].per_gradient / by[p, "BlackJAX NUTS"].per_gradient
            for p in _kinds()
            if _counts(by.get((p, sampler))) and _counts(by.get((p, "BlackJAX NUTS")))
        )
        if ratios:
            middle, ahead = ratios[len(ratios) // 2], sum(r > 1 for r in ratios)
            lines.append(
                f"- ESS per gradient of {sampler} over that of BlackJAX's NUTS, on the {len(ratios)} posteriors where "
                f"both agree with the reference: median {middle:.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}, above "
                f"1 on {ahead}."
            )
    parts = ["\n".join(lines)]
    for kind, group in KINDS.items():
        cells = [_cells(p, [by.get((p, s)) for s in SAMPLERS]) for p in group if any((p, s) in by for s in SAMPLERS)]
        if cells:
            head = ["posterior", "D", *(f"{s}: {what}" for s in ("NUTS", "HMC") for what in ("z", "R-hat", "ESS"))]
            head += ["verdict NUTS", "verdict HMC", "NUTS: ESS/1000 grad", "HMC", "BlackJAX NUTS", "its verdict"]
            parts.append(f"### {kind[0].upper()}{kind[1:]}\n\n{table(head, cells)}")
    return "\n\n".join(parts)


def _counts(one: Outcome | None) -> bool:
    return one is not None and one.verdict.startswith("agrees")


def _cells(posterior: str, found: list[Outcome | None]) -> list[str]:
    """Return one row of the page's table."""
    mark = "" if read_reference(posterior).source == "posteriordb" else " *"
    dim = next(o.dim for o in found if o is not None)
    cells = [f"{posterior}{mark}", str(dim)]
    for one in found[:2]:
        if one is None or one.failure:
            cells += ["", "", ""]
        else:
            cells += [f"{_short(max(one.z))} ({one.limit:.1f})", f"{one.rhat:.3f}", f"{one.ess:.0f}"]
    cells += [one.verdict if one is not None else "" for one in found[:2]]
    cells += ["" if one is None or one.failure else _short(1000 * one.per_gradient) for one in found]
    return [*cells, "" if found[2] is None else found[2].verdict]


def _short(value: float) -> str:
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.1f}" if 0.1 <= value < 100 else f"{value:.2g}"


def write(folder: Path, outcomes: list[Outcome]) -> None:
    """Write results.csv, and the tables between the markers of README.md."""
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows_of(outcomes))
    path = folder / "README.md"
    before, rest = path.read_text().split(MARKERS[0])
    path.write_text(f"{before}{MARKERS[0]}\n\n{results(outcomes)}\n\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}")
