"""Which fits of a comparison can be relied on, and which of them to recommend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from credibly.report.assessment import assess
from credibly.report.calibration_findings import confidence, coverage, other_levels
from credibly.report.finding import FAIL, WARN, Finding
from credibly.report.row_statistics import log_density_per_row, standard_error
from credibly.report.sampling import sampling
from credibly.tables.fit_summary import FitSummary


def chains(facts: FitSummary) -> Finding | None:
    """Return the finding on the chains of a sampler."""
    found = sampling(facts)
    return None if found is None else found[1]


# A warning by one of these makes a fit unreliable: chains that have not mixed, intervals or probabilities that are off.
DECISIVE = (chains, coverage, other_levels, confidence)


@dataclass(frozen=True)
class Lead:
    """Mean difference in log density per row between two fits, with its standard error over the rows."""

    mean: float
    error: float

    @property
    def is_chance(self) -> bool:
        """Whether it is within two standard errors."""
        return abs(self.mean) <= 2 * self.error


def doubts(facts: FitSummary) -> tuple[Finding, ...]:
    """Return the findings that make a fit unreliable; none for one that can be recommended."""
    failed = [finding for finding in assess(facts).findings if finding.severity == FAIL]
    checked = [finding for check in DECISIVE if (finding := check(facts)) is not None and finding.severity >= WARN]
    return tuple(dict.fromkeys([*failed, *checked]))


def predictive_doubts(facts: FitSummary) -> tuple[Finding, ...]:
    """Return the findings that make predictions unreliable, whatever they come from; for a model without posterior."""
    checks = (coverage, other_levels, confidence)
    return tuple(finding for check in checks if (finding := check(facts)) is not None and finding.severity >= WARN)


def recommended(facts: Mapping[str, FitSummary]) -> str | None:
    """Return the reliable fit with the highest log density, or None if none is reliable."""
    reliable = {name: float(log_density_per_row(one).mean()) for name, one in facts.items() if not doubts(one)}
    return max(reliable, key=lambda name: reliable[name]) if reliable else None


def lead_over(one: FitSummary, other: FitSummary) -> Lead:
    """Return by how much one fit predicts better than another on the same rows."""
    difference = log_density_per_row(one) - log_density_per_row(other)
    return Lead(float(difference.mean()), standard_error(difference))


def recommendation_text(facts: Mapping[str, FitSummary], boosting: FitSummary | None = None) -> list[str]:
    """Return sentences on which fit to use, and on how it compares with gradient boosting."""
    chosen = recommended(facts)
    if chosen is None:
        return [
            f"No method is recommended: {'it is' if len(facts) == 1 else 'all are'} unreliable here (see the verdicts)."
        ]
    found = [f"Recommended: {chosen}, the reliable method with the highest log density."]
    if boosting is not None:
        lead = lead_over(facts[chosen], boosting)
        size = f"{abs(lead.mean):.3f} ± {2 * lead.error:.3f} nats per row"
        result = f"better by {size}" if lead.mean > 0 else f"worse by {size}"
        if lead.is_chance:
            result += ", which may be chance"
        found.append(f"Against gradient boosting, the model to beat, {chosen} is {result}.")
    return found
