"""The calibration of predicted times when some of the observed ones are censored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from credibly.metrics.scores import coverage_standard_error
from credibly.metrics.survival import censored_fraction_below
from credibly.report.page import Column, Section, Table, Value
from credibly.report.pictures import picture
from credibly.tables.fit_summary import FitSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
CURVE = np.arange(1, 40) / 40


def censored_section(facts: FitSummary) -> Section:
    """Compare predicted quantiles with the fraction of events before them."""
    signed = torch.as_tensor(facts.y)
    event = signed > 0
    cdf = facts.predictive.cdf(signed.abs())
    fractions = censored_fraction_below(cdf, event, torch.tensor([*LEVELS, *CURVE], dtype=torch.float64)).tolist()
    events = int(event.sum())
    rows: list[tuple[Value, ...]] = []
    off = []
    for level, found in zip(LEVELS, fractions):
        # Censored rows carry less information: the error is that of the events alone.
        error = 2 * coverage_standard_error(level, max(events, 1))
        result = "too late" if found > level + error else "too early" if found < level - error else "calibrated"
        off += [f"the {level:.0%} quantile is {result}"] if result != "calibrated" else []
        rows.append(
            (f"{level:.0%}", f"{found:.1%}", f"{max(level - error, 0):.0%} to {min(level + error, 1):.0%}", result)
        )
    head = (Column("Quantile"), Column("Event by then"), Column("Within chance"), Column("Result"))
    text = (
        f"By its 50% quantile, half of the rows should have had their event. {events:,} of {len(signed):,} rows had "
        "one; a censored row counts by the probability that the prediction itself gives it, so with many censored rows "
        "this is uninformative about late times.",
    )

    def paint(ax: Axes) -> None:
        ax.plot([0, 1], [0, 1], linewidth=0.8, label="calibrated")
        ax.plot(CURVE, fractions[len(LEVELS) :], marker="o", markersize=3, label="observed")
        ax.set(xlabel="predicted quantile", ylabel="fraction of rows with the event by then", xlim=(0, 1), ylim=(0, 1))
        ax.legend()

    finding = f"More than chance explains: {', '.join(off)}." if off else "All quantiles are within chance."
    shown = " ".join(f"{row[0]}: {row[1]}." for row in rows)
    curve = picture(
        "coverage",
        paint,
        title="Observed against predicted quantiles",
        size=(4.8, 4.0),
        alt=f"Fraction of rows with the event by each predicted quantile. {shown}",
        caption="Below the line events come later than predicted, above it earlier.",
    )
    return Section("Is it calibrated?", text, Table(head, tuple(rows)), (curve,), (finding,))
