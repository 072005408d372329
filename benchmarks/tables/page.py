"""The results page of the table benchmark: README.md, results.json and a picture, written from the cells."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.tables import data
from benchmarks.tables.cells import Record, finished
from benchmarks.tables.compare import OURS, RIVALS, Results, goals, standard_error
from benchmarks.timing import table as markdown

TITLES = {
    "ours": "`credibly fit`",
    "estimator": "estimator",
    "hgb": "HGB + MAPIE",
    "catboost": "CatBoost",
    "ngboost": "NGBoost",
    "gp": "GP",
    "mlp": "MLP",
    "catboost_rmse": "CatBoost, RMSE loss",
}
INTRODUCTION = """# Accuracy and calibration on real tables

How do the defaults of `credibly fit` compare with commonly used models? {count} real tables, up to {splits} splits
each, the defaults of every model, and scores on test rows that were not used for training or model selection.
"""
SETUP = """## Setup

**Scores.** Log-likelihood per test row, in the units of the target (log density) or of the classes (log probability).
A model without a density is given a Gaussian one: HistGradientBoosting with MAPIE the mean of its folds and a standard
deviation of the width of the 90 % interval over 2 x 1.645; CatBoost the mean and the sum of data and knowledge
uncertainty of ten virtual ensembles; the MLP the root mean square residual of a tenth of the training rows, held out.
The log density of a continuous model and the log probability of a count are not comparable, so tables of counts are
scored by the CRPS, from 50 quantiles of every model, none below zero. Probabilities of classes are at least 1e-12.

**Tied.** The difference of scores is paired by row. Its standard error has the variance of rows within a split and the
variance between splits beyond that. `credibly fit` counts as tied if it is behind the best peer by at most two standard
errors.

**Coverage.** Of the 90 % interval, or of the 90 % set of classes, as a user gets them. Sets of classes and intervals of
counts cannot have every probability, so they cover more: a set of one class is right as often as the class is, and an
interval that begins at 0 has no count to leave out below. "Exact" is the coverage of their randomised form, which
can be 90 %: sets that may be empty (`predict --allow-empty`), and intervals whose ends belong to them in some rows and
in others not. The goal is judged by both. On a table with 100 test rows in all splits together, a method
whose true coverage is 90 % is outside of 0.87 to 0.93 in one of three benchmarks; such tables are marked.

**What the defaults have seen.** The choices within a fit see its training rows alone. The choices that a fit can make,
and their limits, were designed with scores of the first split of eleven of these tables in view (Boston, concrete,
energy, wine, yacht, protein, diamonds, housing, wages, caschool, naval); a first complete run on first splits led to
clipped inputs and shorter training. Changes that were rejected were also tried on computers, vietnam and star;
breast_cancer, mathlevel and mroz were refitted during development. Small smooth networks were developed with test rows
of naval, energy, concrete and yacht in view. Heavy-tailed noise and its degrees of freedom were chosen by short fits to
training rows of the first splits of ten tables (computers, star, vietnam, wages, hi, males, budgetfood, protein,
housing, caschool). No choice was based on hdma or ofp.

**Models**, each with its defaults. `credibly fit`: as the command does on a Parquet file of the training
rows, with the task named, and all numbers of its report, without the page and its pictures. The threads and the
machine are at the end of this page. The peers ran in one thread, some of them on a loaded machine with two cores; those
whose cells have no per-row scores were measured for an earlier version of this page. Their difference from
`credibly fit` is that of the means, with the standard error of the paired difference at that time. Not every model has
every split (the standard error is missing where there is one).
"estimator": `BayesianRegressor(tune=None)` or `BayesianClassifier(tune=None)` on one-hot columns. HistGradientBoosting
with the CV+ intervals of MAPIE (5 folds; by person where the split is by person). CatBoost with the loss
`RMSEWithUncertainty` and posterior sampling; "CatBoost, RMSE loss" is its default loss, which has no uncertainty: it is
shown for its RMSE, and the goals do not count it except where stated. NGBoost with a Gaussian or a categorical
distribution, on one-hot columns. GP: scikit-learn's, an ARD RBF kernel with noise on standardised one-hot columns,
fitted to at most 2,000 random rows (hyperparameters by marginal likelihood on 1,000 of them, at most 100 steps); for
classes scikit-learn's classifier with one length scale, on at most 1,000 rows. For regressions by NGBoost and the GP,
columns of more than 12 categories are target-encoded instead.
MLP: scikit-learn's with early stopping (for classes without it), on standardised
one-hot columns.

