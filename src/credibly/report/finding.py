"""A finding about a fit: a sentence with its number, a severity and recommendations."""

from __future__ import annotations

from dataclasses import dataclass

from credibly.report.page import Recommendation

# Severities. PASS supports the fit, NOTE is neutral.
PASS, NOTE, WARN, FAIL = range(4)


@dataclass(frozen=True)
class Finding:
    """A sentence about the fit, its severity (PASS, NOTE, WARN or FAIL), and what to do about it."""

    severity: int
    text: str
    recommendations: tuple[Recommendation, ...] = ()
