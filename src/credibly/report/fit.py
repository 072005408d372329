"""The report of one fit: verdict, model, metrics, calibration, uncertainty, convergence, next steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from credibly import plot
from credibly.methods import METHODS
from credibly.posterior.draws import DrawsPosterior
from credibly.report import metric_columns
from credibly.report.assessment import VERDICTS, Assessment, assess
from credibly.report.calibration import calibration_section
from credibly.report.classes import classes_section, confusion_picture, cost_section, most_frequent_error
from credibly.report.convergence import chains_section, training_section
from credibly.report.evaluated_rows import count_of_rows, origin
from credibly.report.function_view import function_section
from credibly.report.importance import effects_section, importance_section
from credibly.report.page import Column, Page, Recommendation, Section, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.report.provenance import choices_section, guarantee_section, warnings_section
from credibly.report.recommendations import compare_command
from credibly.report.row_statistics import plotted_rows
from credibly.report.uncertainty import selective_section, uncertainty_section
from credibly.tables.fit_summary import FitSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The most rows in the table of columns.
COLUMNS = 60
TONES: dict[str, Literal["pass", "warn", "fail"]] = dict(zip(VERDICTS, ("pass", "warn", "fail")))
# By severity of a finding.
MARKS = ("pass", "note", "warn", "fail")


def fit_page(facts: FitSummary) -> Page:
    """Return the report of a fit to a table."""
    lead = (
        f"{facts.method} predicts {facts.target} from {_count(len(facts.columns), 'column')} of {facts.table}. It was "
        f"fitted to {facts.rows:,} rows and evaluated on {count_of_rows(facts)}. Every sentence below is generated "
        "from this fit."
    )
    sections = [
        verdict_section(assess(facts)),
        warnings_section(facts),
        _model_section(facts),
        function_section(facts),
        _metrics_section(facts),
        classes_section(facts),
        cost_section(facts),
        calibration_section(facts),
        guarantee_section(facts),
        importance_section(facts),
        effects_section(facts),
        uncertainty_section(facts),
        selective_section(facts) if facts.task != "survival" else None,
        chains_section(facts),
        training_section(facts),
        choices_section(facts),
        _columns_section(facts),
        _next_section(facts),
    ]
    footer = f"credibly fit, method {facts.method}, seed {facts.seed}. The same seed and settings give the same page."
    title = f"Predicting {facts.target} in {facts.table} with {facts.method}"
    return Page(title, lead, tuple(s for s in sections if s), footer)


def verdict_section(found: Assessment) -> Section:
    """Return the verdict, its reasons and recommendations."""
    return Section(
        f"Verdict: {found.verdict}",
        found.lines,
        findings=found.reasons,
        marks=tuple(MARKS[finding.severity] for finding in found.findings),
        recommendations=found.recommendations,
        tone=TONES[found.verdict],
    )


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Format the settings of a method that are not None."""
    shown = [f"{key}={_plain(value)}" for key, value in settings.items() if value is not None]
    return ", ".join(shown) or "defaults"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- what was fitted


def _model_section(facts: FitSummary) -> Section:
    draws = facts.predictive.draws
    if facts.refitted and isinstance(facts.posterior, DrawsPosterior):
        draws = facts.posterior.shape[0] * facts.posterior.shape[1]
    held_out = "all of them fitted" if facts.refitted else f"{facts.held_out or 'none'} held out"
    output = "a number with an interval"
    if facts.classes is not None:
        output = f"probabilities of {len(facts.classes)} classes"
    rows: list[tuple[Value, ...]] = [
        ("Table", f"{facts.table}: {facts.rows:,} training rows, {held_out}"),
        ("Target", f"{facts.target}: {facts.kind}, predicts {output}"),
        ("Network", f"{facts.network}; {facts.parameters:,} parameters"),
        ("Prior", f"{facts.prior} (plausible weights before seeing data)"),
        ("Noise", f"{facts.noise} (variation that no model could predict)"),
        ("Method", f"{facts.method} ({METHODS[facts.method].title()}); {facts.why}"),
        ("Prediction", f"average over {draws:,} sets of weights" if draws > 1 else "one set of weights"),
        ("Settings", settings_text(facts.settings)),
        ("Evaluation", origin(facts)),
        ("Seed", str(facts.seed)),
        ("Fit time", f"{facts.seconds:,.1f} seconds"),
    ]
    if facts.class_weight is not None:
        rows.insert(2, ("Class weights", f"{facts.class_weight}: probabilities are those of the reweighted classes"))
    if facts.classes is not None:
        rows.insert(2, ("Classes", _listed(facts.classes)))
    return Section("What was fitted", table=Table((Column("Part"), Column("Description")), tuple(rows)))


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _columns_section(facts: FitSummary) -> Section | None:
    if not facts.columns:
        return None
    hidden = len(facts.columns) - COLUMNS
    text: tuple[str, ...] = ("How each input column was preprocessed, using the training rows only.",)
    if hidden > 0:
        text += (f"The first {COLUMNS} are shown; there {'is' if hidden == 1 else 'are'} {hidden} more.",)
    head = (Column("Column"), Column("Kind"), Column("Preprocessing"))
    return Section("The columns", text, Table(head, facts.columns[:COLUMNS]))