**Tables.** The UCI tables have their standard splits of 90 and 10 %; all others have random splits of 80 and 20 %, and
are subsampled to 10,000 rows. Columns that are functions, components or consequences of the target are dropped, and so
are identifiers. In males the split is by person: `nr` is not an input, and `credibly fit` and MAPIE receive it as the
group. Targets that repeat a few values (wine, hi) have no density in a strict sense; a model that puts narrow peaks on
those values would gain without limit. This happens to the GP on wine, where 15 % of the rows are copies of others, so
the GP is omitted there.
"""


def summary(record: Record) -> str:
    """Return the goals and what failed, for the terminal."""
    lines = [_goal_line(*goal) for goal in goals(Results(finished(record), record.get("errors")))]
    failed = [c for c in record["cells"].values() if "error" in c or "absent" in c]
    for cell in failed:
        reason = cell.get("error") or cell.get("absent")
        lines.append(f"- not run: {cell['table']}, {cell['model']}, split {cell['split']}: {reason}")
    return "\n".join(lines)


def write_page(record: Record, cache: Path, folder: Path) -> None:
    """Write README.md, results.json (the cells without the scores of rows) and tables.svg into a folder."""
    results = Results(finished(record), record.get("errors"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(page(record, results, cache), encoding="utf-8")
    (folder / "tables.svg").write_text(picture(results), encoding="utf-8")
    cells = {k: {n: v for n, v in c.items() if n != "scores"} for k, c in sorted(record["cells"].items())}
    differences = {
        f"{table}/{model}": {"mean": round(found.mean, 6), "standard_error": round(found.error, 6)}
        for table in results.tables for model in results.models
        if model != OURS and (found := results.difference(table, model)) is not None
    }  # fmt: skip
    stored = {"machine": record["machine"], "differences_of_scores": differences, "cells": cells}
    (folder / "results.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(summary(record))


def page(record: Record, results: Results, cache: Path) -> str:
    """Return the page as Markdown."""
    splits = max(cell["split"] for cell in finished(record)) + 1
    regression = [t for t in results.tables if results.task(t) == "regression"]
    counts = [t for t in results.tables if results.task(t) == "counts"]
    classes = [t for t in results.tables if results.task(t) == "classes"]
    parts = [
        INTRODUCTION.format(count=len(results.tables), splits=splits),
        "## Goals\n",
        "\n".join(_goal_line(*goal) for goal in goals(results)),
        "![Difference of scores to every peer, and coverage, by table](tables.svg)",
        "Mean ± standard error over the splits that a model was run on; the best in bold. Comparisons below and the "
        "goals use the splits that both models have.\n",
        "## Log-likelihood per test row\n",
        by_table(results, regression + classes, "log_likelihood"),
    ]
    if counts:
        parts += ["## Counts: CRPS (lower is better)\n", by_table(results, counts, "crps")]
    parts += ["## RMSE\n", by_table(results, regression + counts, "rmse")]
    if classes:
        parts += ["## Accuracy\n", by_table(results, classes, "accuracy")]
    parts += ["## Against the best peer\n", _standings(results)]
    parts += ["## Methods and sampling\n", _methods(results)]
    parts += ["## Coverage of the 90 % interval or set\n", by_table(results, results.tables, "coverage")]
    if discrete := [t for t in results.tables if results.values(t, OURS, "coverage_exact")]:
        parts += ["## Counts and classes: coverage as given, and exact by randomisation\n", _exact(results, discrete)]
    parts += ["## Width of the 90 % interval, classes in the 90 % set\n", by_table(results, results.tables, "width")]
    parts += ["## Seconds to fit and predict\n", by_table(results, results.tables, "seconds")]
    parts += ["## Processor seconds, which do not depend on the load of the machine\n"]
    parts += [by_table(results, results.tables, "cpu_seconds")]
    parts += ["## Tables\n", _about(results, cache), SETUP, _missing(record), _footer(record)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def by_table(results: Results, tables: list[str], metric: str) -> str:
    """Return mean and standard error over splits, one line per table, the best in bold."""
    models = [m for m in results.models if any(results.values(t, m, metric) for t in tables)]
    lines = []
    for table in tables:
        best = results.best(table, models, metric) if metric in _RANKED else None
        digits = _digits(results, table, models, metric)
        line = [table]
        for model in models:
            values = results.values(table, model, metric)
            if not values:
                line.append("")
                continue
            text = f"{math.fsum(values) / len(values):,.{digits}f}"
            error = None if metric.endswith("seconds") else standard_error(values)
            text = text if error is None else f"{text} ± {error:,.{digits}f}"
            line.append(f"**{text}**" if model == best else text)
        lines.append(line)
    return markdown(["table", *(TITLES[model] for model in models)], lines)


_RANKED = ("log_likelihood", "crps", "rmse", "accuracy")


def _digits(results: Results, table: str, models: list[str], metric: str) -> int:
    """Return the digits after the point: three that count, from the smallest mean of the models."""
    if metric in ("log_likelihood", "accuracy", "coverage"):
        return 3
    if metric.endswith("seconds"):
        return 1
    smallest = min(abs(value) for value in results.means(table, models, metric).values())
    return 3 if smallest == 0 else min(6, max(0, 2 - math.floor(math.log10(smallest))))


def _standings(results: Results) -> str:
    lines = []
    for table in results.tables:
        found, excess = results.standing(table), results.excess(table)
        if found is None or excess is None:
            continue
        rival, gap = found
        where = "ahead" if gap.mean > 2 * gap.error else "tied" if gap.tied else "behind"
        lines.append([table, TITLES[rival], f"{gap.mean:+.3f} ± {gap.error:.3f}", where, f"{excess:.1%}"])
    if not lines:
        return "There are no cells of `credibly fit` yet."
    header = ["table", "best peer by score", "score, `credibly fit` minus peer", "", "RMSE or accuracy behind the best"]
    return markdown(header, lines)


def _methods(results: Results) -> str:
    """Return the method of each fit of ours, and what its diagnostics say."""
    lines = []
    for table in results.tables:
        for split, cell in sorted(results.cells.get((table, OURS), {}).items()):
            if "method" in cell:
                chains = (str(cell.get(name, "")) for name in ("sampling", "r_hat", "ess"))
                lines.append([table, str(split), cell["method"], cell["verdict"], *chains])
    if not lines:
        return "The cells of `credibly fit` were measured before this was recorded."
    return markdown(["table", "split", "method", "predictions", "sampling", "R-hat", "ESS"], lines)


def _exact(results: Results, tables: list[str]) -> str:
    """Return both coverages of discrete targets."""
    lines = []
    for table in tables:
        given, exact = (results.mean(table, OURS, metric) for metric in ("coverage", "coverage_exact"))
        lines.append([table, results.task(table), f"{given:.3f}", f"{exact:.3f}", f"{results.test_rows(table):,}"])
    return markdown(["table", "task", "as given", "exact", "test rows of all splits"], lines)


def _about(results: Results, cache: Path) -> str:
    lines = []
    for name in results.tables:
        first = results.about[name]
        known = data.read_cache(cache, name) if name in data.cached(cache) else None
        about, source, dropped = ("", "", "") if known is None else (known.about, known.source, known.dropped)
        kinds = "" if known is None else f"{first['inputs']} ({len(known.categorical)})"
        lines.append([name, about, source, f"{first['rows']:,}", f"{first['test_rows']:,}", kinds, dropped])
    header = ["table", "target", "source", "training rows", "test rows", "columns (categorical)", "dropped"]
    return markdown(header, lines)


def _goal_line(goal: str, value: str, met: bool | None) -> str:
    verdict = {True: "Met", False: "Missed", None: "Open"}[met]
    return f"- {verdict}: {goal}: {value}."


def _missing(record: Record) -> str:
    """Return the results that are not on the page, with the reasons."""
    lines: dict[tuple[str, str], list[str]] = {}
    for cell in record["cells"].values():
        reason = cell.get("error") or cell.get("absent")
        if reason and "only for numbers" not in reason:
            lines.setdefault((TITLES[cell["model"]], reason), []).append(f"{cell['table']} ({cell['split']})")
    found = [f"- {model}, {', '.join(cells)}: {reason}" for (model, reason), cells in lines.items()]
    return "\n".join(["## Not run\n", *found]) if found else ""


def _footer(record: Record) -> str:
    found = record["machine"]
    return (
        "Generated by: `python -m benchmarks.tables --cache DIR --out tables.json`, then `--page docs/results/tables` "
        f"(torch {found.get('torch')}, Python {found.get('python')}, {found.get('cores')} cores, "
        f"{found.get('workers')} fits at a time, {found.get('torch_threads')} threads each). "
        "The cells are in [results.json](results.json)."
    )


# -- picture ----------------------------------------------------------------------------------------------------------
# Differences beyond this many nats per row are drawn at the edge.
EDGE = 0.5


def picture(results: Results) -> str:
    """Return the picture as SVG: differences of scores to each peer with two standard errors, and coverage."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from credibly.plot.style import BLUE, DARK, PALETTE

    shown = [m for m in RIVALS if m in results.models]
    colours: dict[str, Any] = {OURS: BLUE, **dict(zip(RIVALS, PALETTE[1:]))}
    figure = Figure(figsize=(10, 1.5 + 0.32 * len(results.tables)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    height = {table: -i for i, table in enumerate(results.tables)}
    for k, model in enumerate(shown):
        offset = 0.3 - 0.6 * k / max(1, len(shown) - 1)
        gaps = {t: gap for t in results.tables if (gap := results.difference(t, model)) is not None}
        x = [min(EDGE, max(-EDGE, gap.mean)) for gap in gaps.values()]
        bars = [0.0 if abs(gap.mean) > EDGE else 2 * gap.error for gap in gaps.values()]
        y = [height[t] + offset for t in gaps]
        left.errorbar(x, y, xerr=bars, fmt="o", ms=3, lw=1, color=colours[model], label=TITLES[model])
    left.axvline(0, color=DARK, lw=0.8)
    left.set(xlim=(-1.1 * EDGE, 1.1 * EDGE), xlabel="score of credibly fit minus that of the peer (right: better)")
    for model in (OURS, *shown):
        found = {t: c for t in results.tables if (c := results.mean(t, model, "coverage")) is not None}
        size = 6 if model == OURS else 3.5
        marks = {"ls": "", "marker": "o", "ms": size, "color": colours[model], "label": TITLES[model]}
        right.plot(list(found.values()), [height[t] for t in found], **marks, zorder=3 if model == OURS else 2)
    right.axvspan(0.87, 0.93, color=DARK, alpha=0.08, lw=0)
    right.axvline(0.9, color=DARK, lw=0.8)
    right.set(xlabel="coverage of the 90 % interval or set", xlim=(None, 1.01))
    left.set_yticks(list(height.values()), list(height))
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, [label.strip("`") for label in labels], loc="outside lower center", ncols=6, frameon=False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "tables", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return buffer.getvalue()
