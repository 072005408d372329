"""The verdict on a fit: one on its predictions, one on the sampling behind them, and the findings for both.

Predictions are judged by the evaluated rows: good, use with care, do not trust. Sampling is judged by the chains: good,
usable, not enough draws, not mixed, failed. A fit is as good as its predictions unless its chains disagree.

Nothing here depends on how a method works: only its predictions (a single draw has no epistemic uncertainty) and its
chains are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from credibly.core.stages import stage
from credibly.report import findings
from credibly.report.evaluated_rows import kind_of_rows
from credibly.report.finding import FAIL, NOTE, PASS, WARN, Finding
from credibly.report.once_per_fit import once_per_fit
from credibly.report.page import Recommendation
from credibly.report.sampling import FAILED, MIXED, NOT_MIXED, SHORT, USABLE, sampling
from credibly.tables.fit_summary import FitSummary

GOOD, CARE, NO_TRUST = VERDICTS = ("good", "use with care", "do not trust")
# Problems first, then what supports the fit, then remarks.
ORDER = (FAIL, WARN, PASS, NOTE)
# What each grade of the sampling means for the predictions.
SAMPLING = {
    MIXED: "The chains agree on the predictions.",
    USABLE: "The chains agree on the predictions; some diagnostics are beyond their limits.",
    SHORT: "There are fewer effective draws than recommended; more would change the predictions little.",
    NOT_MIXED: "The chains disagree, so another run may predict differently.",
    FAILED: "The chains did not sample the posterior.",
}
TOO_FEW = "There are too few effective draws: a longer run would predict more precisely."


@dataclass(frozen=True)
class Assessment:
    """The verdict on a fit.

    Attributes:
        verdict: overall, one of VERDICTS.
        predictions: on the predictions alone, one of VERDICTS.
        sampling: on the chains alone, one of `sampling.GRADES`; None unless the method is a sampler.
        lines: a line on the predictions and, for a sampler, one on the sampling.
        findings: what the verdicts rest on, problems first.
    """

    verdict: str
    predictions: str
    sampling: str | None
    lines: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def headline(self) -> str:
        """The verdict and what it means, in one sentence that begins with it."""
        line = self.lines[0] if self.predictions == self.verdict else self.lines[-1]
        meaning = line.partition(". ")[2]
        return f"{self.verdict.capitalize()}: {meaning[:1].lower()}{meaning[1:]}"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The sentences of the findings."""
        return tuple(finding.text for finding in self.findings)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The lines and the reasons."""
        return (*self.lines, *self.reasons)

    @property
    def recommendations(self) -> tuple[Recommendation, ...]:
        """The recommendations of all findings, without duplicates."""
        return tuple(dict.fromkeys(one for finding in self.findings for one in finding.recommendations))

    def to_dict(self) -> dict[str, Any]:
        """Return the verdicts and the findings as plain values."""
        severities = ("pass", "note", "warning", "failure")
        return {
            "verdict": self.verdict,
            "predictions": self.predictions,
            "sampling": self.sampling,
            "findings": [{"severity": severities[one.severity], "text": one.text} for one in self.findings],
        }


@once_per_fit
def assess(facts: FitSummary) -> Assessment:
    """Assess a fit by its metrics and, for a sampler, its chains."""
    stage("verdict")
    made = [one for one in (check(facts) for check in findings.CHECKS) if one is not None]
    chains = sampling(facts)
    predictions = _verdict(made)
    lines = [f"Predictions: {predictions}. {_meaning(facts, made)}"]
    grade = None
    if chains is not None:
        grade, found = chains
        made.append(found)
        meaning = TOO_FEW if grade == SHORT and found.severity == WARN else SAMPLING[grade]
        lines.append(f"Sampling: {grade}. {meaning}")
    ordered = tuple(sorted(made, key=lambda one: ORDER.index(one.severity)))
    return Assessment(_verdict(made), predictions, grade, tuple(lines), ordered)


def _verdict(made: list[Finding]) -> str:
    worst = max((one.severity for one in made), default=NOTE)
    return NO_TRUST if worst == FAIL else CARE if worst == WARN else GOOD


def _meaning(facts: FitSummary, made: list[Finding]) -> str:
    """Return a sentence that sums up the findings on the predictions."""
    failures, warnings = (sum(one.severity == severity for one in made) for severity in (FAIL, WARN))
    if failures:
        return f"On {kind_of_rows(facts)} they fail a test that makes them unusable as they are."
    if warnings:
        limits = "1 finding (see below) limits" if warnings == 1 else f"{warnings} findings (see below) limit"
        return f"{limits} how far they can be relied on.".capitalize()
    return f"Nothing below argues against trusting them on data like {facts.evaluated or facts.table}."
