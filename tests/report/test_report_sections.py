"""Sections on classes, thresholds, columns, the guarantee, warnings and choices."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from credibly import report
from credibly.report.class_findings import COST_RATIOS, metrics_by_class
from credibly.report.evaluated_rows import origin
from credibly.tables.effects import Effect
from credibly.tables.fit_summary import Candidate
from credibly.tables.importance import ColumnImportance, Importance
from html_page import check_self_contained
from tabular import facts_of

# For the tests of words and numbers.
NO_DRAWING = pytest.mark.usefixtures("no_drawing")


def section_of(facts, heading):
    return next((s for s in report.fit_page(facts).sections if s.heading.startswith(heading)), None)


@NO_DRAWING
def test_nothing_is_shown_without_its_values():
    page = report.fit_page(facts_of("diabetes", "ensemble"))
    found = {section.heading for section in page.sections}
    assert not found & {
        "Each class",
        "Which columns matter?",
        "How do predictions depend on them?",
        "The coverage guarantee",
        "Warnings about the table",
        "How the settings were chosen",
    }


@NO_DRAWING
def test_each_class_has_its_metrics():
    facts = facts_of("wine", "ensemble")
    section = section_of(facts, "Each class")
    found = metrics_by_class(facts)
    rows = {row[0]: row for row in section.table.rows}
    assert set(rows) == set(facts.classes)
    for k, name in enumerate(facts.classes):
        assert rows[name][1:3] == (int(found.rows[k]), pytest.approx(float(found.recall[k])))
    weighted = section_of(dataclasses.replace(facts, class_weight="balanced"), "Each class")
    assert "reweighted" in weighted.text[-1]


@NO_DRAWING
def test_thresholds_follow_the_costs():
    facts = facts_of("moons", "ensemble")
    counts = np.bincount(facts.y)
    name = facts.classes[1 if counts[1] <= counts[0] else 0]
    section = section_of(facts, "Thresholds by cost")
    assert section.heading == f"Thresholds by cost: {name}"
    assert [row[1] for row in section.table.rows] == pytest.approx([1 / (1 + ratio) for ratio in COST_RATIOS])
    recalls = [row[2] for row in section.table.rows]
    assert recalls == sorted(recalls)
    check_self_contained(report.render(report.fit_page(facts)))
    assert section_of(facts_of("wine", "ensemble"), "Thresholds by cost") is None


def with_columns(facts, outputs):
    columns = (ColumnImportance("bmi", 0.4, 0.05, 3.0, 0.5), ColumnImportance("<b>", 0.01, 0.02, 0.1, 0.3))
    grid = np.linspace(0, 1, 4)
    curve = np.stack([grid + k for k in range(outputs)], 1) / (1 + outputs)
    effects = (
        Effect("bmi", grid, curve, curve - 0.1, curve + 0.1, 88),
        Effect("<b>", ("a", "b", "long <name> of a level", "d"), curve, curve - 0.1, curve + 0.1, 88),
    )
    return dataclasses.replace(facts, importance=Importance(columns, 88, 5, ("rest",)), effects=effects)


@pytest.mark.parametrize("name, outputs", [("diabetes", 1), ("moons", 2), ("wine", 3)])
def test_importance_and_effects(name, outputs):
    page = report.fit_page(with_columns(facts_of(name, "ensemble"), outputs))
    sections = {section.heading: section for section in page.sections}
    section = sections["Which columns matter?"]
    assert section.table.rows[0] == ("bmi", 0.4, 0.1, 3.0, 1.0)
    assert section.findings == ("Most important: bmi. 2 of 3 columns are within chance of no importance.",)
    assert section.text[-1] == "1 more column matters less."
    assert [p.title for p in sections["How do predictions depend on them?"].pictures] == ["bmi", "<b>"]
    check_self_contained(report.render(page))


@NO_DRAWING
def test_the_guarantee_is_promised_measured_and_qualified():
    facts = facts_of("diabetes", "ensemble")
    found = {"level": 0.9, "measured": 0.904, "rows": 500, "kind": "cross-conformal"}
    section = section_of(dataclasses.replace(facts, guarantee=found), "The coverage guarantee")
    assert "Promised 90%, measured 90.4% on 500 rows" in section.findings[0]
    assert section.marks == ("pass",)
    for word in ("marginal", "exchangeability", "are calibrated by cross-conformal prediction on 500 rows"):
        assert word in section.text[0]
    low = section_of(dataclasses.replace(facts, guarantee=found | {"measured": 0.8}), "The coverage guarantee")
    assert (low.marks, "outside" in low.findings[0]) == (("warn",), True)


@NO_DRAWING
def test_intervals_of_counts_have_two_coverages():
    found = {"level": 0.9, "measured": 0.904, "measured_given": 0.947, "rows": 500, "kind": "cross-conformal"}
    facts = dataclasses.replace(facts_of("diabetes", "ensemble"), guarantee=found)
    section = section_of(facts, "The coverage guarantee")
    assert "exactly what is promised: promised 90%, measured 90.4%" in section.findings[0]
    assert "cover 94.7%" in section.findings[1]
    assert section.marks == ("pass", "pass")


@NO_DRAWING
def test_warnings_and_choices():
    facts = facts_of("diabetes", "ensemble")
    choices = (Candidate("scale 1", -1.2, 0.1), Candidate("scale 3", -1.0, math.nan, chosen=True))
    shown = dataclasses.replace(facts, warnings=("id looks like a row number",), choices=choices)
    assert section_of(shown, "Warnings").findings == ("id looks like a row number",)
    section = section_of(shown, "How the settings were chosen")
    assert section.table.rows == (("scale 3", -1.0, "–", "chosen"), ("scale 1", -1.2, 0.1, ""))
    assert "Chosen: scale 3" in section.text[0]
    check_self_contained(report.render(report.fit_page(shown)))


@NO_DRAWING
def test_groups_and_times_are_named_with_the_rows_and_the_guarantee():
    promise = {"level": 0.9, "measured": 0.9, "rows": 100, "kind": "cross-conformal"}
    facts = dataclasses.replace(facts_of("diabetes", "ensemble"), guarantee=promise, on="cross-validated")
    assert "by a fit to other rows." in origin(facts)
    assert "customers" in section_of(facts, "The coverage guarantee").text[0]
    grouped = dataclasses.replace(facts, group="clinic")
    assert "by a fit to rows with other values of clinic." in origin(grouped)
    words = section_of(grouped, "The coverage guarantee").text[0]
    assert "for values of clinic that the fit has not seen" in words
    assert "without new customers" not in words
    timed = dataclasses.replace(facts, time="day", on="held-out")
    assert "the latest by day, that were held out" in origin(timed)
    refitted = origin(dataclasses.replace(timed, refitted=True))
    assert "the latest by day, predicted by a fit to the earlier ones." in refitted
    assert "latest by day" in section_of(timed, "The coverage guarantee").text[0]
    assert "predicted by a fit to the others." in origin(dataclasses.replace(facts, on="held-out", refitted=True))
