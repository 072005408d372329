"""The pages of a fit to several targets: one each, the first of which lists all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from credibly.report import metric_columns
from credibly.report.fit import fit_page
from credibly.report.page import Column, Page, Section, Table, Value
from credibly.tables.fit_summary import FitSummary

FIRST = "report.html"


def target_pages(every: Sequence[FitSummary]) -> dict[str, Page]:
    """Return the page of each target by its file name."""
    names = [FIRST, *(f"report_{k}.html" for k in range(2, len(every) + 1))]
    pages = {name: fit_page(facts) for name, facts in zip(names, every)}
    if len(every) > 1:
        first = pages[FIRST]
        pages[FIRST] = dataclasses.replace(first, sections=(_overview(every, names), *first.sections))
    return pages


def _overview(every: Sequence[FitSummary], names: Sequence[str]) -> Section:
    columns = metric_columns.columns(every[0].task, [facts.figures for facts in every])
    # Targets have different units, so there is no best one.
    shown = [dataclasses.replace(column, best=None) for _, column in columns]
    rows: list[tuple[Value, ...]] = [
        (facts.target, *(facts.figures.get(key, "–") for key, _ in columns), name) for facts, name in zip(every, names)
    ]
    text = (
        f"One network predicts {len(every)} targets, each with its own noise level. This page is about "
        f"{every[0].target}; the other targets have their own pages.",
    )
    return Section("All targets", text, Table((Column("Target"), *shown, Column("Page")), tuple(rows)))
