"""Sections on columns: which ones matter, with their uncertainty, and how predictions depend on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from credibly import plot
from credibly.report.evaluated_rows import kind_of_rows
from credibly.report.metric_columns import format_number
from credibly.report.page import Column, Section, Table, Value, joined
from credibly.report.pictures import Picture, picture
from credibly.tables.effects import Effect
from credibly.tables.fit_summary import FitSummary
from credibly.tables.importance import ColumnImportance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The most columns in the picture, and in the table.
BARS, LISTED = 15, 30
# The most classes with a curve.
CLASSES = 4


def importance_section(facts: FitSummary) -> Section | None:
    """Show how much worse predictions become when a column is permuted."""
    found = facts.importance
    if found is None or not found.columns:
        return None
    regression = facts.task == "regression"
    score = "RMSE" if regression else "Error rate"
    head: tuple[Column, ...] = (
        Column("Column"),
        Column("Loss", None, 3, "increase of the negative log density in nats per row; higher is more important"),
        Column("±", None, 3, "two standard errors, over rows and permutations"),
    )
    listed = found.columns[:LISTED]
    rows: list[tuple[Value, ...]] = [(one.name, one.loss, 2 * one.loss_error) for one in listed]
    # Times may be censored, so that their errors are not known.
    scores = [
        (one.score, 2 * one.score_error) for one in listed if one.score is not None and one.score_error is not None
    ]
    if len(scores) == len(listed):
        digits = _digits([value for value, _ in scores])
        named = "RMSE" if regression else "error rate"
        head += (Column(score, None, digits, f"increase of the {named}"), Column("± ", None, digits))
        rows = [(*row, *more) for row, more in zip(rows, scores)]
    text = [
        "What the model would lose without a column: its cells are shuffled among the rows, which keeps their values "
        f"and breaks their relation to the target. Mean of {found.repeats} shuffles of {found.rows:,} "
        f"{kind_of_rows(facts)}. Columns that carry the same information share it, so each can look unimportant.",
    ]
    if facts.on == "cross-validated":
        text.append("Each row is predicted by a fit that has not seen it.")
    hidden = len(found.columns) - LISTED + len(found.skipped) if len(found.columns) > LISTED else len(found.skipped)
    if hidden > 0:
        text.append(f"{hidden} more {'column matters' if hidden == 1 else 'columns matter'} less.")
    clear = [one.name for one in found.columns if one.loss > 2 * one.loss_error]
    idle = len(found.columns) - len(clear) + len(found.skipped)
    finding = "No column matters by more than chance."
    if clear:
        rest = f" {idle} of {idle + len(clear)} columns are within chance of no importance." if idle else ""
        finding = f"Most important: {joined(clear[:3])}.{rest}"
    return Section(
        "Which columns matter?", tuple(text), Table(head, tuple(rows)), (_bars(found.columns[:BARS]),), (finding,)
    )


def _digits(scores: list[float]) -> int:
    largest = max(map(abs, scores))
    return 3 if largest == 0 else min(max(2 - int(np.floor(np.log10(largest))), 0), 8)


def _bars(columns: tuple[ColumnImportance, ...]) -> Picture:
    names = [one.name if len(one.name) <= 22 else f"{one.name[:21]}…" for one in columns]

    def paint(ax: Axes) -> None:
        at = np.arange(len(columns))
        loss, error = (np.array([getattr(one, key) for one in columns]) for key in ("loss", "loss_error"))
        ax.barh(at, loss, height=0.65, color=plot.BLUE, alpha=0.55)
        ax.errorbar(loss, at, xerr=2 * error, fmt="none", ecolor=plot.INK, elinewidth=1.3, capsize=3)
        ax.axvline(0, color=plot.INK, linewidth=0.8)
        ax.set_yticks(at, names)
        ax.set_ylim(len(columns) - 0.4, -0.6)
        ax.set_xlabel("increase of the loss, nats per row")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)

    shown = "; ".join(f"{one.name} {one.loss:.3f} ± {2 * one.loss_error:.3f}" for one in columns)
    return picture(
        "importance",
        paint,
        title="Importance of the columns",
        size=(5.8, 1.2 + 0.32 * len(columns)),
        alt=f"Increase of the loss when a column is shuffled: {shown}.",
        caption="Increase of the negative log density when a column is shuffled, with two standard errors.",
    )


def effects_section(facts: FitSummary) -> Section | None:
    """Show how the mean prediction changes with the most important columns."""
    if not facts.effects:
        return None
    what = facts.target if facts.classes is None else "the probability of a class"
    text = (
        f"The prediction of {what} if a column had the same value in every row, averaged over "
        f"{facts.effects[0].rows:,} rows. The band is the 90% credible band of that average. "
        "It describes the model, not what would happen if somebody changed the column.",
    )
    # One scale for all, so that flat curves look flat.
    shown = _classes(facts)
    low = min(float(effect.low[:, column].min()) for effect in facts.effects for column, _ in shown)
    high = max(float(effect.high[:, column].max()) for effect in facts.effects for column, _ in shown)
    margin = 0.05 * (high - low or 1.0)
    pictures = [_curve(facts, i, effect, (low - margin, high + margin)) for i, effect in enumerate(facts.effects)]
    return Section("How do predictions depend on them?", text, pictures=tuple(pictures))


def _classes(facts: FitSummary) -> list[tuple[int, str]]:
    """Return the output and the name of each curve: the target, the rarer of two classes, or the most frequent ones."""
    if facts.classes is None:
        return [(0, facts.target)]
    counts = np.bincount(np.asarray(facts.y), minlength=len(facts.classes))
    if len(facts.classes) == 2:
        rare = 1 if counts[1] <= counts[0] else 0
        return [(rare, facts.classes[rare])]
    return [(int(k), facts.classes[int(k)]) for k in np.sort(np.argsort(-counts, kind="stable")[:CLASSES])]


def _curve(facts: FitSummary, i: int, effect: Effect, limits: tuple[float, float]) -> Picture:
    shown = _classes(facts)

    def paint(ax: Axes) -> None:
        for n, (column, name) in enumerate(shown):
            colour = plot.PALETTE[n % len(plot.PALETTE)]
            mean, low, high = (part[:, column] for part in (effect.mean, effect.low, effect.high))
            if isinstance(effect.at, tuple):
                at = np.arange(len(mean)) + 0.12 * (n - (len(shown) - 1) / 2)
                bars = np.clip(np.stack([mean - low, high - mean]), 0, None)
                ax.errorbar(at, mean, yerr=bars, fmt="o", color=colour, elinewidth=1.5, capsize=3, label=name)
            else:
                ax.fill_between(effect.at, low, high, color=colour, alpha=0.22, linewidth=0)
                marker = "o" if len(effect.at) < 6 else None
                ax.plot(effect.at, mean, color=colour, linestyle="-", linewidth=1.6, marker=marker, label=name)
        if isinstance(effect.at, tuple):
            short = [name if len(name) <= 12 else f"{name[:11]}…" for name in effect.at]
            flat = len(short) <= 3 or sum(map(len, short)) < 26
            ax.set_xticks(range(len(short)), short, rotation=0 if flat else 40, ha="center" if flat else "right")
        ax.set(xlabel=effect.name, ylabel=facts.target if facts.classes is None else _probability(shown), ylim=limits)
        if len(shown) > 1:
            ax.legend()

    first = effect.mean[:, shown[0][0]]
    ends = f"from {format_number(float(first.min()))} to {format_number(float(first.max()))}"
    return picture(
        f"effect-{i}",
        paint,
        title=effect.name,
        size=(4.2, 3.3),
        alt=f"Mean prediction ({shown[0][1]}) against {effect.name}, {ends}, with a 90% credible band.",
    )


def _probability(shown: list[tuple[int, str]]) -> str:
    return f"probability of {shown[0][1]}" if len(shown) == 1 else "probability"
