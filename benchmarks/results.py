"""Output of a suite run: a Markdown table, the same as JSON, and the generated part of a docs page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.floors import Floor, Rates
from benchmarks.timing import duration, table

HEADER = ["case", "work", "peer", "credibly", "peer's time", "ratio", "spread", "goal", "", "floor", "over the floor"]


def with_floors(results: Sequence[dict[str, Any]], rates: Rates) -> list[dict[str, Any]]:
    """Add to every row with a floor its seconds on this machine and our ratio to it."""
    return [{**result, "rows": [_with_floor(row, rates) for row in result["rows"]]} for result in results]


def _with_floor(row: dict[str, Any], rates: Rates) -> dict[str, Any]:
    if not row.get("floor"):
        return {**row, "floor_s": None, "over_floor": None}
    least = Floor(**row["floor"]).seconds(rates)
    return {**row, "floor_s": least, "over_floor": row["credibly_s"] / least}


def cells(case: str, row: Mapping[str, Any]) -> list[str]:
    """Return one row of the table."""
    verdict = {True: "met", False: "missed", None: ""}[row["met"]]
    return [
        case,
        row["what"],
        row["peer"] or "none found",
        duration(row["credibly_s"]),
        "" if row["baseline_s"] is None else duration(row["baseline_s"]),
        "" if row["ratio"] is None else f"{row['ratio']:.3g}",
        "" if row["lowest"] is None else f"{row['lowest']:.3g} .. {row['highest']:.3g}",
        row["goal"] or "",
        verdict,
        "" if row["floor_s"] is None else duration(row["floor_s"]),
        "" if row["over_floor"] is None else f"{row['over_floor']:.1f} x",
    ]


def markdown(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]], rates: Rates) -> str:
    """Return the table, the machine it was measured on, and the bottleneck of each case."""
    items = about["machine"].items()
    machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in items if value is not None)
    versions = ", ".join(f"{name} {version}" for name, version in about["peers"].items() if version)
    absent = ", ".join(name for name, version in about["peers"].items() if not version)
    missing = f" (not found: {absent})" if absent else ""
    lines = [
        f"Machine: {machine}. Rates: {rates}. Peers: {versions or 'none'}{missing}.",
        f"{about['repeats']} repetitions of {about['turn_s']:g} s each; the ratio is the peer's median time over ours, "
        "the spread its lowest and highest value in any one repetition.",
        "",
        table(HEADER, [cells(result["case"], row) for result in results for row in result["rows"]]),
    ]
    failed = [f"- `{result['case']}`: {result['failure']}" for result in results if result["failure"]]
    if failed:
        lines += ["", "Cases without a result:", "", *failed]
    notes = [f"- `{result['case']}`: {note}" for result in results for note in result["notes"]]
    if notes:
        lines += ["", "Notes:", "", *dict.fromkeys(notes)]
    lines += ["", "The bottleneck of each case:", ""]
    lines += [f"- `{result['case']}`: {result['limits']}" for result in results if result["rows"]]
    return "\n".join(lines) + "\n"


def write(out: Path, about: Mapping[str, Any], results: Sequence[dict[str, Any]], rates: Rates) -> str:
    """Write results.md and results.json; return the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    complete = with_floors(results, rates)
    text = markdown(about, complete, rates)
    record = {**about, "rates": rates.record(), "cases": complete}
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / "results.md").write_text(text)
    return text


def marks(device: str) -> tuple[str, str]:
    """Return the two comments that enclose the results of a device on a page."""
    return f"<!-- speed {device}: begin -->", f"<!-- speed {device}: end -->"


def rewrite_page(page: Path, device: str, text: str) -> None:
    """Replace what is between the markers of the page with the results."""
    begin, end = marks(device)
    before = page.read_text() if page.is_file() else ""
    if before.count(begin) != 1 or before.count(end) != 1 or before.index(begin) > before.index(end):
        raise SystemExit(f"--page: {page} needs one line {begin} followed by one line {end}")
    title = {"cpu": "## Results on the CPU", "cuda": "## Results on a GPU"}[device]
    head, rest = before.split(begin)
    page.write_text(f"{head}{begin}\n{title}\n\n{text}{end}{rest.split(end)[1]}")


def check_page(page: Path, device: str) -> None:
    """Exit unless the page has the markers, before any long work."""
    begin, end = marks(device)
    text = page.read_text() if page.is_file() else ""
    if begin not in text or end not in text:
        raise SystemExit(f"--page: {page} needs one line {begin} followed by one line {end}")
