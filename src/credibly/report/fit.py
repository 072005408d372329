"""The page of one fit to a table: the verdict first, then what was fitted, how good and how calibrated it is, and what to do."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Literal

import torch

from credibly import plot
from credibly.demo.fits import summary
from credibly.metrics import scores as metrics
from credibly.report import inside
from credibly.report import tables as figures
from credibly.report.judgement import MARKS, VERDICTS, Judgement, assess
from credibly.report.page import Column, Page, Section, Step, Table, Value
from credibly.report.pictures import Picture, picture
from credibly.report.row_statistics import confidence_gap, shares_inside, some_rows
from credibly.tables.fit_summary import Facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 60  # in the table of columns, at most
CLASSES = 10  # in the picture of confusions, at most
LEVELS = (0.5, 0.8, 0.9, 0.95)
TONES: dict[str, Literal["good", "care", "stop"]] = dict(zip(VERDICTS, ("good", "care", "stop")))


def fit_page(facts: Facts) -> Page:
    """The report on a fit to a table."""
    found = assess(facts)
    lead = (
        f"{facts.target} predicted from {_count(len(facts.columns), 'column')} of {facts.table} by {facts.method}, learned from "
        f"{facts.rows:,} rows and judged on {_rows(facts)}. Every sentence below is written from the numbers of this fit."
    )
    sections = [
        verdict(found),
        _fitted(facts),
        inside.view(facts),
        _good(facts),
        _calibrated(facts),
        inside.doubt(facts),
        inside.unsure_and_wrong(facts),
        inside.chains(facts),
        inside.training(facts),
        _columns(facts),
        _next(facts),
    ]
    footer = f"credibly fit, method {facts.method}, seed {facts.seed}. The same seed and settings give the same page."
    return Page(
        f"{facts.target}: what {facts.method} makes of {facts.table}", lead, tuple(s for s in sections if s), footer
    )


def verdict(found: Judgement) -> Section:
    """The verdict, its reasons and what to do about them."""
    said = found.headline.partition(": ")[2]
    marks = tuple(MARKS[finding.weight] for finding in found.findings)
    return Section(
        f"Verdict: {found.verdict}", (said[0].upper() + said[1:],), findings=found.reasons, marks=marks, steps=found.steps,
        tone=TONES[found.verdict],
    )  # fmt: skip


def _rows(facts: Facts) -> str:
    if facts.on == "held-out":
        return f"{len(facts.y):,} held-out rows that it has not seen"
    return f"{len(facts.y):,} of the rows that it has learned from"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# -- what was fitted


def _fitted(facts: Facts) -> Section:
    settings = (
        ", ".join(f"{key}={_plain(value)}" for key, value in facts.settings.items() if value is not None)
        or "its defaults"
    )
    draws = (
        f"an average over {facts.predictive.draws:,} sets of weights"
        if facts.predictive.draws > 1
        else "one set of weights"
    )
    answers = (
        "a number, with an interval" if facts.task == "regression" else f"one of {len(facts.classes or ())} classes"
    )
    rows: list[tuple[Value, ...]] = [
        ("Table", f"{facts.table}: {facts.rows:,} rows to learn from, {facts.held_out:,} held out"),
        ("Target", f"{facts.target}: {facts.task}, the answer is {answers}"),
        ("Network", f"{facts.network}; {facts.parameters:,} parameters"),
        ("Prior", f"{facts.prior}: what is taken for likely before any row is seen"),
        ("Noise", f"{facts.noise}: what no model could predict"),
        ("Method", f"{facts.method} ({summary(facts.method).rstrip('.')}); {facts.why}"),
        ("Prediction", draws),
        ("Settings", settings),
        ("Seed", str(facts.seed)),
        ("Time", f"{facts.seconds:,.1f} seconds"),
    ]
    if facts.classes is not None:
        rows.insert(2, ("Classes", _listed(facts.classes)))
    return Section("What was fitted", table=Table((Column("What"), Column("How")), tuple(rows)))


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _columns(facts: Facts) -> Section | None:
    if not facts.columns:
        return None
    left = len(facts.columns) - COLUMNS
    text: tuple[str, ...] = ("What was done with each input column; all of it was decided by the training rows alone.",)
    if left > 0:
        text += (f"The first {COLUMNS} are shown; there {'is' if left == 1 else 'are'} {left} more.",)
    head = (Column("Column"), Column("Kind"), Column("What was done"))
    return Section("The columns", text, Table(head, facts.columns[:COLUMNS]))


# -- how good, how calibrated


def _good(facts: Facts) -> Section:
    always = "the training mean" if facts.task == "regression" else "the training shares"
    columns = figures.columns(facts.task, (facts.figures, facts.baseline))
    shown = [dataclasses.replace(c, best=c.best if c.best in ("high", "low") else None) for _, c in columns]
    rows = [("this fit", *(facts.figures.get(key, "–") for key, _ in columns))]
    if facts.baseline:
        rows.append((f"always {always}", *(facts.baseline.get(key, "–") for key, _ in columns)))
    text = (
        f"Figures on {_rows(facts)}. Beside them those of a prediction that looks at no column and always gives {always}: a model "
        "is worth something where it is better than that.",
    )
    drawn = _observed(facts) if facts.task == "regression" else _confusion(facts)
    said = () if facts.task == "regression" else _confused(facts)
    pictures = () if drawn is None else (drawn,)
    return Section("How good is it?", text, Table((Column("Prediction"), *shown), tuple(rows)), pictures, said)


def _observed(facts: Facts) -> Picture:
    predictive, y = some_rows(facts)
    held = facts.figures.get("coverage")
    more = f" {held:.1%} of the values are inside." if held is not None else ""
    some = f" {len(y):,} of the {len(facts.y):,} rows are shown." if len(y) < len(facts.y) else ""
    return picture(
        "observed", lambda ax: plot.predicted_observed(predictive, y, ax=ax), title="Predicted against observed", size=(5.4, 4.4),
        alt=f"Predicted mean with 90% interval against the observed value.{more}",
        caption=f"Each row with its 90% interval; on the dashed line prediction and truth are equal.{more}{some}",
    )  # fmt: skip


def _confusion(facts: Facts) -> Picture | None:
    names = facts.classes or ()
    if len(names) < 2 or len(names) > CLASSES:
        return None
    right = facts.figures.get("accuracy")
    told = "" if right is None else f" {right:.1%} of the rows are on the diagonal."
    side = 2.6 + 0.36 * len(names)
    return picture(
        "confusion", lambda ax: plot.confusion(facts.predictive, facts.y, classes=names, ax=ax), title="What was taken for what",
        size=(max(side, 4.0), max(0.85 * side, 3.2)), alt=f"Table of observed against most probable classes.{told}",
        caption=f"Numbers of rows; right answers are on the diagonal.{told}",
    )  # fmt: skip


def _confused(facts: Facts) -> tuple[str, ...]:
    """The confusion that is most frequent, where there is one."""
    names = facts.classes or ()
    guess = facts.predictive.probabilities.cpu().argmax(-1)
    y = torch.as_tensor(facts.y).long()
    wrong = guess != y
    if len(names) < 2 or not bool(wrong.any()):
        return ()
    pairs, count = torch.unique(torch.stack([y[wrong], guess[wrong]], 1), dim=0, return_counts=True)
    seen, taken = pairs[int(count.argmax())].tolist()
    of = int((y == seen).sum())
    return (
        f"The most frequent mistake: {names[seen]} taken for {names[taken]}, {int(count.max())} of {_count(of, 'row')}.",
    )


def _calibrated(facts: Facts) -> Section:
    return _intervals(facts) if facts.task == "regression" else _confidence(facts)


def _intervals(facts: Facts) -> Section:
    n = len(facts.y)
    rows: list[tuple[Value, ...]] = []
    off = []
    for level, share in zip(LEVELS, shares_inside(facts, LEVELS)):
        error = metrics.coverage_standard_error(level, n)
        low, high = max(level - 2 * error, 0.0), min(level + 2 * error, 1.0)
        reading = "too narrow" if share < low else "too wide" if share > high else "as promised"
        off += [f"{level:.0%} intervals are {reading}"] if reading != "as promised" else []
        rows.append((f"{level:.0%}", f"{share:.1%}", f"{low:.0%} to {high:.0%}", reading))
    head = (Column("Interval"), Column("Holds"), Column("Within chance"), Column("Reading"))
    text = (
        "A 90% interval promises to hold 9 values in 10. An interval that holds fewer is overconfident: decisions that rest on it "
        f"go wrong more often than one thinks. With {_count(n, 'row')} the share cannot be known exactly: within chance is two "
        "binomial standard errors either way.",
    )
    said = (
        f"By more than chance: {', '.join(off)}."
        if off
        else f"At all {len(LEVELS)} levels the intervals hold what they promise, within chance.",
    )
    curve = picture(
        "coverage", lambda ax: plot.coverage_curve(facts.predictive, facts.y, ax=ax), title="Do intervals hold what they promise?",
        size=(4.8, 4.0), alt=f"Observed against promised coverage. {' '.join(f'{r[0]}: {r[1]}.' for r in rows)}",
        caption="Below the line intervals are too narrow, above it too wide; in the grey strip a difference is chance.",
    )  # fmt: skip
    return Section("Is it calibrated?", text, Table(head, tuple(rows)), (curve,), said)


def _confidence(facts: Facts) -> Section:
    found = metrics.calibration(facts.predictive.probabilities.cpu(), torch.as_tensor(facts.y).long())
    gap = confidence_gap(facts)
    said: tuple[str, ...] = ()
    caption = f"Calibration error {float(found.ece):.3f}."
    if gap is not None:
        sure, right, error = gap
        reading = (
            "too sure"
            if sure > right + 2 * error
            else "too cautious"
            if sure < right - 2 * error
            else "as sure as it is right"
        )
        said = (
            f"On average {reading}: confidence {sure:.1%}, right {right:.1%}; chance explains up to {2 * error:.1%}.",
        )
        caption = f"Mean confidence {sure:.3f}, accuracy {right:.3f}, calibration error {float(found.ece):.3f}."

    def paint(ax: Axes) -> None:
        plot.reliability(found, ax=ax)

    drawn = picture(
        "reliability", paint, title="How often is it right when it is that sure?", size=(4.8, 4.0),
        alt=f"Reliability diagram. {caption}", caption=f"{caption} Bars are shares of rows, with their number.",
    )  # fmt: skip
    text = (
        "A probability of 0.8 promises to be right 8 times in 10. Points on the dashed line keep that promise; below it the model is "
        "too sure, above it too cautious. A point that rests on few rows says little.",
    )
    return Section("Is it calibrated?", text, None, (drawn,), said)


# -- what to do next


def _next(facts: Facts) -> Section:
    target = shlex.join(["--target", facts.target])
    steps = [
        Step("Predict new rows: mean, interval, both kinds of uncertainty and an ood score for each."
             if facts.task == "regression" else
             "Predict new rows: a probability for each class, both kinds of uncertainty and an ood score for each.",
             "credibly predict RUN new.csv --out predictions.csv"),
        Step("Judge it on rows that came later, or from elsewhere.", "credibly evaluate RUN test.csv"),
        Step("See what the other methods make of the table.", f"credibly compare {shlex.quote(facts.table)} {target}"),
    ]  # fmt: skip
    text = (
        "RUN stands for the folder that this page is in. What the numbers ask for comes first: it is in the verdict above.",
    )
    return Section("What to do next", text, steps=tuple(steps))
