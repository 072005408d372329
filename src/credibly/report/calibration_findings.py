"""Findings on calibration: whether stated probabilities and intervals hold on the evaluated rows.

Every warning needs two things: a probability under calibration below CHANCE, and an effect that matters. Many
checks then rarely cause false alarms, and many rows do not turn a harmless discrepancy into a warning.
"""

from __future__ import annotations

import math

import numpy as np

from credibly.report.finding import FAIL, NOTE, PASS, WARN, Finding
from credibly.report.metric_columns import LEVEL, format_number
from credibly.report.page import Recommendation
from credibly.report.recommendations import (
    noise_option,
    refit_command,
    use_heteroscedastic_noise,
    use_sampling,
)
from credibly.report.row_statistics import (
    confidence_gap,
    error_order,
    interval_coverage,
    pit,
    residual_rank_correlation,
    top_probability,
)
from credibly.report.significance import CHANCE, SEVERE, binomial_range, binomial_tails, sum_tails
from credibly.tables.fit_summary import FitSummary
from credibly.tables.recipe import HEAVY, PREDICTED

# Interval levels checked besides 90 %.
OTHER_LEVELS = (0.5, 0.8, 0.95)
# A coverage or accuracy this close to its nominal value is good enough, however many rows show the difference.
NEGLIGIBLE = 0.02
# Coverage of 90 % intervals below which they cannot be used.
UNUSABLE_COVERAGE = 0.8
# Gap between confidence and accuracy from which probabilities cannot be used.
UNUSABLE_GAP = 0.1
# Coverage of 50 % intervals from which they are of little use.
FAR_TOO_WIDE = 0.75
# Mean of the PIT that counts as a bias: the median prediction lies at least at this quantile distance.
BIAS = 0.05
# Probability of the two tails together in which outliers are counted.
OUTLIER = 0.001
# Rank correlation from which changing noise matters, and rows from which it can be seen.
CORRELATED, ROWS_FOR_NOISE = 0.15, 50


def coverage(facts: FitSummary) -> Finding | None:
    """Check the coverage of 90% intervals or prediction sets against its binomial distribution."""
    observed = facts.figures.get("coverage")
    if observed is None or math.isnan(observed):
        return None
    n = len(facts.y)
    regression = facts.task != "classification"
    what = "90% intervals" if regression else "90% prediction sets"
    low, high = binomial_range(LEVEL, n)
    below, above = binomial_tails(round(observed * n), n, LEVEL)
    chance = f"with {n:,} rows, {low:.1%} to {high:.1%} is within chance"
    if below < CHANCE:
        advice = (*use_heteroscedastic_noise(facts), *use_sampling(facts))
        if LEVEL - observed <= NEGLIGIBLE:
            return Finding(NOTE, f"Slightly overconfident: the {what} cover {observed:.1%} of the values ({chance}).")
        severe = below < SEVERE and observed < UNUSABLE_COVERAGE
        text = f"Overconfident: the {what} cover only {observed:.1%} of the values ({chance})."
        return Finding(FAIL if severe else WARN, text, advice)
    if regression and above < CHANCE and facts.predictive.likelihood.support == "count":
        # Their randomised coverage shows whether they are wider than intervals of integers have to be.
        (randomised,) = interval_coverage(facts, (LEVEL,))
        if binomial_tails(round(randomised * n), n, LEVEL)[1] >= CHANCE:
            more = f"more than {LEVEL:.0%} because they end at integers"
            return Finding(PASS, f"The {what} cover {observed:.1%} of the values, {more}.")
    if regression and above < CHANCE:
        text = f"Underconfident: the {what} cover {observed:.1%} of the values ({chance}), wider than necessary."
        return Finding(NOTE, text)
    if not regression:
        return Finding(PASS, f"The {what} contain the true class for {observed:.1%} of the rows.")
    return Finding(PASS, f"The {what} cover {observed:.1%} of the values ({chance}).")


def other_levels(facts: FitSummary) -> Finding | None:
    """Check intervals of other levels, which may be wrong even if the 90% ones are not."""
    if facts.task != "regression" or "coverage" not in facts.figures:
        return None
    n = len(facts.y)
    narrow = []
    for level, observed in zip(OTHER_LEVELS, interval_coverage(facts, OTHER_LEVELS)):
        below, above = binomial_tails(round(observed * n), n, level)
        if below < CHANCE and level - observed > NEGLIGIBLE:
            least = binomial_range(level, n)[0]
            narrow.append(f"the {level:.0%} intervals cover {observed:.1%} (at least {least:.0%} expected)")
        elif level == OTHER_LEVELS[0] and above < SEVERE and observed > FAR_TOO_WIDE:
            text = f"Far too wide: the {level:.0%} intervals cover {observed:.1%} of the values."
            return Finding(WARN, text, (*use_heteroscedastic_noise(facts), *use_sampling(facts)))
    if not narrow:
        return None
    text = f"Overconfident at other levels: {', '.join(narrow)}."
    return Finding(WARN, text, (*use_heteroscedastic_noise(facts), *use_sampling(facts)))


