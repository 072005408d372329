"""The report of a comparison: all methods in one table, ranked, with each one's verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from credibly import plot
from credibly.errors import InputError
from credibly.methods import METHODS
from credibly.metrics import scores as metrics
from credibly.report import metric_columns
from credibly.report.assessment import Assessment, assess
from credibly.report.finding import Finding
from credibly.report.fit import settings_text
from credibly.report.metric_columns import LEVEL, format_number
from credibly.report.page import Column, Page, Section, Table, Value, joined
from credibly.report.pictures import Picture, picture
from credibly.report.reliability import doubts, predictive_doubts, recommendation_text
from credibly.report.row_statistics import log_density_per_row, loss_per_row, standard_error
from credibly.tables.boosting import NAME, TITLE, BoostingFit
from credibly.tables.fit_summary import FitSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOOSTING_LABEL = f"{NAME} (not Bayesian)"


def compare_page(
    facts: Mapping[str, FitSummary],
    pages: Mapping[str, str] | None = None,
    boosting: FitSummary | None = None,
) -> Page:
    """Return the report on several fits to one table, evaluated on the same rows.

    Args:
        facts: the fits by name.
        pages: address of the report of each fit, relative to this page.
        boosting: gradient boosting on the same rows (see `boosting_summary`), shown beside the fits; None to leave it
            out.
    """
    given = dict(facts)
    if not given:
        raise InputError("facts", "must contain at least one fit, got none")
    first = next(iter(given.values()))
    everything = with_boosting(given, boosting)
    for name, one in everything.items():
        if (one.target, one.task) != (first.target, first.task) or not np.array_equal(one.y, first.y):
            raise InputError("facts", f"must all be evaluated on the same rows of one table, but {name} has other rows")
    rows = "held-out rows" if first.on == "held-out" else "of these rows"
    lead = (
        f"{len(given)} methods predict {first.target} of {first.table}. All were fitted to the same {first.rows:,} "
        f"rows and evaluated on the same {len(first.y):,} {rows}."
    )
    if boosting is not None:
        lead += " Gradient boosting, which is not Bayesian, was fitted to the same rows: it is the model to beat."
    footer = f"credibly compare, seed {first.seed}. Differences are paired by row; ± is two standard errors."
    sections = (
        _ranking_section(given, boosting),
        _metrics_section(everything),
        _pictures_section(everything),
        _verdicts_section(given, pages or {}, boosting),
        _methods_section(given, boosting),
    )
    return Page(f"Predicting {first.target} in {first.table}: methods compared", lead, sections, footer)


def boosting_summary(like: FitSummary, fit: BoostingFit) -> FitSummary:
    """Return gradient boosting as the summary of a fit, for the same rows as another one."""
    return dataclasses.replace(
        like,
        method=NAME,
        why="the model to beat",
        settings={},
        seconds=fit.seconds,
        predictive=fit.predictive,
        y=fit.y,
        figures=fit.figures,
        ood=None,
        ood_far=None,
        diagnostics=None,
        view=None,
    )


def with_boosting(facts: Mapping[str, FitSummary], fit: FitSummary | None) -> dict[str, FitSummary]:
    """Return the fits by name, followed by gradient boosting under its label."""
    return {**facts, **({} if fit is None else {BOOSTING_LABEL: fit})}


# -- ranking


def ranking(facts: Mapping[str, FitSummary]) -> list[tuple[str, float, float, float]]:
    """Rank the fits by mean log density, best first.

    Returns name, mean, mean difference to the best, and the standard error of that difference.
    """
    rows = {name: log_density_per_row(one) for name, one in facts.items()}
    order = sorted(rows, key=lambda name: -_nan_last(float(rows[name].mean())))
    best = rows[order[0]]
    found = []
    for name in order:
        behind = best - rows[name]
        error = 0.0 if name == order[0] else standard_error(behind)
        found.append((name, float(rows[name].mean()), float(behind.mean()) if name != order[0] else 0.0, error))
    return found


def _nan_last(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _ranking_section(facts: dict[str, FitSummary], boosting: FitSummary | None) -> Section:
    order = ranking(with_boosting(facts, boosting))
    unreliable = {name for name, one in facts.items() if doubts(one)}
    if boosting is not None and predictive_doubts(boosting):
        unreliable.add(BOOSTING_LABEL)
    n = len(next(iter(facts.values())).y)
    head = (
        Column("Method"),
        Column("Log density", "high", 3, "log predictive density in nats per row; higher is better"),
        Column("Behind the best", None, 3, "mean difference per row"),
        Column("±", None, 3, "two standard errors of that difference; a smaller difference may be chance"),
        Column("Result"),
        Column("Reliable", note="no if chains have not mixed, or if intervals or probabilities are off"),
    )
    rows: list[tuple[Value, ...]] = []
    tied: list[str] = []
    behind: list[str] = []
    for rank, (name, mean, gap, error) in enumerate(order):
        same = gap <= 2 * error
        if rank:
            (tied if same else behind).append(name)
        result = "best" if not rank else "within chance of the best" if same else "behind the best"
        reliable = "no" if name in unreliable else "yes"
        rows.append((name, mean, *(("–", "–") if not rank else (gap, 2 * error)), result, reliable))
    best = order[0][0]
    findings = [*recommendation_text(facts, boosting), f"Highest log density: {best}."]
    if best in unreliable:
        findings[-1] += " It is unreliable here (see its verdict below)."
    if tied:
        findings.append(f"On {n:,} rows, {best} is statistically indistinguishable from {joined(tied)}.")
    if behind:
        findings.append(f"Behind by more than chance: {joined(behind)}.")
    text = ("Ranked by log density, which penalises wrong predictions and wrong interval widths alike.",)
    shown = tuple(findings) if len(order) > 1 else ()
    return Section("Which is best?", text, Table(head, tuple(rows)), findings=shown)


# -- metrics


def _metrics_section(facts: dict[str, FitSummary]) -> Section:
    first = next(iter(facts.values()))
    columns = metric_columns.columns(first.task, [one.figures for one in facts.values()] + [first.baseline])
    rows: list[tuple[Value, ...]] = [
        (name, *(one.figures.get(key, "–") for key, _ in columns), one.seconds) for name, one in facts.items()
    ]
    text = ["The best value of each column is highlighted, with ties."]
    if first.baseline:
        shown = ", ".join(
            f"{c.title} {format_number(first.baseline[key])}" for key, c in columns if key in first.baseline
        )
        text.append(f"Baseline, always predicting {metric_columns.baseline_of(first.task)}: {shown}.")
    if first.task == "regression":
        error = metrics.coverage_standard_error(LEVEL, len(first.y))
        low, high = max(LEVEL - 2 * error, 0), min(LEVEL + 2 * error, 1)
        text.append(f"With {len(first.y):,} rows, a coverage from {low:.2f} to {high:.2f} is within chance of {LEVEL}.")
    head = (Column("Method"), *(c for _, c in columns), Column("Seconds", None, 1, "time to fit"))
    return Section("All metrics", tuple(text), Table(head, tuple(rows)))


# -- pictures


def _pictures_section(facts: dict[str, FitSummary]) -> Section:
    first = next(iter(facts.values()))
    regression = first.task == "regression"
    density = {name: log_density_per_row(one) for name, one in facts.items()}
    density_dots = {n: (float(v.mean()), standard_error(v)) for n, v in density.items()}
    baseline = first.baseline
    drawn = [_dot_plot("density", "Log density", density_dots, "higher is better", baseline.get("log_density"))]
    loss = {name: loss_per_row(one) for name, one in facts.items()}
    if regression:
        # sqrt(m) has error e / (2 sqrt(m)) where m has error e
        values = {
            n: (math.sqrt(float(v.mean())), standard_error(v) / (2 * math.sqrt(max(float(v.mean()), 1e-300))))
            for n, v in loss.items()
        }
        drawn.append(_dot_plot("rmse", "RMSE", values, "lower is better", baseline.get("rmse")))
    else:
        values = {n: (1 - float(v.mean()), standard_error(v)) for n, v in loss.items()}
        drawn.append(_dot_plot("accuracy", "Accuracy", values, "higher is better", baseline.get("accuracy")))
    coverage = {n: (one.figures["coverage"], 0.0) for n, one in facts.items() if "coverage" in one.figures}
    if coverage and regression:
        error = metrics.coverage_standard_error(LEVEL, len(first.y))
        band = (LEVEL - 2 * error, min(LEVEL + 2 * error, 1.0))
        note = f"the grey band is within chance of {LEVEL}"
        drawn.append(_dot_plot("held", "Coverage of 90% intervals", coverage, note, band=band))
    elif coverage:
        drawn.append(_dot_plot("held", "Coverage of 90% prediction sets", coverage, f"at least {LEVEL} is right"))
    drawn.append(_coverage_curves(facts) if regression else _reliability_curves(facts))
    text = (
        "Points with two standard errors of the mean over rows. All methods are evaluated on the same rows, so the "
        "differences between them are more certain than these bars suggest: see the ranking above.",
    )
    return Section("Side by side", text, pictures=tuple(drawn))


def _dot_plot(
    name: str,
    title: str,
    values: dict[str, tuple[float, float]],
    note: str,
    baseline: float | None = None,
    band: tuple[float, float] | None = None,
) -> Picture:
    """Plot one line per method, with its value and two standard errors."""
    names = list(values)

    def paint(ax: Axes) -> None:
        lines = range(len(names))
        if band is not None:
            ax.axvspan(*band, color=plot.INK, alpha=0.18, linewidth=0)
        if baseline is not None and math.isfinite(baseline):
            ax.axvline(baseline, color=plot.INK, linestyle="--", linewidth=1, label="baseline")
            ax.legend()
        for line, (value, error), colour in zip(lines, values.values(), _colours(len(names))):
            if math.isfinite(value):
                bar = 2 * error if math.isfinite(error) else 0.0
                ax.errorbar([value], [line], xerr=[bar], fmt="o", color=colour, markersize=6, elinewidth=1.4, capsize=3)
        ax.set_yticks(lines, names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel(title)
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)

    shown = "; ".join(f"{n} {format_number(v)}" for n, (v, _) in values.items())
    return picture(
        f"compare-{name}",
        paint,
        title=title,
        size=(4.2, 1.5 + 0.3 * len(names)),
        alt=f"{title}: {shown}.",
        caption=f"{note.capitalize()}.",
    )


def _colours(count: int) -> list[str]:
    return [plot.PALETTE[i % len(plot.PALETTE)] for i in range(count)]


def _coverage_curves(facts: dict[str, FitSummary]) -> Picture:
    def paint(ax: Axes) -> None:
        for name, one in facts.items():
            plot.coverage_curve(one.predictive, one.y, label=name, ax=ax)

    return picture(
        "compare-coverage",
        paint,
        title="Observed against nominal coverage",
        size=(4.2, 4.4),
        alt="Observed against nominal coverage of every method.",
        caption="Intervals are too narrow below the line, too wide above it, and within chance in the grey band.",
    )


def _reliability_curves(facts: dict[str, FitSummary]) -> Picture:
    def paint(ax: Axes) -> None:
        ax.plot([0, 1], [0, 1], color=plot.INK, linestyle="-", linewidth=0.8, label="calibrated")
        low = 1.0
        for (name, one), colour, dash in zip(facts.items(), _colours(len(facts)), plot.DASHES * len(facts)):
            found = metrics.calibration(one.predictive.probabilities.cpu(), torch.as_tensor(one.y).long(), 8)
            used = found.count > 0
            confidence, accuracy = found.confidence[used].numpy(), found.accuracy[used].numpy()
            ax.plot(confidence, accuracy, color=colour, linestyle=dash, marker="o", markersize=3, label=name)
            low = min(low, float(confidence.min()))
        ax.set(xlabel="confidence", ylabel="accuracy", xlim=(low - 0.02, 1.02), ylim=(0, 1.05))
        ax.legend()

    return picture(
        "compare-reliability",
        paint,
        title="Reliability diagram",
        size=(4.2, 4.4),
        alt="Accuracy against confidence of every method.",
        caption="Below the line a method is overconfident, above it underconfident. Points with few rows are noisy.",
    )


# -- verdicts and methods


def _verdicts_section(facts: dict[str, FitSummary], pages: Mapping[str, str], boosting: FitSummary | None) -> Section:
    found = {name: assess(one) for name, one in facts.items()}
    rows = [(name, one.verdict, _main_finding(one, doubts(facts[name]))) for name, one in found.items()]
    if boosting is not None:
        wrong = predictive_doubts(boosting)
        text = wrong[0].text if wrong else "Its intervals or probabilities pass the same tests."
        rows.append((BOOSTING_LABEL, "not assessed", f"No posterior and no epistemic uncertainty. {text}"))
    text = "Each fit on its own, with its most important finding. Its report has the others."
    columns = (Column("Method"), Column("Verdict"), Column("Main finding"))
    links = tuple((pages[name], f"report of {name}") for name in facts if name in pages)
    return Section("Verdicts", (text,), Table(columns, tuple(rows)), links=links)


def _main_finding(found: Assessment, wrong: tuple[Finding, ...]) -> str:
    """Return the main reason why a fit is unreliable, or else its first finding."""
    if wrong:
        return wrong[0].text
    return found.reasons[0] if found.reasons else found.headline


def _methods_section(facts: dict[str, FitSummary], boosting: FitSummary | None) -> Section:
    rows = [(name, METHODS[one.method].title(), settings_text(one.settings)) for name, one in facts.items()]
    if boosting is not None:
        rows.append((BOOSTING_LABEL, TITLE, settings_text(boosting.settings)))
    first = next(iter(facts.values()))
    text = [
        f"All share the same network ({first.network}; {first.parameters:,} parameters), prior and noise. Only the "
        "inference method differs."
    ]
    if boosting is not None:
        noise = ", with normal noise estimated from residuals on other rows" * (first.task == "regression")
        text.append(f"Gradient boosting has the same columns and rows, and trees instead of the network{noise}.")
    head = (Column("Method"), Column("Description"), Column("Settings"))
    return Section("The methods", tuple(text), Table(head, tuple(rows)))
