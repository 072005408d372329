"""The results page of the samplers: README.md, results.csv and pictures, written from stored runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from benchmarks import uci_mixing
from benchmarks.samplers import pictures
from benchmarks.samplers.compare import GOALS, ROWS, Comparison, Entry, comparisons, entries
from benchmarks.samplers.settings import UNADJUSTED
from benchmarks.timing import duration, table

COLUMNS = (
    "device", "data", "sampler", "side", "seed", "chains", "budget", "init", "comparable", "seconds", "warmup_seconds",
    "compile", "gradients", "draws", "ess_worst", "ess_median", "ess_worst_per_second", "ess_median_per_second",
    "rhat_worst", "rhat_median", "log_likelihood", "rmse", "divergences", "parallel", "error",
)  # fmt: skip
INTRODUCTION = """# Samplers against their peers

How many effective samples of predictions per second does each sampler give? Every sampler targets the same posterior (a
network of 50 SiLU units on the first split of a UCI set, with a learned noise scale and a Normal prior) from the same
starting points, for the same wall-clock time. The time runs from the first warm-up step to the last draw; compilation
is listed separately.
"""
SETUP = """## Setup

**Posterior.** Standardised training rows of the first split, inputs-50-1 with SiLU, weights N(0, 1/fan-in), biases
N(0, 1), log noise scale N(-1, 1); float32 everywhere. Before the runs, log density and gradient of the JAX version are
checked against ours at the starting points and at random points of the prior.

**Metrics.** Bulk ESS and rank-normalised split R-hat of the predictions at all test rows, computed by the same function
for all samplers; medians over the repetitions. *Worst* is the test row with the lowest ESS or the highest R-hat. If
chains disagree (R-hat well above 1.05), the ESS is not reliable for any sampler.

**Peers.** BlackJAX and NumPyro run one chain per host device on a CPU (`pmap`) and vectorised chains on a GPU (`vmap`);
chains of ChEES adapt together and are vectorised on both. nutpie calls a gradient compiled by JAX, from one thread per
chain. Adaptation follows the recommendations of the libraries, with variants of warm-up length and mass; the goals
compare with the best variant of any peer. BlackJAX's adjusted MCLMC starts its adaptation from the step size of the
unadjusted one, because its own search for an initial step size does not terminate. Unadjusted samplers
({unadjusted}) have a bias that ESS does not detect: they count among the peers, but not among ours.

**bde** fits an ensemble of microcanonical Langevin chains of fixed length to a different density (the network also
predicts the noise of every row). Only its log-likelihood and its seconds are comparable.
"""


def summary(record: dict[str, Any]) -> str:
    """Return the goals and what failed, for the terminal."""
    lines = [goal_line(one) for one in comparisons(entries(record))]
    failed = [run for run in record["runs"].values() if "error" in run]
    lines += [f"- not run: {run['data']}, {run['sampler']}, seed {run['seed']}: {run['error']}" for run in failed]
    return "\n".join(lines)


def goal_line(one: Comparison) -> str:
    """Return one line about a goal."""
    where = {"cpu": "CPU", "cuda": "GPU"}[one.device]
    verdict = "met" if one.met else "missed"
    mine, theirs = (_number(e.median("rhat_worst"), ".3f") or "infinite" for e in (one.ours, one.peer))
    return (
        f"- {one.data}, {where}, {one.chains} chains, {ROWS[one.row]}: {one.ours.sampler} has {one.ratio:.2g} times "
        f"the effective samples per second of the best peer, {one.peer.sampler} (goal {GOALS[one.device]:g}: "
        f"{verdict}); R-hat of the worst row {mine} and {theirs}"
    )


def write_page(record: dict[str, Any], folder: Path, *, mixing: Path | None = None, before: Path | None = None) -> None:
    """Write the page into a folder, with R-hats of the UCI splits where a file of `uci_mixing` is given."""
    found = entries(record)
    if not found:
        raise SystemExit("--results must name a file with finished runs, got none")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"ess.svg": pictures.efficiency(found), "traces.svg": pictures.traces(found)}
    splits = uci_mixing.read(mixing) if mixing is not None else []
    if splits:
        drawn["rhat.svg"] = pictures.mixing(splits, uci_mixing.earlier(before))
    for name, svg in drawn.items():
        (folder / name).write_text(svg, encoding="utf-8")
    (folder / "results.csv").write_text(as_csv(record), encoding="utf-8")
    (folder / "README.md").write_text(page(record, found, splits), encoding="utf-8")
    print(summary(record))


def page(record: dict[str, Any], found: list[Entry], splits: list[dict[str, Any]]) -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION, "## Goals\n", "\n".join(goal_line(one) for one in comparisons(found)) or "No peer was run."]
    parts += ["![Effective samples of the worst test row per second, by sampler](ess.svg)"]
    for device, data, chains in sorted({(e.device, e.data, e.chains) for e in found}):
        here = [e for e in found if (e.device, e.data, e.chains) == (device, data, chains)]
        parts += [f"## {data}, {'CPU' if device == 'cpu' else 'GPU'}, {chains} chains\n", speed_table(here)]
    parts += ["## Traces of the worst test row\n"]
    parts += ["Our best exact sampler and the best peer on every posterior, one colour per chain (up to four).\n"]
    parts += ["![The prediction with the highest R-hat, draw by draw](traces.svg)"]
    if splits:
        parts += ["## R-hat on the UCI splits, before and after\n"]
        parts += ["![R-hat of the worst test row of every UCI split](rhat.svg)", uci_mixing.table_of(splits)]
        parts += [uci_mixing.modes_of(splits)]
    parts += [SETUP.format(unadjusted=", ".join(UNADJUSTED)), _footer(record)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def speed_table(found: list[Entry]) -> str:
    """Return a Markdown table of the samplers on one posterior, fastest first; those with another density last."""
    lines = []
    for e in sorted(found, key=lambda e: not e.comparable):
        ess = [_number(e.median(f"ess_{row}_per_second")) if e.comparable else "" for row in ROWS]
        warm = e.median("warmup_seconds")
        per = e.median("ess_worst_per_gradient")
        lines.append(
            [
                e.sampler if e.comparable else f"{e.sampler} (own density)",
                e.runs[0]["side"],
                *ess,
                _number(e.median("rhat_worst"), ".3f") or "infinite",
                _number(None if per is None or not e.comparable else 1e6 * per),
                _number(e.median("log_likelihood"), ".3f"),
                f"{e.median('seconds'):.1f}" + ("" if warm is None else f" ({warm:.1f})"),
                duration(e.median("compile") or 0.0),
            ]
        )
    header = ["sampler", "library", "ESS/s, worst row", "ESS/s, median row", "R-hat, worst row"]
    header += ["ESS per 10^6 gradients", "test log-likelihood", "seconds (warm-up)", "compilation"]
    return table(header, lines)


def as_csv(record: dict[str, Any]) -> str:
    """Return all runs, one per line, without traces and settings."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for _, run in sorted(record["runs"].items()):
        writer.writerow(run)
    return text.getvalue()


def _footer(record: dict[str, Any]) -> str:
    lines = ["## Machines and versions\n"]
    for device, about in sorted(record["machine"].items()):
        lines.append(f"- {device}: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in about.items()))
    if record["versions"]:
        lines.append("- peers: " + ", ".join(f"{k} {v}" for k, v in sorted(record["versions"].items())))
    return "\n".join(lines)


def _number(value: float | None, form: str = ".3g") -> str:
    return "" if value is None else f"{value:{form}}"