def bias(facts: FitSummary) -> Finding | None:
    """Check that values lie above and below their predictions equally often."""
    if facts.task != "regression" or "coverage" not in facts.figures:
        return None
    n = len(facts.y)
    mean = float(pit(facts).mean())
    # The PIT of calibrated predictions is uniform, with a variance of 1/12.
    z = (mean - 0.5) * math.sqrt(12 * n)
    if math.erfc(abs(z) / math.sqrt(2)) >= CHANCE or abs(mean - 0.5) <= BIAS:
        return None
    side, off = ("low", "above") if mean > 0.5 else ("high", "below")
    shift = float(np.mean(np.asarray(facts.y, float) - facts.predictive.mean.cpu().double().numpy()))
    text = (
        f"Predictions are systematically too {side}: values lie {off} them by {format_number(abs(shift))} on average, "
        f"at quantile {mean:.2f} of their predictive distribution instead of 0.50."
    )
    return Finding(WARN, text)


def outliers(facts: FitSummary) -> Finding | None:
    """Check for more values far in the tails than the predictive distributions allow."""
    if facts.task != "regression" or "coverage" not in facts.figures:
        return None
    n = len(facts.y)
    # Distance of the PIT to the nearer end.
    far = int((0.5 - np.abs(pit(facts) - 0.5) < OUTLIER / 2).sum())
    tail = binomial_tails(far, n, OUTLIER)[1]
    if far < 2 or tail >= CHANCE:
        return None
    text = (
        f"{far} of {n:,} values lie outside their 99.9% interval; {OUTLIER * n:.2g} would be expected. The tails of "
        "the noise are heavier than the model's."
    )
    # A few outliers concern the far tails alone; the intervals of other levels are checked by themselves.
    severity = WARN if tail < SEVERE else NOTE
    noise = noise_option(facts)
    if noise in HEAVY:
        return Finding(severity, text)
    heavy = "heteroscedastic-student" if noise == "heteroscedastic" else "student"
    advice = Recommendation("Use noise with heavy tails (Student t).", refit_command(facts, "--noise", heavy))
    return Finding(severity, text, (advice,))


def changing_noise(facts: FitSummary) -> Finding | None:
    """Check whether errors depend on the predicted value more than the intervals do."""
    if facts.kind != "regression" or len(facts.y) < ROWS_FOR_NOISE:
        return None
    correlation = residual_rank_correlation(facts)
    if correlation is None or abs(correlation) < CORRELATED:
        return None
    # The correlation of independent ranks is approximately normal with variance 1/(n - 1).
    if math.erfc(abs(correlation) * math.sqrt((len(facts.y) - 1) / 2)) >= CHANCE:
        return None
    trend, large, small = ("grow", "narrow", "wide") if correlation > 0 else ("shrink", "wide", "narrow")
    text = (
        f"Errors {trend} with the predicted value (rank correlation {correlation:.2f}) more than the intervals do: "
        f"intervals are too {large} for large predictions and too {small} for small ones."
    )
    # Mild if the intervals are already allowed to change.
    severity = NOTE if noise_option(facts) in PREDICTED else WARN
    return Finding(severity, text, use_heteroscedastic_noise(facts))


def confidence(facts: FitSummary) -> Finding | None:
    """Check mean confidence against accuracy."""
    found = confidence_gap(facts)
    if found is None:
        return None
    confident, accuracy, _ = found
    fewer, more = sum_tails(round(accuracy * len(facts.y)), top_probability(facts))
    text = f"mean confidence {confident:.1%}, accuracy {accuracy:.1%}"
    gap = confident - accuracy
    if fewer < CHANCE and gap > 0:
        if gap <= NEGLIGIBLE:
            return Finding(NOTE, f"Slightly overconfident: {text}.")
        severe = fewer < SEVERE and gap > UNUSABLE_GAP
        text = f"Overconfident: {text}, a larger gap than chance explains."
        return Finding(FAIL if severe else WARN, text, use_sampling(facts))
    if more < CHANCE and gap < -NEGLIGIBLE:
        severe = more < SEVERE and -gap > UNUSABLE_GAP
        return Finding(WARN if severe else NOTE, f"Underconfident: {text}.")
    return Finding(PASS, f"Confidence matches accuracy within chance: {text}.")


def confidence_and_error(facts: FitSummary) -> Finding | None:
    """Check that less confident predictions have larger errors."""
    found = error_order(facts)
    if found is None:
        return None
    scores = describe_order(facts)
    if found.larger < CHANCE:
        return Finding(PASS, f"Errors are larger where it is less confident: {scores}.")
    if found.smaller < CHANCE:
        text = f"Errors are larger where it is more confident, the wrong way round: {scores}."
        return Finding(WARN, text, use_sampling(facts))
    return Finding(NOTE, f"Confidence does not separate small errors from large ones here: {scores}, within chance.")


def describe_order(facts: FitSummary) -> str:
    """Describe how errors and confidence are ordered, with the error of the more confident half and of the rest."""
    found = error_order(facts)
    assert found is not None
    where = "in the more confident half of the rows"
    if facts.task == "regression":
        halves = f"median error {format_number(found.confident)} {where}, {format_number(found.rest)} in the other"
        return f"rank correlation {found.statistic:.2f}, {halves}"
    area = (found.statistic + 1) / 2
    return f"AUROC {area:.2f}, error rate {found.confident:.1%} {where}, {found.rest:.1%} in the other"
