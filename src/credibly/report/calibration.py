"""The section on calibration: coverage of intervals and PIT, or the reliability of probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from credibly import plot
from credibly.metrics import scores as metrics
from credibly.report.calibration_findings import bias
from credibly.report.evaluated_rows import count_of_rows
from credibly.report.page import Column, Section, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.report.row_statistics import confidence_gap, interval_coverage, pit, top_probability
from credibly.report.significance import CHANCE, binomial_range, sum_tails
from credibly.report.survival import censored_section
from credibly.tables.fit_summary import FitSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = (0.5, 0.8, 0.9, 0.95)


def calibration_section(facts: FitSummary) -> Section:
    """Compare nominal with observed coverage, or confidence with accuracy."""
    if facts.task == "survival":
        return censored_section(facts)
    return _interval_section(facts) if facts.task == "regression" else _reliability_section(facts)


def _interval_section(facts: FitSummary) -> Section:
    n = len(facts.y)
    rows: list[tuple[Value, ...]] = []
    off = []
    for level, observed in zip(LEVELS, interval_coverage(facts, LEVELS)):
        low, high = binomial_range(level, n)
        result = "too narrow" if observed < low else "too wide" if observed > high else "calibrated"
        off += [f"{level:.0%} intervals are {result}"] if result != "calibrated" else []
        rows.append((f"{level:.0%}", f"{observed:.1%}", f"{low:.0%} to {high:.0%}", result))
    head = (Column("Interval"), Column("Coverage"), Column("Within chance"), Column("Result"))
    text = (
        "A 90% interval should cover 9 values in 10. One that covers fewer is overconfident: decisions based on it go "
        f"wrong more often than expected. On {count_of_rows(facts)}, coverage is only known approximately: calibrated "
        f"intervals leave the range within chance at either end with a probability of {CHANCE:.1%}, so that several "
        "levels can be tested at once.",
    )
    finding = f"At all {len(LEVELS)} levels, coverage is within chance of its nominal value."
    if off:
        finding = f"More than chance explains: {', '.join(off)}."
    found = bias(facts)
    findings = (finding,) if found is None else (finding, found.text)
    curve = picture(
        "coverage",
        lambda ax: plot.coverage_curve(facts.predictive, facts.y, ax=ax),
        title="Observed against nominal coverage",
        size=(4.8, 4.0),
        alt=f"Observed against nominal coverage. {' '.join(f'{r[0]}: {r[1]}.' for r in rows)}",
        caption="Intervals are too narrow below the line, too wide above it, and within chance in the grey band.",
    )
    return Section("Is it calibrated?", text, Table(head, tuple(rows)), (curve, _pit_picture(facts)), findings)


def _pit_picture(facts: FitSummary) -> Picture:
    values = pit(facts)
    n, bins = len(values), int(min(20, max(5, len(values) // 15)))
    low, high = (edge * bins for edge in binomial_range(1 / bins, n))

    def paint(ax: Axes) -> None:
        heights, edges = np.histogram(values, np.linspace(0, 1, bins + 1))
        ax.axhspan(low, high, color=plot.INK, alpha=0.16, linewidth=0)
        ax.stairs(heights * bins / n, edges, fill=True, color=plot.BLUE, alpha=0.55)
        ax.axhline(1, color=plot.INK, linestyle="--", linewidth=1)
        ax.set(xlabel="quantile of the observed value", ylabel="density", xlim=(0, 1))

    return picture(
        "pit",
        paint,
        title="PIT histogram",
        size=(4.8, 4.0),
        alt=f"Histogram of the predictive CDF at the observed values, mean {float(values.mean()):.2f}.",
        caption="Where observed values fall in their predictive distributions: flat is calibrated, a U is too narrow, "
        "a hill too wide, a slope biased. Bars inside the grey band are within chance.",
    )


def _reliability_section(facts: FitSummary) -> Section:
    found = metrics.calibration(facts.predictive.probabilities.cpu(), torch.as_tensor(facts.y).long())
    gap = confidence_gap(facts)
    findings: tuple[str, ...] = ()
    caption = f"Calibration error {float(found.ece):.3f}."
    if gap is not None:
        confidence, accuracy, error = gap
        fewer, more = sum_tails(round(accuracy * len(facts.y)), top_probability(facts))
        result = "overconfident" if fewer < CHANCE else "underconfident" if more < CHANCE else "calibrated"
        scores = f"mean confidence {confidence:.1%}, accuracy {accuracy:.1%}"
        findings = (f"On average {result}: {scores}; the standard error of the accuracy is {error:.1%}.",)
        caption = (
            f"Mean confidence {confidence:.3f}, accuracy {accuracy:.3f}, calibration error {float(found.ece):.3f}."
        )
    drawn = picture(
        "reliability",
        lambda ax: plot.reliability(found, ax=ax),
        title="Reliability diagram",
        size=(4.8, 4.0),
        alt=f"Reliability diagram. {caption}",
        caption=f"{caption} Bars show the fraction of rows, with their number.",
    )
    text = (
        "A probability of 0.8 should be right 8 times in 10. Points on the dashed line are calibrated; below it the "
        "model is overconfident, above it underconfident. Points with few rows are noisy. "
        f"Measured on {count_of_rows(facts)}.",
    )
    return Section("Is it calibrated?", text, None, (drawn,), findings)
