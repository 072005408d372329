"""Sections on what surrounds a fit: warnings before it, the choice of its settings by folds, the coverage guarantee."""

from __future__ import annotations

import math

from credibly.report.metric_columns import format_number
from credibly.report.page import Column, Section, Table, Value
from credibly.report.significance import binomial_range
from credibly.tables.fit_summary import FitSummary


def warnings_section(facts: FitSummary) -> Section | None:
    """Show what was found in the table before the fit."""
    if not facts.warnings:
        return None
    text = ("Found in the table before the fit. Each may make the metrics below look better than they are.",)
    return Section("Warnings about the table", text, findings=facts.warnings, marks=("warn",) * len(facts.warnings))


def guarantee_section(facts: FitSummary) -> Section | None:
    """Show the promised and the measured coverage of calibrated intervals or prediction sets."""
    found = facts.guarantee
    if found is None:
        return None
    level, measured, rows = float(found["level"]), float(found["measured"]), int(found["rows"])
    what = "intervals" if facts.task == "regression" else "prediction sets"
    low, high = binomial_range(level, rows)
    inside = "within" if low <= measured <= high else "outside"
    text = (
        f"The {what} are calibrated by {found.get('kind', 'conformal prediction')} on {rows:,} rows, which guarantees "
        f"their coverage on average over new rows. The guarantee is marginal: it holds over all rows together, not for "
        "every group or every value of a column. It needs exchangeability: new rows that come from the same source as "
        "these, without drift over time and without new customers, places or machines.",
    )
    finding = (
        f"Promised {level:.0%}, measured {measured:.1%} on {rows:,} rows; {low:.1%} to {high:.1%} is within chance, so "
        f"this is {inside} it."
    )
    return Section(
        "The coverage guarantee", text, findings=(finding,), marks=("pass" if inside == "within" else "warn",)
    )


def choices_section(facts: FitSummary) -> Section | None:
    """Show the candidates that were compared before the fit."""
    if not facts.choices:
        return None
    rows: list[tuple[Value, ...]] = [
        (one.name, one.score, "–" if math.isnan(one.error) else one.error, "chosen" if one.chosen else "")
        for one in sorted(facts.choices, key=lambda one: -one.score if not math.isnan(one.score) else math.inf)
    ]
    head = (
        Column("Candidate"),
        Column("Score", None, 4, "mean log density of rows that the candidate was not fitted to; higher is better"),
        Column("Standard error", None, 4, "a smaller difference may be chance"),
        Column("Choice"),
    )
    chosen = [one for one in facts.choices if one.chosen]
    best = f" Chosen: {chosen[0].name} ({format_number(chosen[0].score)})." if len(chosen) == 1 else ""
    text = (f"Settings that were compared by folds of the training rows before the fit.{best}",)
    return Section("How the settings were chosen", text, Table(head, tuple(rows)))
