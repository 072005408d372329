"""Findings on classes: rare ones that the most probable class misses, and predicted against observed frequencies."""

from __future__ import annotations

import math

import torch

from credibly.decide.thresholds import Threshold, cost_threshold, outcome
from credibly.metrics.classes import ClassMetrics, class_metrics
from credibly.report.finding import NOTE, WARN, Finding
from credibly.report.once_per_fit import once_per_fit
from credibly.report.page import Recommendation
from credibly.report.recommendations import use_sampling
from credibly.report.significance import CHANCE, sum_tails
from credibly.tables.fit_summary import FitSummary

# Rows of a class from which its recall is informative.
FEW_ROWS_OF_CLASS = 5
# A recall below this misses more rows of the class than it finds.
LOW_RECALL = 0.5
# Average precision this many times the frequency of the class, and this much above it, ranks its rows well.
TIMES_FREQUENCY, ABOVE_FREQUENCY = 2.0, 0.05
# Cost of a missed row of a class, in false alarms, for which thresholds are shown.
COST_RATIOS = (1, 2, 5, 10, 20, 50, 100)
# Difference and ratio of predicted and observed frequencies from which they matter.
FREQUENCY_GAP, FREQUENCY_RATIO = 0.02, 1.5


@once_per_fit
def metrics_by_class(facts: FitSummary) -> ClassMetrics | None:
    """Return the metrics of each class; None for regression."""
    if facts.classes is None:
        return None
    return class_metrics(facts.predictive.probabilities.cpu(), torch.as_tensor(facts.y).long())


def outcome_by_cost(facts: FitSummary, label: int, ratio: float) -> Threshold:
    """Return the outcome at the optimal threshold for calibrated probabilities if a miss costs `ratio` false alarms."""
    p = facts.predictive.probabilities.cpu()[:, label].double().clamp(0, 1)
    at = cost_threshold(false_positive=1.0, false_negative=float(ratio))
    return outcome(p, torch.as_tensor(facts.y) == label, at, false_negative=float(ratio))


def imbalance(facts: FitSummary) -> Finding | None:
    """Check that answering with the most probable class is useful, also for rare classes."""
    found = metrics_by_class(facts)
    if found is None or facts.classes is None or int((found.rows > 0).sum()) < 2:
        return None
    return _missed_class(facts, found) or _no_gain(facts, found)


def _missed_class(facts: FitSummary, found: ClassMetrics) -> Finding | None:
    """Report the class with the lowest recall among those that the probabilities rank well."""
    assert facts.classes is not None
    ranked = found.average_precision > TIMES_FREQUENCY * found.frequency
    ranked &= found.average_precision > found.frequency + ABOVE_FREQUENCY
    missed = ranked & (found.recall < LOW_RECALL) & (found.rows >= FEW_ROWS_OF_CLASS)
    if not bool(missed.any()):
        return None
    k = int(torch.where(missed, found.recall, torch.inf).argmin())
    name, rows = facts.classes[k], int(found.rows[k])
    hits = round(float(found.recall[k]) * rows)
    text = (
        f"Most rows of class {name} are missed: it is the most probable class for {hits} of its {rows} rows (recall "
        f"{float(found.recall[k]):.0%}). Its average precision of {float(found.average_precision[k]):.2f} is far above "
        f"its frequency of {float(found.frequency[k]):.1%}, so its probability finds more of them at a lower threshold."
    )
    outcomes = [(ratio, outcome_by_cost(facts, k, ratio)) for ratio in COST_RATIOS]
    ratio, best = next((one for one in outcomes if one[1].recall >= LOW_RECALL), outcomes[-1])
    advice = (
        f"Choose a threshold by cost. If missing {name} costs {ratio} false alarms, act where its probability is at "
        f"least {best.threshold:.2f}: recall {best.recall:.0%}, precision {_percent(best.precision)} here. The "
        "thresholds for other costs are in the section on classes."
    )
    return Finding(WARN, text, (Recommendation(advice),))


def _no_gain(facts: FitSummary, found: ClassMetrics) -> Finding | None:
    """Report an accuracy that always answering with the most frequent class would reach."""
    accuracy, most = facts.figures.get("accuracy"), int(found.rows.argmax())
    largest = float(found.frequency[most])
    # Half a row more, as the metric is rounded to float32.
    if accuracy is None or math.isnan(accuracy) or accuracy > largest + 0.5 / len(facts.y) or accuracy == 1:
        return None
    assert facts.classes is not None
    text = (
        f"No more accurate than always answering {facts.classes[most]}: accuracy {accuracy:.1%}, and {largest:.1%} of "
        f"the rows are that class (balanced accuracy {float(found.balanced_accuracy):.1%}). Accuracy is not "
        "informative here: judge by recall, precision and the probabilities."
    )
    return Finding(WARN, text)


def class_frequencies(facts: FitSummary) -> Finding | None:
    """Check the predicted frequency of each class against the observed one."""
    found = metrics_by_class(facts)
    if found is None or facts.classes is None:
        return None
    p = facts.predictive.probabilities.cpu().double().numpy()
    off = []
    for k, name in enumerate(facts.classes):
        tail = min(sum_tails(int(found.rows[k]), p[:, k])) * len(facts.classes) * 2
        predicted, observed = float(p[:, k].mean()), float(found.frequency[k])
        ratio = max(predicted, 1e-12) / max(observed, 1e-12)
        matters = abs(predicted - observed) > FREQUENCY_GAP or not 1 / FREQUENCY_RATIO < ratio < FREQUENCY_RATIO
        if tail < CHANCE and matters:
            off.append((tail, f"{name} {predicted:.1%} predicted, {observed:.1%} observed"))
    if not off:
        return None
    off.sort()
    shown = "; ".join(text for _, text in off[:3])
    if facts.class_weight is not None:
        text = (
            f"Probabilities are those of classes reweighted by --class-weight {facts.class_weight}, not of this table: "
            f"{shown}. Rank by them, and choose thresholds on labelled rows."
        )
        return Finding(NOTE, text)
    text = f"Class frequencies are off by more than chance explains: {shown}."
    return Finding(WARN, text, use_sampling(facts))


def _percent(fraction: float) -> str:
    return "undefined" if math.isnan(fraction) else f"{fraction:.0%}"
