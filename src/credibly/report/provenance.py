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
    what = {"regression": "intervals", "survival": "lower bounds"}.get(facts.task, "prediction sets")
    low, high = binomial_range(level, rows)
    inside = "within" if low <= measured <= high else "outside"
    text: tuple[str, ...] = (
        f"The {what} are calibrated by {found.get('kind', 'conformal')} prediction on {rows:,} rows, which guarantees "
        f"their coverage on average over new rows. The guarantee is marginal: it holds over all rows together, not for "
        f"every group or every value of a column. {_exchangeability(facts)}",
    )
    if facts.task == "survival":
        text += (
            "The lower bound is guaranteed for the observed time, event or censoring, whichever comes first, and so "
            "for the time of the event, which is never earlier. The only assumption about the censoring is that new "
            "rows are censored in the same way. Upper bounds carry no guarantee.",
        )
    finding = (
        f"Promised {level:.0%}, measured {measured:.1%} on {rows:,} rows; {low:.1%} to {high:.1%} is within chance, so "
        f"this is {inside} it."
    )
    findings, marks = [finding], ["pass" if inside == "within" else "warn"]
    if "measured_given" in found:
        given = float(found["measured_given"])
        kind = "both ends" if facts.task == "regression" else "at least one class"
        findings[0] = (
            f"With randomised {what}, which can cover exactly what is promised: {finding[0].lower()}{finding[1:]}"
        )
        findings.append(
            f"The {what} that `predict` writes include {kind}. They cover {given:.1%}, more than promised by design: "
            "a single count or class has a probability that cannot be neglected."
        )
        marks.append("pass" if given >= low else "warn")
    if "measured_jointly" in found:
        together = float(found["measured_jointly"])
        findings[0] = f"Each target alone, on average over them: {finding[0].lower()}{finding[1:]}"
        findings.append(f"All targets together, by the joint intervals: promised {level:.0%}, measured {together:.1%}.")
        marks.append("pass" if low <= together <= high else "warn")
    return Section("The coverage guarantee", text, findings=tuple(findings), marks=tuple(marks))


def _exchangeability(facts: FitSummary) -> str:
    """Return the sentences on which new rows the guarantee holds for, which depends on how rows were held out."""
    if facts.group is not None:
        return (
            f"Rows with the same {facts.group} were held out together, so it is for values of {facts.group} that the "
            f"fit has not seen. It needs exchangeability of these groups: new values of {facts.group} from the same "
            "source, with about as many rows each, without drift over time. With few groups it is approximate."
        )
    if facts.time is not None:
        return (
            f"The rows are the latest by {facts.time}, predicted from earlier ones, so it is for rows that are as much "
            "later than the fit as these were. It needs exchangeability with them: new rows from the same source, "
            "without further drift and without new customers, places or machines."
        )
    return (
        "It needs exchangeability: new rows that come from the same source as these, without drift over time and "
        "without new customers, places or machines."
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
