"""The verdict on a fit (good, use with care, do not trust) and the findings behind it.

Nothing here depends on how a method works. What matters about one is read off its predictions (a single draw has no
epistemic uncertainty) or its chains.
"""

from __future__ import annotations

from dataclasses import dataclass

from credibly.core.stages import stage
from credibly.report import findings
from credibly.report.findings import FAIL, NOTE, PASS, WARN, Finding
from credibly.report.once_per_fit import once_per_fit
from credibly.report.page import Recommendation
from credibly.tables.fit_summary import FitSummary

GOOD, CARE, NO_TRUST = VERDICTS = ("good", "use with care", "do not trust")
# Problems first, then what supports the fit, then remarks.
ORDER = (FAIL, WARN, PASS, NOTE)


@dataclass(frozen=True)
class Assessment:
    """One of VERDICTS, a headline that begins with it, and the findings, problems first."""

    verdict: str
    headline: str
    findings: tuple[Finding, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return tuple(finding.text for finding in self.findings)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The headline and the reasons."""
        return (self.headline, *self.reasons)

    @property
    def recommendations(self) -> tuple[Recommendation, ...]:
        """What to do next, without duplicates."""
        return tuple(dict.fromkeys(one for finding in self.findings for one in finding.recommendations))


@once_per_fit
def assess(facts: FitSummary) -> Assessment:
    """Assess a fit by the metrics it has."""
    stage("verdict")
    made = [check(facts) for check in findings.CHECKS]
    found = tuple(sorted((f for f in made if f is not None), key=lambda f: ORDER.index(f.severity)))
    worst = max((f.severity for f in found), default=NOTE)
    if worst == FAIL:
        headline = "Do not trust: the first finding below makes these predictions unusable as they are."
        return Assessment(NO_TRUST, headline, found)
    if worst == WARN:
        count = sum(f.severity == WARN for f in found)
        limits = "the first finding below limits" if count == 1 else f"the first {count} findings below limit"
        return Assessment(CARE, f"Use with care: {limits} how far these predictions can be trusted.", found)
    headline = f"Good: nothing below argues against trusting these predictions on data like {facts.table}."
    return Assessment(GOOD, headline, found)
