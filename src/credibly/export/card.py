"""A model card in Markdown from what a run of `credibly fit` stores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credibly.errors import StoreError
from credibly.storage.guarding import as_store_errors
from credibly.storage.sealed import FILE, read_facts
from credibly.tables.recipe import Recipe

METRICS = {
    "log_density": "log density (nats per row)",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage": "coverage of 90% intervals",
    "width": "mean width of 90% intervals",
    "calibration_error": "calibration error",
    "accuracy": "accuracy",
    "brier": "Brier score",
    "ece": "expected calibration error",
    "set_size": "mean size of 90% prediction sets",
    "balanced_accuracy": "balanced accuracy",
    "roc_auc": "ROC AUC",
    "average_precision": "average precision",
    "concordance": "concordance",
}
# Metrics that are of sets where classes are predicted.
OF_CLASSES = {"coverage": "coverage of 90% prediction sets"}


def model_card(
    path: str | os.PathLike[str], *, verdict: Sequence[str] = (), baseline: Mapping[str, float] | None = None
) -> str:
    """Return the card of a complete run. Raise if the run is unfinished or modified.

    Everything else comes from table.json, which `credibly verify` checks.

    Args:
        path: the run folder.
        verdict: lines of the verdict on the run, the main one first.
        baseline: metrics of predictions without inputs, by name.
    """
    folder = Path(path)
    facts = read_facts(folder)
    if facts["status"] != "complete":
        raise StoreError(f"path: the fit in {os.fspath(path)!r} is not finished. Resume it with `credibly resume`")
    with as_store_errors(f"path: {FILE} of {os.fspath(path)!r}"):
        return _card(facts, verdict, baseline or {})


def _card(facts: dict[str, Any], verdict: Sequence[str], baseline: Mapping[str, float]) -> str:
    preparation, config = facts["preparation"], facts["config"]
    lines = [f"# Model card: {_text(preparation['target'])}", ""]
    lines += [f"Predicts `{_text(preparation['target'])}` with uncertainty. Written by `credibly card` from a run.", ""]
    lines += ["## Data", "", *_data(facts, preparation, config), ""]
    lines += ["## Method", "", *_method(facts, preparation["task"], config), ""]
    lines += ["## Metrics", "", *_metrics(facts, baseline), ""]
    lines += ["## Verdict", "", *_verdict(verdict), ""]
    lines += ["## Limits", "", *_limits(facts, preparation), ""]
    lines += ["## Versions", "", *(f"- {name} {version}" for name, version in facts["versions"].items()), ""]
    return "\n".join(lines)


def _data(facts: dict[str, Any], preparation: dict[str, Any], config: dict[str, Any]) -> list[str]:
    lines = [
        f"- Table: `{_text(Path(str(config['table'])).name)}`, SHA-256 `{config.get('table_sha256') or 'unknown'}`"
    ]
    lines += [f"- Rows of the fit: {facts['rows']:,}", f"- Task: {_text(preparation['task_reason'])}"]
    if preparation["classes"] is not None:
        lines.append(f"- Classes: {', '.join(f'`{_text(name)}`' for name in preparation['classes'])}")
    lines += ["", "| column | used as | remark |", "|---|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(kind)} | {_cell(note)} |" for name, kind, note in preparation["columns"]]
    notes = [*preparation["notes"], *facts["warnings"]]
    return [*lines, *([""] if notes else []), *(f"- {_text(_sentence(note))}" for note in notes)]


def _sentence(note: Any) -> str:
    return str(note.get("text", note)) if isinstance(note, dict) else str(note)


def _method(facts: dict[str, Any], task: str, config: dict[str, Any]) -> list[str]:
    hidden = config.get("hidden") or ()
    network = f"{' and '.join(map(str, hidden))} hidden units, {config['activation']}" if hidden else "linear"
    # The default depends on the task.
    scale = Recipe(task=task, prior_scale=config["prior_scale"]).scale
    prior = f"Normal with standard deviation {scale:g}, divided by the square root of each layer's fan-in"
    return [
        f"- Method: `{config['method']}` ({_text(str(facts['why']))}), seed {config['seed']}",
        f"- Network: {network}; {facts['parameters']:,} parameters",
        f"- Prior: {prior}",
        *([f"- Noise: {config['noise']}"] if task in ("regression", "counts") else []),
        f"- Fitted in {facts['seconds']:,.1f} s",
    ]


def _metrics(facts: dict[str, Any], baseline: Mapping[str, float]) -> list[str]:
    group, time = (facts["config"].get(key) for key in ("group", "time"))
    it, they = ("it", "") if group is None else (f"any row of its {group}", f", nor any of their {group}")
    they += "" if time is None else f", the latest by {time}"
    rows = {
        "cross-validated": f"{facts['held_out']:,} rows, each predicted by a fit that has not seen {it}",
        "held-out": f"{facts['held_out']:,} held-out rows that the fit behind the metrics has not seen{they}",
        "training": "training rows, which the fit has seen: these metrics are optimistic",
    }
    lines = [f"From {rows.get(facts['on'], facts['on'])}.", "", "| metric | value | baseline without inputs |"]
    lines.append("|---|---|---|")
    titles = METRICS | (OF_CLASSES if "set_size" in facts["figures"] else {})
    for name, value in facts["figures"].items():
        other = baseline.get(name)
        shown = "" if not isinstance(other, (int, float)) else f"{other:.4g}"
        lines.append(f"| {_cell(titles.get(name, name))} | {_number(value)} | {shown} |")
    promise = facts["guarantee"]
    if promise is not None:
        measured = promise["measured"]
        lines += [
            "",
            f"Coverage guarantee ({promise['kind']}, {promise['rows']:,} rows): {promise['level']:.0%} on average over"
            f" rows like these; {'not measured' if measured is None else f'measured {measured:.1%}'}.",
        ]
    return lines


def _verdict(verdict: Sequence[str]) -> list[str]:
    if not verdict:
        return ["Not part of this card: `credibly card` computes it from the run."]
    first, *others = verdict
    return [f"**{_text(first)}**", "", *(f"- {_text(line)}" for line in others)]


def _limits(facts: dict[str, Any], preparation: dict[str, Any]) -> list[str]:
    lines = [
        "- Predictions hold for rows like those of the table. The column `ood` of `credibly predict` is near 1 for"
    ]
    lines[0] += " rows unlike them." if facts["ood_levels"] is not None else " rows unlike them; this run has none."
    for column in preparation["used"]:
        if column["kind"] == "numeric":
            lines.append(f"- `{_text(column['name'])}` was between {column['low']:.6g} and {column['high']:.6g}.")
        elif column["kind"] == "categorical":
            count = len(column["levels"]) + len(column["rare"])
            lines.append(f"- `{_text(column['name'])}` had {count} categories; others are treated as unknown.")
    if facts["guarantee"] is None:
        lines.append("- Intervals and sets carry no coverage guarantee.")
    lines.append("- Association is not causation: the model does not predict the effect of an intervention.")
    return lines


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else _cell(str(value))


def _text(value: str) -> str:
    """Return a text on one line, with Markdown markup escaped."""
    plain = " ".join(str(value).split())
    return plain.replace("`", "'").replace("<", "&lt;")


def _cell(value: Any) -> str:
    return _text(str(value)).replace("|", "\\|")
