"""Verdicts, metrics per class and importance of columns: for the terminal and as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from credibly.cli.console import format_number, print_metrics, print_table, print_wrapped
from credibly.cli.output import in_markup

if TYPE_CHECKING:
    from credibly.tables.fit_summary import FitSummary

# Most classes in the table on the terminal.
CLASSES = 12


def print_summary(title: str, facts: FitSummary, several: dict[str, float] | None = None) -> None:
    """Print the metrics of a fit (`several`: of several targets), of its classes, and the verdict with its findings."""
    from credibly.report import assess
    from credibly.report.evaluated_rows import origin

    print_metrics(title, facts.figures if several is None else several, facts.baseline if several is None else {})
    if facts.classes is not None and len(facts.classes) <= CLASSES:
        print_wrapped("")
        _print_classes(facts)
    found = assess(facts)
    first, *rest = found.lines
    lines = (first if several is None else f"{facts.target}: {first}", *rest)
    print_wrapped("", origin(facts), "", *lines, *(f"- {reason}" for reason in found.reasons), "")


def verdict_of(facts: FitSummary) -> list[str]:
    """Return the lines of the verdict and the sentences of its findings."""
    from credibly.report import assess

    return list(assess(facts).sentences)


def details_of(facts: FitSummary) -> dict[str, Any]:
    """Return everything beyond the metrics of a fit as plain JSON values: verdict, classes, importance, guarantee."""
    from credibly.report import assess

    return {
        "assessment": assess(facts).to_dict(),
        "by_class": _classes(facts),
        "confusion_matrix": _confusion(facts),
        "importance": None if facts.importance is None else facts.importance.to_dict(),
        "effects": {effect.name: effect.to_dict() for effect in facts.effects},
        "guarantee": facts.guarantee,
        "warnings": list(facts.warnings),
        "choices": [dict(vars(one)) for one in facts.choices],
    }


def _classes(facts: FitSummary) -> dict[str, dict[str, float]] | None:
    """Return the metrics of each class by name."""
    from credibly.report.class_findings import metrics_by_class

    found = metrics_by_class(facts)
    if found is None or facts.classes is None:
        return None
    columns = {name: column.tolist() for name, column in found._asdict().items()}
    return {name: {key: values[k] for key, values in columns.items()} for k, name in enumerate(facts.classes)}


def _confusion(facts: FitSummary) -> list[list[int]] | None:
    """Return the rows by class and most probable class."""
    if facts.classes is None:
        return None
    import torch

    from credibly.metrics.classes import confusion_matrix

    y = torch.as_tensor(facts.y).long()
    rows: list[list[int]] = confusion_matrix(facts.predictive.probabilities.cpu(), y).tolist()
    return rows


def _print_classes(facts: FitSummary) -> None:
    """Print the metrics of each class, and the confusion matrix."""
    from rich.table import Table

    found, matrix = _classes(facts), _confusion(facts)
    assert found is not None
    assert matrix is not None
    table, counts = (Table(box=None, pad_edge=False, header_style="dim") for _ in range(2))
    table.add_column("class", no_wrap=True)
    counts.add_column("rows of ... predicted as", no_wrap=True)
    keys = ("rows", "recall", "precision", "f1", "roc_auc", "average_precision")
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right", no_wrap=key != "average_precision")
    for name, values in found.items():
        counts.add_column(in_markup(name), justify="right")
        shown = [f"{values[key]:,.0f}" if key == "rows" else _number(values[key]) for key in keys]
        table.add_row(in_markup(name), *shown)
    for name, row in zip(found, matrix):
        counts.add_row(in_markup(name), *(f"{count:,}" for count in row))
    print_table(table)
    print_wrapped("")
    print_table(counts)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else format_number(value)
