"""Plots on matplotlib Axes: each function takes `ax` (None creates one) and returns it.

Plots of several quantities (`trace`, `ranks`) take `axes` and return a list. The palette is colour-blind safe and
legible on light and dark backgrounds; `style()` applies the same to text and lines of new figures. An Axes that you
pass keeps its own style.
"""

from credibly.plot.chains import ranks, rhat_histogram, trace
from credibly.plot.predictive import (
    bands,
    coverage_curve,
    decision,
    predicted_observed,
    reliability,
    risk_coverage,
    uncertainty_parts,
)
from credibly.plot.style import BLUE, BOX, DARK, DASHES, GREEN, INK, ORANGE, PALETTE, style
from credibly.plot.tables import class_curves, confusion, free_energy, ood_histogram, surface

__all__ = [
    "BLUE",
    "BOX",
    "DARK",
    "DASHES",
    "GREEN",
    "INK",
    "ORANGE",
    "PALETTE",
    "bands",
    "class_curves",
    "confusion",
    "coverage_curve",
    "decision",
    "free_energy",
    "ood_histogram",
    "predicted_observed",
    "ranks",
    "reliability",
    "rhat_histogram",
    "risk_coverage",
    "style",
    "surface",
    "trace",
    "uncertainty_parts",
]
