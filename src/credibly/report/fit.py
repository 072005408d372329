"""The report of one fit: verdict, model, metrics, calibration, uncertainty, convergence, next steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch

from credibly import plot
from credibly.methods import METHODS
from credibly.metrics import scores as metrics
from credibly.report import metric_columns
from credibly.report.assessment import VERDICTS, Assessment, assess
from credibly.report.convergence import chains_section, training_section
from credibly.report.function_view import function_section
from credibly.report.page import Column, Page, Recommendation, Section, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.report.recommendations import compare_command
from credibly.report.row_statistics import confidence_gap, interval_coverage, plotted_rows
from credibly.report.survival import censored_section
from credibly.report.uncertainty import selective_section, uncertainty_section
from credibly.tables.fit_summary import FitSummary

# The most rows in the table of columns, and the most classes in a confusion matrix.
COLUMNS = 60
CLASSES = 10
LEVELS = (0.5, 0.8, 0.9, 0.95)
TONES: dict[str, Literal["pass", "warn", "fail"]] = dict(zip(VERDICTS, ("pass", "warn", "fail")))
# By severity of a finding.
MARKS = ("pass", "note", "warn", "fail")


def fit_page(facts: FitSummary) -> Page:
    """Return the report of a fit to a table."""
    lead = (
        f"{facts.method} predicts {facts.target} from {_count(len(facts.columns), 'column')} of {facts.table}. It was "
        f"fitted to {facts.rows:,} rows and evaluated on {_evaluated(facts)}. Every sentence below is generated from "
        "this fit."
    )
    sections = [
        verdict_section(assess(facts)),
        _model_section(facts),
        function_section(facts),
        _metrics_section(facts),
        CALIBRATION[facts.task](facts),
        uncertainty_section(facts),
        selective_section(facts) if facts.task != "survival" else None,
        chains_section(facts),
        training_section(facts),
        _columns_section(facts),
        _next_section(facts),
    ]
    footer = f"credibly fit, method {facts.method}, seed {facts.seed}. The same seed and settings give the same page."
    title = f"Predicting {facts.target} in {facts.table} with {facts.method}"
    return Page(title, lead, tuple(s for s in sections if s), footer)


def verdict_section(found: Assessment) -> Section:
    """Return the verdict, its reasons and recommendations."""
    headline = found.headline.partition(": ")[2]
    return Section(
        f"Verdict: {found.verdict}",
        (headline[0].upper() + headline[1:],),
        findings=found.reasons,
        marks=tuple(MARKS[finding.severity] for finding in found.findings),
        recommendations=found.recommendations,
        tone=TONES[found.verdict],
    )


def _evaluated(facts: FitSummary) -> str:
    return f"{len(facts.y):,} {'held-out' if facts.on == 'held-out' else 'of the training'} rows"


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
    output = "a number with an interval"
    if facts.classes is not None:
        output = f"probabilities of {len(facts.classes)} classes"
    rows: list[tuple[Value, ...]] = [
        ("Table", f"{facts.table}: {facts.rows:,} training rows, {facts.held_out:,} held out"),
        ("Target", f"{facts.target}: {facts.kind}, predicts {output}"),
        ("Network", f"{facts.network}; {facts.parameters:,} parameters"),
        ("Prior", f"{facts.prior} (plausible weights before seeing data)"),
        ("Noise", f"{facts.noise} (variation that no model could predict)"),
        ("Method", f"{facts.method} ({METHODS[facts.method].title()}); {facts.why}"),
        ("Prediction", f"average over {draws:,} sets of weights" if draws > 1 else "one set of weights"),
        ("Settings", settings_text(facts.settings)),
        ("Seed", str(facts.seed)),
        ("Fit time", f"{facts.seconds:,.1f} seconds"),
    ]
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
    # Coverage has a target instead of a direction, so it is no contest with the baseline.
    shown = [dataclasses.replace(c, best=c.best if c.best in ("high", "low") else None) for _, c in columns]
    rows = [("this fit", *(facts.figures.get(key, "–") for key, _ in columns))]
    if facts.baseline:
        rows.append(("baseline", *(facts.baseline.get(key, "–") for key, _ in columns)))
    text = (
        f"Metrics on {_evaluated(facts)}. The baseline ignores all columns and always predicts "
        f"{metric_columns.baseline_of(facts.task)}: a useful model beats it.",
    )
    drawn = _predicted_observed(facts) if regression else _confusion_matrix(facts)
    findings = _most_frequent_error(facts) if facts.task == "classification" else ()
    pictures = () if drawn is None else (drawn,)
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


def _confusion_matrix(facts: FitSummary) -> Picture | None:
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


def _most_frequent_error(facts: FitSummary) -> tuple[str, ...]:
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
    return (f"Most frequent error: {error}, {int(count.max())} of {_count(of, 'row')}.",)


# -- calibration


def _interval_section(facts: FitSummary) -> Section:
    n = len(facts.y)
    rows: list[tuple[Value, ...]] = []
    off = []
    for level, observed in zip(LEVELS, interval_coverage(facts, LEVELS)):
        error = metrics.coverage_standard_error(level, n)
        low, high = max(level - 2 * error, 0.0), min(level + 2 * error, 1.0)
        result = "too narrow" if observed < low else "too wide" if observed > high else "calibrated"
        off += [f"{level:.0%} intervals are {result}"] if result != "calibrated" else []
        rows.append((f"{level:.0%}", f"{observed:.1%}", f"{low:.0%} to {high:.0%}", result))
    head = (Column("Interval"), Column("Coverage"), Column("Within chance"), Column("Result"))
    text = (
        "A 90% interval should cover 9 values in 10. One that covers fewer is overconfident: decisions based on it go "
        f"wrong more often than expected. With {_count(n, 'row')}, coverage is only known approximately: within chance "
        "is two binomial standard errors either way.",
    )
    finding = f"At all {len(LEVELS)} levels, coverage is within chance of its nominal value."
    if off:
        finding = f"More than chance explains: {', '.join(off)}."
    curve = picture(
        "coverage",
        lambda ax: plot.coverage_curve(facts.predictive, facts.y, ax=ax),
        title="Observed against nominal coverage",
        size=(4.8, 4.0),
        alt=f"Observed against nominal coverage. {' '.join(f'{r[0]}: {r[1]}.' for r in rows)}",
        caption="Below the line intervals are too narrow, above it too wide. Inside the grey band is within chance.",
    )
    return Section("Is it calibrated?", text, Table(head, tuple(rows)), (curve,), (finding,))


def _reliability_section(facts: FitSummary) -> Section:
    found = metrics.calibration(facts.predictive.probabilities.cpu(), torch.as_tensor(facts.y).long())
    gap = confidence_gap(facts)
    findings: tuple[str, ...] = ()
    caption = f"Calibration error {float(found.ece):.3f}."
    if gap is not None:
        confidence, accuracy, error = gap
        result = "calibrated"
        if confidence > accuracy + 2 * error:
            result = "overconfident"
        elif confidence < accuracy - 2 * error:
            result = "underconfident"
        scores = f"mean confidence {confidence:.1%}, accuracy {accuracy:.1%}"
        findings = (f"On average {result}: {scores}; a gap of up to {2 * error:.1%} is within chance.",)
        caption = (
            f"Mean confidence {confidence:.3f}, accuracy {accuracy:.3f}, calibration error {float(found.ece):.3f}."
        )
    drawn = picture(
        "reliability",
        lambda ax: plot.reliability(found, ax=ax),
        title="Reliability diagram",
        size=(4.8, 4.0),
        alt=f"Reliability diagram. {caption}",
        caption=f"{caption} Bars show the fraction of rows, with their number.",
    )
    text = (
        "A probability of 0.8 should be right 8 times in 10. Points on the dashed line are calibrated; below it the "
        "model is overconfident, above it underconfident. Points with few rows are noisy.",
    )
    return Section("Is it calibrated?", text, None, (drawn,), findings)


CALIBRATION = {
    "regression": _interval_section,
    "classification": _reliability_section,
    "survival": censored_section,
}


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
