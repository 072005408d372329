"""What a run of the suite leaves behind: a table in Markdown, the same as JSON, and the marked part of a page of the docs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.floors import Floor, Rates
from benchmarks.timing import duration, table

HEADER = ["case", "work", "peer", "credibly", "peer's time", "ratio", "spread", "goal", "", "floor", "over the floor"]


def with_floors(results: Sequence[dict[str, Any]], rates: Rates) -> list[dict[str, Any]]:
    """The results, every row that has a floor with its seconds on this machine and our distance from it."""
    return [{**result, "rows": [_with_floor(row, rates) for row in result["rows"]]} for result in results]


def _with_floor(row: dict[str, Any], rates: Rates) -> dict[str, Any]:
    if not row.get("floor"):
        return {**row, "floor_s": None, "over_floor": None}
    least = Floor(**row["floor"]).seconds(rates)
    return {**row, "floor_s": least, "over_floor": row["credibly_s"] / least}


def cells(case: str, row: Mapping[str, Any]) -> list[str]:
    """One row of the table."""
    told = {True: "met", False: "missed", None: ""}[row["met"]]
    return [
        case,
        row["what"],
        row["peer"] or "none found",
        duration(row["credibly_s"]),
        "" if row["baseline_s"] is None else duration(row["baseline_s"]),
        "" if row["ratio"] is None else f"{row['ratio']:.3g}",
        "" if row["lowest"] is None else f"{row['lowest']:.3g} .. {row['highest']:.3g}",
        row["goal"] or "",
        told,
        "" if row["floor_s"] is None else duration(row["floor_s"]),
        "" if row["over_floor"] is None else f"{row['over_floor']:.1f} x",
    ]


def markdown(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]], rates: Rates) -> str:
    """The table, what it was measured on, and a line on what limits each case."""
    machine = about["machine"]
    words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items() if value is not None)
    versions = ", ".join(f"{name} {version}" for name, version in about["peers"].items() if version)
    absent = ", ".join(name for name, version in about["peers"].items() if not version)
    lines = [
        f"Machine: {words}. Rates: {rates}. Peers: {versions or 'none'}{f' (not found: {absent})' if absent else ''}.",
        f"{about['repeats']} turns of {about['turn_s']:g} s each; the ratio is the peer's median time over ours, the spread its lowest "
        "and highest value in any one turn.",
        "",
        table(HEADER, [cells(result["case"], row) for result in results for row in result["rows"]]),
    ]
    failed = [f"- `{result['case']}`: {result['failure']}" for result in results if result["failure"]]
    if failed:
        lines += ["", "Without a result:", "", *failed]
    noted = [f"- `{result['case']}`: {note}" for result in results for note in result["notes"]]
    if noted:
        lines += ["", "Notes of the run:", "", *dict.fromkeys(noted)]
    lines += ["", "What limits each case:", ""]
    lines += [f"- `{result['case']}`: {result['limits']}" for result in results if result["rows"]]
    return "\n".join(lines) + "\n"


def write(out: Path, about: Mapping[str, Any], results: Sequence[dict[str, Any]], rates: Rates) -> str:
    """Writes results.md and results.json; gives the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    complete = with_floors(results, rates)
    text = markdown(about, complete, rates)
    record = {**about, "rates": rates.record(), "cases": complete}
    (out / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / "results.md").write_text(text)
    return text


def marks(device: str) -> tuple[str, str]:
    """The two comments of a page between which the results of a device stand."""
    return f"<!-- speed {device}: begin -->", f"<!-- speed {device}: end -->"


def rewrite_page(page: Path, device: str, text: str) -> None:
    """Puts the results between the marks of the page, in the place of what stood there."""
    begin, end = marks(device)
    before = page.read_text() if page.is_file() else ""
    if before.count(begin) != 1 or before.count(end) != 1 or before.index(begin) > before.index(end):
        raise SystemExit(f"--page: {page} needs one line {begin} and after it one line {end}")
    title = {"cpu": "## Results on the CPU", "cuda": "## Results on a GPU"}[device]
    head, rest = before.split(begin)
    page.write_text(f"{head}{begin}\n{title}\n\n{text}{end}{rest.split(end)[1]}")


def check_page(page: Path, device: str) -> None:
    """Refuses a page without the marks before anything long is begun."""
    begin, end = marks(device)
    text = page.read_text() if page.is_file() else ""
    if begin not in text or end not in text:
        raise SystemExit(f"--page: {page} needs one line {begin} and after it one line {end}")
