"""The page of a comparison: every method on one table, which are ahead by more than chance, and what each is good for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from credibly import plot
from credibly.demo.fits import summary
from credibly.errors import InputError
from credibly.metrics import scores as metrics
from credibly.report import tables as figures
from credibly.report.judgement import VERDICTS, assess
from credibly.report.page import Column, Page, Section, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.report.row_statistics import density_of_rows, loss_of_rows, standard_error
from credibly.tables.fit_summary import Facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = np.arange(1, 20) / 20


def compare_page(facts: Mapping[str, Facts], pages: Mapping[str, str] | None = None) -> Page:
    """The report on several fits to one table, by name. They have to be judged on the same rows.

    `pages` has the address of the page of each, relative to this one.
    """
    given = dict(facts)
    if not given:
        raise InputError("facts", "is empty", "Pass the facts of at least one fit")
    first = next(iter(given.values()))
    for name, one in given.items():
        if (one.target, one.task) != (first.target, first.task) or not np.array_equal(one.y, first.y):
            raise InputError(
                "facts", f"{name} is of other rows", "Compare fits that are judged on the same rows of one table"
            )
    on = (
        "held-out rows that none of them has seen"
        if first.on == "held-out"
        else "of the rows that they have learned from"
    )
    lead = (
        f"{first.target} of {first.table}, predicted by {len(given)} methods that learned from the same {first.rows:,} rows and are "
        f"judged on the same {len(first.y):,} {on}."
    )
    footer = f"credibly compare, seed {first.seed}. Differences are paired over rows; ± is two standard errors."
    sections = (_ranking(given), _table(given), _pictures(given), _verdicts(given, pages or {}), _methods(given))
    return Page(f"{first.target}: which method?", lead, sections, footer)


# -- the ranking


def ranking(facts: Mapping[str, Facts]) -> list[tuple[str, float, float, float]]:
    """Names by mean log density, the best first: that mean, how far it is behind the best, and the error of that distance."""
    rows = {name: density_of_rows(one) for name, one in facts.items()}
    order = sorted(rows, key=lambda name: -_known(float(rows[name].mean())))
    best = rows[order[0]]
    found = []
    for name in order:
        behind = best - rows[name]
        error = 0.0 if name == order[0] else standard_error(behind)
        found.append((name, float(rows[name].mean()), float(behind.mean()) if name != order[0] else 0.0, error))
    return found


def _known(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _ranking(facts: dict[str, Facts]) -> Section:
    order = ranking(facts)
    n = len(next(iter(facts.values())).y)
    head = (
        Column("Method"),
        Column("Log density", "high", 3, "how probable the observed values were, in nats a row: higher is better"),
        Column("Behind the best", None, 3, "mean difference, row by row"),
        Column("±", None, 3, "two standard errors of that difference: one that is smaller may be chance"),
        Column("Reading"),
    )
    rows: list[tuple[Value, ...]] = []
    level: list[str] = []
    behind: list[str] = []
    for place, (name, mean, gap, error) in enumerate(order):
        same = gap <= 2 * error
        if place:
            (level if same else behind).append(name)
        reading = "best" if not place else "within chance of the best" if same else "behind the best"
        rows.append((name, mean, *(("–", "–") if not place else (gap, 2 * error)), reading))
    best = order[0][0]
    said = [f"Highest log density: {best}."]
    if level:
        said.append(
            f"On {n:,} rows {best} cannot be told from {_and(level)}: of these take the one that is quickest, or easiest to explain."
        )
    trusted = [name for name, *_ in order if assess(facts[name]).verdict != VERDICTS[2]]
    if best not in trusted:
        rest = f"; of the others {trusted[0]} has the highest" if trusted else ""
        said.append(f"By itself, however, {best} is not to be trusted here (see its verdict below){rest}.")
    if behind:
        said.append(f"Behind by more than chance: {_and(behind)}.")
    text = ("Ranked by log density, which punishes a wrong prediction and a wrong width alike.",)
    return Section("Which is best?", text, Table(head, tuple(rows)), findings=tuple(said) if len(order) > 1 else ())


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- all figures


def _table(facts: dict[str, Facts]) -> Section:
    first = next(iter(facts.values()))
    columns = figures.columns(first.task, [one.figures for one in facts.values()] + [first.baseline])
    rows: list[tuple[Value, ...]] = [
        (name, *(one.figures.get(key, "–") for key, _ in columns), one.seconds) for name, one in facts.items()
    ]
    text = ["The best of each column is marked; methods that print alike share the mark."]
    if first.baseline:
        always = "the training mean" if first.task == "regression" else "the training shares of the classes"
        shown = ", ".join(
            f"{c.title} {figures.number(first.baseline[key])}" for key, c in columns if key in first.baseline
        )
        text.append(f"For comparison, always predicting {always}: {shown}.")
    if first.task == "regression":
        error = metrics.coverage_standard_error(figures.LEVEL, len(first.y))
        low, high = max(figures.LEVEL - 2 * error, 0), min(figures.LEVEL + 2 * error, 1)
        text.append(
            f"With {len(first.y):,} rows a coverage from {low:.2f} to {high:.2f} cannot be told from {figures.LEVEL}."
        )
    head = (Column("Method"), *(c for _, c in columns), Column("Seconds", None, 1, "of the fit"))
    return Section("All figures", tuple(text), Table(head, tuple(rows)))


# -- pictures


def _pictures(facts: dict[str, Facts]) -> Section:
    first = next(iter(facts.values()))
    regression = first.task == "regression"
    density = {name: density_of_rows(one) for name, one in facts.items()}
    drawn = [_dots("density", "Log density", {n: (float(v.mean()), standard_error(v)) for n, v in density.items()}, "higher is better",
                   first.baseline.get("log_density"))]  # fmt: skip
    loss = {name: loss_of_rows(one) for name, one in facts.items()}
    if regression:
        # sqrt(m) has error e / (2 sqrt(m)) where m has error e
        values = {
            n: (math.sqrt(float(v.mean())), standard_error(v) / (2 * math.sqrt(max(float(v.mean()), 1e-300))))
            for n, v in loss.items()
        }
        drawn.append(_dots("rmse", "RMSE", values, "lower is better", first.baseline.get("rmse")))
    else:
        values = {n: (1 - float(v.mean()), standard_error(v)) for n, v in loss.items()}
        drawn.append(_dots("accuracy", "Accuracy", values, "higher is better", first.baseline.get("accuracy")))
    error = metrics.coverage_standard_error(figures.LEVEL, len(first.y))
    held = {n: (one.figures["coverage"], 0.0) for n, one in facts.items() if "coverage" in one.figures}
    if held:
        note = (
            f"the strip is what chance allows around {figures.LEVEL}"
            if regression
            else f"at least {figures.LEVEL} is right"
        )
        drawn.append(_dots("held", "Coverage of 90% intervals" if regression else "Coverage of 90% sets", held, note, None,
                           (figures.LEVEL - 2 * error, min(figures.LEVEL + 2 * error, 1.0)) if regression else None))  # fmt: skip
    drawn.append(_curves(facts) if regression else _reliabilities(facts))
    text = ("Points with two standard errors of the mean over rows. Methods are judged on the same rows, so differences between them are "
            "known better than these bars say: the ranking above has them.",)  # fmt: skip
    return Section("Side by side", text, pictures=tuple(drawn))


def _dots(
    name: str, title: str, values: dict[str, tuple[float, float]], note: str, baseline: float | None = None,
    strip: tuple[float, float] | None = None,
) -> Picture:  # fmt: skip
    """A line for each method with its figure and two standard errors."""
    names = list(values)

    def paint(ax: Axes) -> None:
        places = range(len(names))
        if strip is not None:
            ax.axvspan(*strip, color=plot.INK, alpha=0.18, linewidth=0)
        if baseline is not None and math.isfinite(baseline):
            ax.axvline(baseline, color=plot.INK, linestyle="--", linewidth=1, label="without any column")
            ax.legend()
        for place, (value, error), colour in zip(places, values.values(), _colours(len(names))):
            if math.isfinite(value):
                reach = 2 * error if math.isfinite(error) else 0.0
                ax.errorbar(
                    [value], [place], xerr=[reach], fmt="o", color=colour, markersize=6, elinewidth=1.4, capsize=3
                )
        ax.set_yticks(places, names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel(title)
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)

    shown = "; ".join(f"{n} {figures.number(v)}" for n, (v, _) in values.items())
    height = 1.5 + 0.3 * len(names)
    return picture(
        f"compare-{name}",
        paint,
        title=title,
        size=(4.2, height),
        alt=f"{title}: {shown}.",
        caption=f"{note.capitalize()}.",
    )


def _colours(count: int) -> list[str]:
    return [plot.PALETTE[i % len(plot.PALETTE)] for i in range(count)]


def _curves(facts: dict[str, Facts]) -> Picture:
    def paint(ax: Axes) -> None:
        for name, one in facts.items():
            plot.coverage_curve(one.predictive, one.y, label=name, ax=ax)

    return picture(
        "compare-coverage", paint, title="Do intervals hold what they promise?", size=(4.2, 4.4),
        alt="Observed against promised coverage of every method.",
        caption="Below the line intervals are too narrow; in the grey strip a difference is chance.",
    )  # fmt: skip


def _reliabilities(facts: dict[str, Facts]) -> Picture:
    def paint(ax: Axes) -> None:
        ax.plot([0, 1], [0, 1], color=plot.INK, linestyle="-", linewidth=0.8, label="calibrated")
        low = 1.0
        for (name, one), colour, dash in zip(facts.items(), _colours(len(facts)), plot.DASHES * len(facts)):
            found = metrics.calibration(one.predictive.probabilities.cpu(), torch.as_tensor(one.y).long(), 8)
            used = found.count > 0
            sure, right = found.confidence[used].numpy(), found.accuracy[used].numpy()
            ax.plot(sure, right, color=colour, linestyle=dash, marker="o", markersize=3, label=name)
            low = min(low, float(sure.min()))
        ax.set(
            xlabel="confidence in the top label", ylabel="share that is right", xlim=(low - 0.02, 1.02), ylim=(0, 1.05)
        )
        ax.legend()

    return picture(
        "compare-reliability", paint, title="How often right when that sure?", size=(4.2, 4.4),
        alt="Accuracy against confidence of every method.",
        caption="Below the line a method is too sure, above it too cautious; points of few rows scatter.",
    )  # fmt: skip


# -- verdicts


def _verdicts(facts: dict[str, Facts], pages: Mapping[str, str]) -> Section:
    found = {name: assess(one) for name, one in facts.items()}
    rows = tuple(
        (name, one.verdict, one.findings[0].words if one.findings else one.headline) for name, one in found.items()
    )
    text = ("Each fit judged by itself, with what weighs most; its own page has the rest.",)
    columns = (Column("Method"), Column("Verdict"), Column("What weighs most"))
    links = tuple((pages[name], f"the page of {name}") for name in facts if name in pages)
    return Section("Verdicts", text, Table(columns, rows), links=links)


def _methods(facts: dict[str, Facts]) -> Section:
    rows = []
    for name, one in facts.items():
        settings = ", ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in one.settings.items()
            if value is not None
        )
        rows.append((name, summary(one.method), settings or "its defaults"))
    first = next(iter(facts.values()))
    text = (
        f"All have the same network ({first.network}; {first.parameters:,} parameters), prior and noise; only how the posterior is "
        "found differs.",
    )
    return Section(
        "The methods", text, Table((Column("Method"), Column("What it is"), Column("Settings")), tuple(rows))
    )
