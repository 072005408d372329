"""Findings about a fit: each is a sentence with its number, a severity and recommendations.

A check returns None if the metrics it needs are missing or it has nothing to report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from credibly.diagnostics.verdict import (
    E_BFMI_LOW,
    ESS_PER_CHAIN,
    ESS_TOTAL,
    ONE_START,
    RHAT_GOOD,
    RHAT_POOR,
    RHAT_USABLE,
)
from credibly.metrics import scores as metrics
from credibly.report.metric_columns import LEVEL, baseline_of, format_number
from credibly.report.page import Recommendation
from credibly.report.recommendations import (
    compare_command,
    noise_option,
    refit_command,
    use_heteroscedastic_noise,
    use_sampling,
)
from credibly.report.row_statistics import (
    confidence_gap,
    interval_coverage,
    log_density_per_row,
    loss_by_confidence,
    ood_auroc,
    residual_rank_correlation,
    standard_error,
)
from credibly.tables.fit_summary import FitSummary

# Severities. PASS supports the fit, NOTE is neutral.
PASS, NOTE, WARN, FAIL = range(4)

# Interval levels checked besides 90%.
LOWER_LEVELS = (0.5, 0.8)
FEW_HELD_OUT, ENOUGH_HELD_OUT = 30, 100
FEW_ROWS, ENOUGH_ROWS = 30, 100


@dataclass(frozen=True)
class Finding:
    """A sentence about the fit, its severity (PASS, NOTE, WARN or FAIL), and what to do about it."""

    severity: int
    text: str
    recommendations: tuple[Recommendation, ...] = ()


def held_out_rows(facts: FitSummary) -> Finding | None:
    """Check that the metrics are on enough held-out rows."""
    n = len(facts.y)
    if facts.on == "training":
        command = refit_command(facts, "--holdout", "0.2")
        text = "No rows were held out: all metrics are on training rows, so expect worse on new data."
        return Finding(WARN, text, (Recommendation("Hold out a fifth of the rows to test on.", command),))
    if n >= ENOUGH_HELD_OUT:
        return None
    error = 2 * metrics.coverage_standard_error(LEVEL, n)
    text = f"Only {n} held-out rows: a coverage of 90% can only be measured to within ±{error:.0%}."
    if n >= FEW_HELD_OUT:
        return Finding(NOTE, text)
    advice = "Test on more rows: hold out more, or run `credibly evaluate` on a separate table."
    return Finding(WARN, text, (Recommendation(advice, refit_command(facts, "--holdout", "0.4")),))


def baseline(facts: FitSummary) -> Finding | None:
    """Check that the fit beats a prediction that ignores the columns."""
    always = baseline_of(facts.task)
    own, base = facts.figures.get("log_density"), facts.baseline.get("log_density")
    if own is None or base is None or math.isnan(own) or math.isnan(base):
        return None
    if own == -math.inf:
        return Finding(FAIL, "At least one observed value had zero predicted probability (log density -inf).")
    error = standard_error(log_density_per_row(facts))
    gain = own - base
    scores = f"log density {format_number(own)} vs {format_number(base)} nats per row"
    advice = (
        Recommendation("Check that the columns carry information about the target; add columns or rows that do."),
        Recommendation("Try the other methods on the same rows.", compare_command(facts)),
    )
    if gain <= 0:
        return Finding(FAIL, f"No better than always predicting {always}: {scores}.", advice)
    if gain <= 2 * error:
        within = f"a gain within its error of ±{2 * error:.2g}"
        text = f"Not clearly better than always predicting {always}: {scores}, {within}."
        return Finding(WARN, text, advice)
    return Finding(PASS, f"Better than always predicting {always}: {scores}{_improvement(facts)}.")


def _improvement(facts: FitSummary) -> str:
    if facts.task == "regression":
        own, base = facts.figures.get("rmse"), facts.baseline.get("rmse")
        return f"; RMSE {format_number(own)} vs {format_number(base)}" if own is not None and base else ""
    if facts.task == "survival":
        return f"; concordance {facts.figures['concordance']:.2f}, where 0.5 is chance"
    own, base = facts.figures.get("accuracy"), facts.baseline.get("accuracy")
    return f"; accuracy {own:.0%} vs {base:.0%}" if own is not None and base is not None else ""


def coverage(facts: FitSummary) -> Finding | None:
    """Check the coverage of 90% intervals or prediction sets against its binomial error."""
    observed = facts.figures.get("coverage")
    if observed is None or math.isnan(observed):
        return None
    n = len(facts.y)
    error = metrics.coverage_standard_error(LEVEL, n)
    regression = facts.task != "classification"
    what = "90% intervals" if regression else "90% prediction sets"
    low, high = max(LEVEL - 2 * error, 0), min(LEVEL + 2 * error, 1)
    chance = f"with {n} rows, {low:.0%} to {high:.0%} is within chance"
    if observed < low:
        severe = observed < LEVEL - 4 * error and observed < 0.8
        text = f"Overconfident: the {what} cover only {observed:.1%} of the values ({chance})."
        return Finding(FAIL if severe else WARN, text, (*use_heteroscedastic_noise(facts), *use_sampling(facts)))
    if regression and observed > high:
        text = f"Underconfident: the {what} cover {observed:.1%} of the values ({chance}), wider than necessary."
        return Finding(NOTE, text)
    if not regression:
        return Finding(PASS, f"The {what} contain the true class for {observed:.1%} of the rows.")
    return Finding(PASS, f"The {what} cover {observed:.1%} of the values ({chance}).")


def lower_levels(facts: FitSummary) -> Finding | None:
    """Check narrower intervals, which may be overconfident even if the 90% ones are not.

    The limit is 2.5 standard errors instead of 2, since several levels are tested.
    """
    if facts.task != "regression" or "coverage" not in facts.figures:
        return None
    found = []
    for level, observed in zip(LOWER_LEVELS, interval_coverage(facts, LOWER_LEVELS)):
        least = level - 2.5 * metrics.coverage_standard_error(level, len(facts.y))
        if observed < least:
            found.append(f"the {level:.0%} intervals cover {observed:.1%} (at least {least:.0%} expected)")
    if not found:
        return None
    text = f"Overconfident at lower levels: {', '.join(found)}."
    return Finding(WARN, text, (*use_heteroscedastic_noise(facts), *use_sampling(facts)))


def confidence(facts: FitSummary) -> Finding | None:
    """Check mean confidence against accuracy."""
    found = confidence_gap(facts)
    if found is None:
        return None
    confident, accuracy, error = found
    text = f"mean confidence {confident:.1%}, accuracy {accuracy:.1%}"
    if confident > accuracy + 2 * error:
        severe = confident > accuracy + 4 * error and confident - accuracy > 0.05
        text = f"Overconfident: {text}, a larger gap than chance explains."
        return Finding(FAIL if severe else WARN, text, use_sampling(facts))
    if confident < accuracy - 2 * error:
        severe = confident < accuracy - 4 * error and accuracy - confident > 0.1
        return Finding(WARN if severe else NOTE, f"Underconfident: {text}.")
    return Finding(PASS, f"Confidence matches accuracy within chance: {text}.")


def chains(facts: FitSummary) -> Finding | None:
    """Check the convergence diagnostics of a sampler."""
    found = facts.diagnostics
    if found is None:
        return None
    main, *others = found.judged.values()
    if not found.ok and (not main.moving or found.still or any(space.nonfinite for space in (main, *others))):
        return Finding(FAIL, f"The chains failed. {found.verdict}")
    what, space = max(found.judged.items(), key=lambda item: item[1].rhat_most)
    fewest = min(one.ess_most for one in found.judged.values())
    if found.ok:
        agree = f"The chains agree (R-hat up to {space.rhat_most:.3f}; 1 is perfect)"
        text = f"{agree} and give {fewest:,.0f} effective draws."
        return Finding(NOTE, f"{text} {ONE_START}") if found.one_start else Finding(PASS, text)
    poor = not space.rhat_most <= RHAT_POOR
    wanted = min(ESS_TOTAL, ESS_PER_CHAIN * found.chains)
    problems, advice = [], []
    draws, warmup = int(facts.settings.get("draws") or 0), int(facts.settings.get("warmup") or 0)
    known = draws > 0 and warmup > 0
    if space.rhat_most > RHAT_USABLE:
        about = "" if space is main else f" about the {what}"
        problems.append(f"chains disagree{about} (R-hat up to {space.rhat_most:.2f}; {RHAT_GOOD} or less is good)")
        times = 4 if poor else 2
        if known:
            options = ("--set", f"draws={draws * times}", "--set", f"warmup={warmup * times}")
            advice.append(Recommendation(f"Run the chains {times} times as long.", refit_command(facts, *options)))
    elif fewest < wanted:
        problems.append(f"only {fewest:,.0f} effective draws ({wanted} recommended)")
        times = math.ceil(wanted / max(fewest, 1))
        if known:
            command = refit_command(facts, "--set", f"draws={draws * times}")
            advice.append(Recommendation(f"Take {times} times as many draws.", command))
    if found.divergences:
        problems.append(f"{found.divergences:,} divergent trajector{'y' if found.divergences == 1 else 'ies'}")
        if "target_accept" in facts.settings:
            command = refit_command(facts, "--set", "target_accept=0.95")
            advice.append(Recommendation("Take smaller steps to avoid divergences.", command))
    if found.e_bfmi is not None and min(found.e_bfmi) < E_BFMI_LOW:
        problems.append(f"energy mixes slowly (E-BFMI {min(found.e_bfmi):.2f}; at least {E_BFMI_LOW} is wanted)")
        if known and not advice:
            advice.append(Recommendation("Warm up longer.", refit_command(facts, "--set", f"warmup={2 * warmup}")))
    text = f"The chains: {found.verdict}"
    if problems:
        text = f"The posterior is not explored well enough: {'; '.join(problems)}."
    return Finding(FAIL if poor else WARN, text, tuple(advice))


def epistemic(facts: FitSummary) -> Finding | None:
    """Check that there is any epistemic uncertainty."""
    if float(facts.predictive.epistemic.max()) > 0:
        return None
    why = "one set of weights" if facts.predictive.draws == 1 else "its draws do not differ"
    text = (
        f"No epistemic uncertainty: {facts.method} ({why}) is as confident far from the data as close to it, and "
        "cannot flag unusual inputs."
    )
    return Finding(WARN, text, use_sampling(facts))


def training_size(facts: FitSummary) -> Finding | None:
    """Check the number of training rows, alone and against the number of parameters."""
    if facts.rows < ENOUGH_ROWS:
        severity = WARN if facts.rows < FEW_ROWS else NOTE
        advice = Recommendation("Add training rows if you can.")
        return Finding(severity, f"Only {facts.rows} training rows: every additional row helps.", (advice,))
    if facts.rows >= facts.parameters:
        return None
    ratio = f"The network has {facts.parameters:,} parameters for {facts.rows:,} rows"
    if facts.method == "mle":
        return Finding(WARN, f"{ratio} and no prior to regularise them: it may overfit.", use_sampling(facts))
    return Finding(NOTE, f"{ratio}: where the data say little, predictions follow the prior.")


def unusual_inputs(facts: FitSummary) -> Finding | None:
    """Check that the ood score separates rows with shuffled columns from real ones."""
    found = ood_auroc(facts)
    if found is None:
        return None
    area, error = found
    if area - 2 * error > 0.5:
        higher = f"a row with shuffled columns has a higher ood score than a real row {100 * area:.0f} of 100 times"
        return Finding(PASS, f"Less confident on unusual inputs: {higher}.")
    text = (
        f"The ood score does not separate rows with shuffled columns from real ones (AUROC {area:.2f}; 0.5 is chance): "
        "either the columns are nearly independent, or the model does not notice. Do not rely on the ood column to "
        "find unusual inputs."
    )
    return Finding(NOTE, text)


def changing_noise(facts: FitSummary) -> Finding | None:
    """Check whether errors depend on the predicted value more than the intervals do."""
    if facts.kind != "regression" or noise_option(facts) == "heteroscedastic" or len(facts.y) < 50:
        return None
    correlation = residual_rank_correlation(facts)
    if correlation is None or abs(correlation) < 3 / math.sqrt(len(facts.y) - 1):
        return None
    trend, large, small = ("grow", "narrow", "wide") if correlation > 0 else ("shrink", "wide", "narrow")
    text = (
        f"Errors {trend} with the predicted value (rank correlation {correlation:.2f}) more than the intervals do: "
        f"intervals are too {large} for large predictions and too {small} for small ones."
    )
    return Finding(WARN, text, use_heteroscedastic_noise(facts))


def heavy_tails(facts: FitSummary) -> Finding | None:
    """Check for more outliers than normal noise explains."""
    if facts.kind != "regression" or noise_option(facts) == "student":
        return None
    error = torch.as_tensor(facts.y) - facts.predictive.mean.cpu().double()
    outliers = int((error.abs() > 4 * facts.predictive.std.cpu().double()).sum())
    # A normal distribution has 6 in 100,000.
    if outliers < max(2, 0.001 * len(facts.y)):
        return None
    text = (
        f"{outliers} of {len(facts.y):,} values lie more than 4 standard deviations from their prediction; normal "
        "noise would give almost none."
    )
    advice = Recommendation("Use noise with heavy tails (Student t).", refit_command(facts, "--noise", "student"))
    return Finding(WARN, text, (advice,))


def confidence_and_error(facts: FitSummary) -> Finding | None:
    """Check that less confident predictions have larger errors."""
    found = loss_by_confidence(facts)
    if found is None:
        return None
    confident, rest, error = found
    scores = describe_halves(facts, confident, rest)
    if rest - confident > 2 * error:
        return Finding(PASS, f"Errors are larger where it is less confident: {scores}.")
    if confident - rest > 3 * error:
        text = f"Errors are larger where it is more confident, the wrong way round: {scores}."
        return Finding(WARN, text, use_sampling(facts))
    return Finding(
        NOTE, f"Confidence does not separate small errors from large ones here: {scores}, a difference within chance."
    )


def describe_halves(facts: FitSummary, confident: float, rest: float) -> str:
    """Describe the mean loss of the more confident half of the rows and of the rest."""
    where = "in the more confident half of the rows"
    if facts.task == "regression":
        return f"RMSE {format_number(math.sqrt(confident))} {where}, {format_number(math.sqrt(rest))} in the other"
    return f"error rate {confident:.1%} {where}, {rest:.1%} in the other"


CHECKS = (
    held_out_rows,
    baseline,
    coverage,
    lower_levels,
    confidence,
    chains,
    epistemic,
    training_size,
    unusual_inputs,
    changing_noise,
    heavy_tails,
    confidence_and_error,
)
