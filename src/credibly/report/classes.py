"""Sections on classes: confusion matrix, recall and precision of each class, and thresholds by cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from credibly import plot
from credibly.decide.thresholds import best_threshold, cost_curve, cost_threshold
from credibly.metrics.classes import ClassMetrics, rare_class
from credibly.report.class_findings import COST_RATIOS, metrics_by_class, outcome_by_cost
from credibly.report.evaluated_rows import count_of_rows
from credibly.report.page import Column, Section, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.tables.fit_summary import FitSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The most classes in a confusion matrix, and in the table of classes.
CLASSES, LISTED = 10, 40
# Costs of a missed row, in false alarms, with a curve each.
CURVES = (1, 10, 100)
# Frequency up to which a class is rare: its thresholds are shown, on a logarithmic axis.
RARE = 0.1
# The most points of a curve.
POINTS = 400


def confusion_picture(facts: FitSummary) -> Picture | None:
    """Plot the confusion matrix, unless there are too many classes."""
    names = facts.classes or ()
    if len(names) < 2 or len(names) > CLASSES:
        return None
    accuracy = facts.figures.get("accuracy")
    diagonal = "" if accuracy is None else f" {accuracy:.1%} of the rows are on the diagonal."
    side = 2.6 + 0.36 * len(names)
    return picture(
        "confusion",
        lambda ax: plot.confusion(facts.predictive, facts.y, classes=names, ax=ax),
        title="Confusion matrix",
        size=(max(side, 4.0), max(0.85 * side, 3.2)),
        alt=f"Confusion matrix of observed against most probable classes.{diagonal}",
        caption=f"Number of rows; correct predictions are on the diagonal.{diagonal}",
    )


def most_frequent_error(facts: FitSummary) -> tuple[str, ...]:
    """Return a sentence on the most frequent confusion, if there is any."""
    names = facts.classes or ()
    predicted = facts.predictive.probabilities.cpu().argmax(-1)
    y = torch.as_tensor(facts.y).long()
    wrong = predicted != y
    if len(names) < 2 or not bool(wrong.any()):
        return ()
    pairs, count = torch.unique(torch.stack([y[wrong], predicted[wrong]], 1), dim=0, return_counts=True)
    true, other = pairs[int(count.argmax())].tolist()
    of = int((y == true).sum())
    error = f"{names[true]} classified as {names[other]}"
    return (f"Most frequent error: {error}, {int(count.max())} of {of:,} {'row' if of == 1 else 'rows'}.",)


def classes_section(facts: FitSummary) -> Section | None:
    """Show the metrics of each class."""
    found = metrics_by_class(facts)
    if found is None or facts.classes is None:
        return None
    head = (
        Column("Class"),
        Column("Rows", None, 0),
        Column("Recall", None, 3, "fraction of the rows of the class for which it is the most probable one"),
        Column("Precision", None, 3, "fraction of the rows with it as the most probable class that belong to it"),
        Column("F1", None, 3, "harmonic mean of the two"),
        Column("ROC AUC", None, 3, "how often a row of the class gets a higher probability of it than another row"),
        Column("Avg. precision", None, 3, "mean precision over all recalls; the frequency of the class is chance"),
        Column("Frequency", None, 3, "fraction of the rows that are of the class"),
        Column("Mean probability", None, 3, "its average prediction; calibrated if near the frequency"),
    )
    mean = facts.predictive.probabilities.cpu().double().mean(0)
    columns = (found.recall, found.precision, found.f1, found.roc_auc, found.average_precision, found.frequency, mean)
    order = found.rows.argsort(descending=True, stable=True).tolist()
    rows: list[tuple[Value, ...]] = [
        (facts.classes[k], int(found.rows[k]), *(_cell(float(column[k])) for column in columns)) for k in order[:LISTED]
    ]
    text = [
        f"Each class on {count_of_rows(facts)}, answering with the most probable class. Accuracy hides what happens to "
        "rare classes; recall and precision show it."
    ]
    if len(order) > LISTED:
        text.append(f"The {LISTED} most frequent of {len(order)} classes are shown.")
    if facts.class_weight is not None:
        text.append(
            f"The classes were reweighted in the fit ({facts.class_weight}), so probabilities are those of a "
            "population with these weights: compare rows by them, and choose thresholds on labelled rows."
        )
    return Section("Each class", tuple(text), Table(head, tuple(rows)))


def cost_section(facts: FitSummary) -> Section | None:
    """Show thresholds by cost for the rarer of two classes, or for the rarest of several if it is rare."""
    found = metrics_by_class(facts)
    if found is None or facts.classes is None or int((found.rows > 0).sum()) < 2:
        return None
    label = _positive(found)
    if len(facts.classes) > 2 and float(found.frequency[label]) > RARE:
        return None
    name = facts.classes[label]
    p = facts.predictive.probabilities.cpu()[:, label].double().clamp(0, 1)
    case = torch.as_tensor(facts.y) == label
    head = (
        Column("A miss costs"),
        Column("Threshold", None, 3, "act where the probability is at least this: 1 / (1 + cost of a miss)"),
        Column("Recall", None, 3),
        Column("Precision", None, 3),
        Column("Rows flagged", None, 0),
        Column("Cost per row", None, 4, "mean cost on these rows, in false alarms"),
        Column("Best threshold here", None, 3, "threshold of least cost on these rows; noisy if there are few"),
    )
    rows: list[tuple[Value, ...]] = []
    for ratio in COST_RATIOS:
        one = outcome_by_cost(facts, label, ratio)
        best = best_threshold(p, case, false_negative=float(ratio)).threshold
        what = f"{ratio} false alarm{'' if ratio == 1 else 's'}"
        cells = (_cell(one.recall), _cell(one.precision), one.flagged, one.cost, _cell(best))
        rows.append((what, one.threshold, *cells))
    text = (
        f"When to act as if a row were {name}: a miss and a false alarm rarely cost the same. For calibrated "
        "probabilities the threshold of least expected cost is the cost of a false alarm divided by the cost of both. "
        f"In Python: credibly.decide.best_threshold. All on {count_of_rows(facts)}, {int(found.rows[label]):,} of them "
        f"{name}.",
    )
    return Section(f"Thresholds by cost: {name}", text, Table(head, tuple(rows)), (_cost_picture(p, case, name),))


def _positive(found: ClassMetrics) -> int:
    """Return the rarest class that has rows."""
    if len(found.rows) == 2:
        return rare_class(found)
    return int(torch.where(found.rows > 0, found.rows, torch.inf).argmin())


def _cost_picture(p: torch.Tensor, case: torch.Tensor, name: str) -> Picture:
    def paint(ax: Axes) -> None:
        for ratio, colour, dash in zip(CURVES, plot.PALETTE, plot.DASHES):
            curve = cost_curve(p, case, false_negative=float(ratio))
            # Relative to the better of flagging all rows and none, so that curves of all costs fit into one picture.
            trivial = min(float(curve.cost[0]), float(curve.cost[-1]))
            if trivial <= 0:
                continue
            # Costs are constant between two probabilities that occur, and the threshold ends at 1.
            at, cost = curve.threshold.clone(), curve.cost / trivial
            at[-1] = 1.0
            keep = torch.linspace(0, len(at) - 1, min(len(at), POINTS)).round().long()
            label = f"a miss costs {ratio} false alarm{'' if ratio == 1 else 's'}"
            ax.step(at[keep], cost[keep], where="pre", color=colour, linestyle=dash, linewidth=1.5, label=label)
            ax.axvline(cost_threshold(false_positive=1.0, false_negative=ratio), color=colour, linewidth=0.8, alpha=0.7)
        ax.axhline(1, color=plot.INK, linewidth=0.8, linestyle="--")
        # A rare class has small probabilities.
        rare = float(case.double().mean()) < RARE
        least = max(1e-4, min(float(p.median()), 0.005)) if rare else 0.0
        if rare:
            ax.set_xscale("log")
        ax.set(xlabel=f"threshold on the probability of {name}", ylabel="cost", xlim=(least, 1), ylim=(0, 1.6))
        ax.legend()

    return picture(
        "cost",
        paint,
        title="Cost against threshold",
        size=(5.4, 4.2),
        alt=f"Mean cost on the evaluated rows against the threshold on the probability of {name}.",
        caption="Cost relative to the better of flagging all rows and flagging none (dashed). Vertical lines are the "
        "thresholds for calibrated probabilities: near the lowest point of their curve if the probabilities are right.",
    )


def _cell(value: float) -> Value:
    return "–" if not math.isfinite(value) else value
