"""Sections on uncertainty: aleatoric against epistemic, unusual inputs, and whether confidence predicts error."""

from __future__ import annotations

import math

import torch

from credibly import plot
from credibly.report.calibration_findings import describe_order
from credibly.report.evaluated_rows import kind_of_rows
from credibly.report.page import Section
from credibly.report.pictures import Picture, picture
from credibly.report.row_statistics import error_order, loss_per_row, ood_auroc, plotted_rows
from credibly.report.significance import CHANCE
from credibly.tables.fit_summary import FitSummary


def uncertainty_section(facts: FitSummary) -> Section:
    """Compare aleatoric with epistemic uncertainty, and test whether unusual inputs are detected."""
    aleatoric, epistemic = facts.predictive.aleatoric.double(), facts.predictive.epistemic.double()
    total = float((aleatoric + epistemic).mean())
    fraction = float(epistemic.mean()) / total if total > 0 else 0.0
    text = [
        "A prediction is uncertain for two reasons. Aleatoric uncertainty is noise in the target; it remains however "
        "many rows there are. Epistemic uncertainty is lack of knowledge about the model; it shrinks with more rows "
        "and is large far from the data.",
    ]
    findings = []
    pictures = []
    if math.isinf(total):
        findings.append(
            "The noise has infinite variance, so the variance has no epistemic fraction. The intervals are finite."
        )
    elif fraction > 0:
        kind = "entropy" if facts.task == "classification" else "variance"
        shown = f"{fraction:.0%}" if fraction >= 0.01 else "Less than 1%"
        more = "more rows would help" if fraction > 0.3 else "more rows alone would help little; better columns might"
        findings.append(f"{shown} of the mean predictive {kind} is epistemic: {more}.")
        predictive, _ = plotted_rows(facts)
        pictures.append(
            picture(
                "parts",
                lambda ax: plot.uncertainty_parts(predictive, ax=ax).set_xlim(left=0),
                title="Aleatoric and epistemic uncertainty",
                size=(4.8, 3.9),
                alt=f"Aleatoric against epistemic uncertainty per row; {fraction:.0%} of the total is epistemic.",
                caption="One point per row. The higher up, the fewer rows like it the model has seen.",
            )
        )
    else:
        findings.append(f"No epistemic uncertainty: {facts.method} does not show what it does not know.")
    if facts.ood is not None:
        pictures.append(_ood_picture(facts))
    auroc = ood_auroc(facts)
    if auroc is not None:
        text.append(
            "The ood score of a row is the fraction of familiar rows on which the model is more confident: near 1 is "
            "unusual. To test it, each column was shuffled on its own, which keeps the distribution of every column "
            "and breaks the dependence between them."
        )
        findings.append(_auroc_sentence(*auroc))
    return Section("What does it not know?", tuple(text), pictures=tuple(pictures), findings=tuple(findings))


def _ood_picture(facts: FitSummary) -> Picture:
    auroc = ood_auroc(facts)
    shown = "" if auroc is None else f" AUROC {auroc[0]:.2f}."
    shuffled = ", and of rows with shuffled columns" if facts.ood_far is not None else ""
    return picture(
        "ood",
        lambda ax: plot.ood_histogram(facts.ood, facts.ood_far, ax=ax),
        title="Ood score of familiar and unusual inputs",
        size=(4.8, 3.9),
        alt=f"Histogram of the ood score of {kind_of_rows(facts)}{shuffled}.{shown}",
        caption=f"Scores of the {kind_of_rows(facts)}{shuffled}.{shown}",
    )


def _auroc_sentence(area: float, error: float) -> str:
    start = f"A shuffled row has a higher ood score than a real row {area:.0%} of the time (AUROC {area:.2f})"
    if area - 2 * error <= 0.5:
        return f"{start}: no better than chance."
    how = (
        "nearly always" if area > 0.9 else "more often than not" if area > 0.65 else "little more often than by chance"
    )
    return f"{start}: unusual inputs are detected {how}."


def selective_section(facts: FitSummary) -> Section:
    """Show the error on the rows kept when the least confident ones are rejected."""
    heading = "Does uncertainty predict error?"
    if not bool(loss_per_row(facts).any()):
        return Section(heading, (f"All {len(facts.y):,} rows are predicted without error: nothing to show.",))
    text = (
        "Suppose the least confident rows were passed to an expert. Read from right to left: where the curve falls, "
        "low confidence means large error, and the model finds the rows worth a second look.",
    )
    caption = ""
    found = error_order(facts)
    if found is not None:
        shown = describe_order(facts)
        chance = "more than chance explains" if min(found.larger, found.smaller) < CHANCE else "within chance"
        caption = f"{shown[0].upper()}{shown[1:]}: {chance}."
    y = torch.as_tensor(facts.y)
    drawn = picture(
        "risk",
        lambda ax: plot.risk_coverage(facts.predictive, y, ax=ax),
        title="Error on the rows kept",
        size=(4.8, 3.6),
        alt=f"Risk against the fraction of rows kept. {caption}",
        caption=caption,
    )
    return Section(heading, text, pictures=(drawn,))
