"""Findings about the predictions of a fit: number of rows, baseline, epistemic uncertainty, calibration.

A check returns None if the metrics it needs are missing or it has nothing to report.
"""

from __future__ import annotations

import math

import torch

from credibly.report.calibration_findings import (
    bias,
    changing_noise,
    confidence,
    confidence_and_error,
    coverage,
    other_levels,
    outliers,
)
from credibly.report.class_findings import class_frequencies, imbalance
from credibly.report.evaluated_rows import kind_of_rows
from credibly.report.finding import FAIL, NOTE, PASS, WARN, Finding
from credibly.report.metric_columns import LEVEL, baseline_of, format_number
from credibly.report.page import Recommendation
from credibly.report.recommendations import compare_command, refit_command, use_sampling
from credibly.report.row_statistics import log_density_per_row, ood_auroc, standard_error
from credibly.report.significance import binomial_range
from credibly.tables.columns.leaks import leak_in
from credibly.tables.fit_summary import FitSummary

FEW_HELD_OUT, ENOUGH_HELD_OUT = 30, 100
FEW_ROWS, ENOUGH_ROWS = 30, 100
# Standard errors by which a fit must be behind the baseline to be called worse than it.
WORSE = 3.0


def given_away(facts: FitSummary) -> Finding | None:
    """Check that no input gives the target away."""
    found = [leak for leak in map(leak_in, facts.warnings) if leak is not None]
    if not found:
        return None
    more = f" (and {len(found) - 1} more such columns)" if len(found) > 2 else ""
    more = " (and one more such column)" if len(found) == 2 else more
    unless = "These metrics hold only if it is known before the target is."
    text = f"An input gives the target away: {found[0]}{more}. {unless}"
    return Finding(WARN, text, (Recommendation("Leave out inputs that are known only after the target."),))


def held_out_rows(facts: FitSummary) -> Finding | None:
    """Check that the metrics are on enough held-out rows."""
    n = len(facts.y)
    if facts.on == "training":
        command = refit_command(facts, "--holdout", "0.2")
        text = "No rows were held out: all metrics are on training rows, so expect worse on new data."
        return Finding(WARN, text, (Recommendation("Hold out a fifth of the rows to test on.", command),))
    if n >= ENOUGH_HELD_OUT:
        return None
    low, high = binomial_range(LEVEL, n, 0.025)
    rows = kind_of_rows(facts)
    text = f"Only {n} {rows}: intervals that should cover 90% of the values may cover {low:.0%} to {high:.0%} of them."
    if n >= FEW_HELD_OUT:
        return Finding(NOTE, text)
    advice = "Test on more rows: hold out more, or run `credibly evaluate` on a separate table."
    command = refit_command(facts, "--holdout", "0.4") if facts.on == "held-out" else ""
    return Finding(WARN, text, (Recommendation(advice, command),))


def baseline(facts: FitSummary) -> Finding | None:
    """Check that the fit beats a prediction that ignores the columns."""
    always = baseline_of(facts.task)
    own, base = facts.figures.get("log_density"), facts.baseline.get("log_density")
    if own is None or base is None or math.isnan(own) or math.isnan(base):
        return None
    if own == -math.inf:
        return Finding(FAIL, "At least one observed value had zero predicted probability (log density -inf).")
    rows = log_density_per_row(facts)
    if facts.baseline_density is not None and len(facts.baseline_density) == len(rows):
        # Paired by row, so that rows which are hard for both cancel out.
        rows = rows - torch.as_tensor(facts.baseline_density, dtype=torch.float64)
    error = standard_error(rows)
    gain = own - base
    scores = f"log density {format_number(own)} vs {format_number(base)} nats per row"
    advice = (
        Recommendation("Check that the columns carry information about the target; add columns or rows that do."),
        Recommendation("Try the other methods on the same rows.", compare_command(facts)),
    )
    if gain < -WORSE * error:
        return Finding(FAIL, f"Worse than always predicting {always}: {scores}.", advice)
    if gain <= 2 * error:
        within = f"a difference within two standard errors (±{2 * error:.2g})"
        text = f"Not clearly better than always predicting {always}: {scores}, {within}."
        return Finding(WARN, text, advice)
    return Finding(PASS, f"Better than always predicting {always}: {scores}{_improvement(facts)}.")


def _improvement(facts: FitSummary) -> str:
    if facts.task == "regression":
        own, base = facts.figures.get("rmse"), facts.baseline.get("rmse")
        if own is None or not base:
            return ""
        values = f"{format_number(own)} vs {format_number(base)}"
        return f"; RMSE {values}" if own <= base else f"; but the RMSE is larger, {values}: some means are far off"
    if facts.task == "survival":
        return f"; concordance {facts.figures['concordance']:.2f}, where 0.5 is chance"
    own, base = facts.figures.get("accuracy"), facts.baseline.get("accuracy")
    return f"; accuracy {own:.1%} vs {base:.1%}" if own is not None and base is not None else ""


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
    if facts.method == "ensemble" and not (facts.settings.get("prior", True) or facts.settings.get("anchored")):
        return Finding(NOTE, f"{ratio}: where the data say little, the members follow their random initialisation.")
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


# Checks of the predictions, in the order in which findings of the same severity are shown.
CHECKS = (
    given_away,
    held_out_rows,
    baseline,
    coverage,
    other_levels,
    bias,
    confidence,
    imbalance,
    class_frequencies,
    epistemic,
    training_size,
    unusual_inputs,
    changing_noise,
    outliers,
    confidence_and_error,
)
