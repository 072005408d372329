"""Pictures drawn on a matplotlib Axes: each function takes `ax` (None makes one) and returns it.

Those of several quantities (`trace`, `ranks`) take `axes` and return a list. Colours are told apart by people with
colour-blindness and read on white and on black; `style()` gives figures the same care for text and lines. An Axes of your own
keeps the style you gave it.
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