# -- metrics


def _metrics_section(facts: FitSummary) -> Section:
    regression = facts.task == "regression"
    columns = metric_columns.columns(facts.task, (facts.figures, facts.baseline))
    # Coverage has a target value instead of a direction, so neither row is highlighted as the best.
    shown = [dataclasses.replace(c, best=c.best if c.best in ("high", "low") else None) for _, c in columns]
    rows = [("this fit", *(facts.figures.get(key, "–") for key, _ in columns))]
    if facts.baseline:
        rows.append(("baseline", *(facts.baseline.get(key, "–") for key, _ in columns)))
    text = (
        f"{origin(facts)} The baseline ignores all columns and always predicts "
        f"{metric_columns.baseline_of(facts.task)}: a useful model beats it.",
    )
    drawn = [_predicted_observed(facts), _error_picture(facts)] if regression else [confusion_picture(facts)]
    findings = most_frequent_error(facts) if facts.task == "classification" else ()
    pictures = tuple(one for one in drawn if one is not None)
    return Section("How good is it?", text, Table((Column("Prediction"), *shown), tuple(rows)), pictures, findings)


def _predicted_observed(facts: FitSummary) -> Picture:
    predictive, y = plotted_rows(facts)
    coverage = facts.figures.get("coverage")
    covered = f" {coverage:.1%} of the values are inside." if coverage is not None else ""
    shown = f" {len(y):,} of the {len(facts.y):,} rows are shown." if len(y) < len(facts.y) else ""
    return picture(
        "observed",
        lambda ax: plot.predicted_observed(predictive, y, ax=ax),
        title="Predicted against observed",
        size=(5.4, 4.4),
        alt=f"Predicted mean with 90% interval against the observed value.{covered}",
        caption=f"Each row with its 90% interval. On the dashed line, prediction equals observation.{covered}{shown}",
    )


def _error_picture(facts: FitSummary) -> Picture:
    predictive, y = plotted_rows(facts)
    mean = predictive.mean.cpu().double().numpy()
    error = torch.as_tensor(y).double().numpy() - mean
    half = [(edge.cpu().double().numpy() - mean) for edge in predictive.interval(metric_columns.LEVEL)]

    def paint(ax: Axes) -> None:
        order = mean.argsort()
        ax.vlines(mean[order], half[0][order], half[1][order], color=plot.BLUE, alpha=0.18, linewidth=1.2)
        ax.plot(mean, error, linestyle="none", marker="o", markersize=3, color=plot.BLUE, alpha=0.75)
        ax.axhline(0, color=plot.INK, linestyle="--", linewidth=1)
        ax.set(xlabel="predicted mean", ylabel="observed minus predicted")

    return picture(
        "errors",
        paint,
        title="Error against prediction",
        size=(5.4, 4.4),
        alt="Error of each row against its predicted mean, with the 90% interval around it.",
        caption="Errors should scatter evenly around 0, and 9 in 10 should lie inside the vertical 90% intervals. A "
        "slope or a bend is structure that the fit has missed.",
    )


# -- next steps


def _next_section(facts: FitSummary) -> Section:
    output = "class probabilities" if facts.task == "classification" else "mean and interval"
    predict = f"Predict new rows: {output}, aleatoric and epistemic uncertainty, and an ood score per row."
    recommendations = (
        Recommendation(predict, "credibly predict RUN new.csv --out predictions.csv"),
        Recommendation("Evaluate it on later data, or data from another source.", "credibly evaluate RUN test.csv"),
        Recommendation("Compare it with the other methods.", compare_command(facts)),
    )
    text = ("RUN is the folder of this page. Recommendations specific to this fit are in the verdict above.",)
    return Section("What to do next", text, recommendations=recommendations)
