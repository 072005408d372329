"""Comparisons over cells: means over splits, paired differences of scores, and the goals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

from benchmarks.tables.cells import Record

OURS = "ours"
# The models that the goals compare with.
RIVALS = ("hgb", "catboost", "ngboost", "gp", "mlp")
# The goals: fraction of tables on which the score is best or tied, mean excess of RMSE (or of the best accuracy),
# limits of coverage on every table, seconds of a fit by the number of rows.
TIED_FRACTION = 14 / 17
EXCESS = 0.03
COVERAGE, LEVEL = (0.87, 0.93), 0.9
SECONDS = ((11_000, 120.0), (50_000, 300.0))
TIE = 2.0  # standard errors


@dataclass(frozen=True)
class Difference:
    """A mean difference of scores per row, ours minus the other, and its standard error."""

    mean: float
    error: float

    @property
    def tied(self) -> bool:
        """Whether ours is ahead, or behind by no more than TIE standard errors."""
        return self.mean >= -TIE * self.error


class Results:
    """The finished cells of a record, by table and model.

    Args:
        cells: the cells.
        errors: standard errors of differences of scores of one split, by TABLE/MODEL, for cells without scores of rows.
    """

    def __init__(self, cells: Iterable[Record], errors: Mapping[str, float] | None = None) -> None:
        self.errors = errors or {}
        self.cells: dict[tuple[str, str], dict[int, Record]] = {}
        for cell in cells:
            self.cells.setdefault((cell["table"], cell["model"]), {})[cell["split"]] = cell
        first = {table: next(iter(found.values())) for (table, _), found in self.cells.items()}
        self.about = first
        self.tables = sorted(first, key=lambda name: (_ORDER[first[name]["task"]], first[name]["rows"], name))
        found = {model for _, model in self.cells}
        self.models = [m for m in (OURS, "estimator", *RIVALS, "catboost_rmse") if m in found]

    def task(self, table: str) -> str:
        """Return the task of a table."""
        return str(self.about[table]["task"])

    def score_name(self, table: str) -> str:
        """Return the metric whose score is compared: crps (lower is better) for counts, else log_likelihood."""
        return "crps" if self.task(table) == "counts" else "log_likelihood"

    def error_name(self, table: str) -> str:
        """Return the metric of point predictions: accuracy (higher is better) for classes, else rmse."""
        return "accuracy" if self.task(table) == "classes" else "rmse"

    def test_rows(self, table: str) -> int:
        """Return the number of test rows of all splits of ours together."""
        return sum(int(cell["test_rows"]) for cell in self.cells.get((table, OURS), {}).values())

    def values(self, table: str, model: str, metric: str) -> list[float]:
        """Return a metric of all splits, in their order; empty where there is none."""
        found = self.cells.get((table, model), {})
        return [found[split][metric] for split in sorted(found) if metric in found[split]]

    def mean(self, table: str, model: str, metric: str) -> float | None:
        """Return the mean over splits, or None."""
        values = self.values(table, model, metric)
        return fmean(values) if values else None

    def means(self, table: str, models: Iterable[str], metric: str) -> dict[str, float]:
        """Return the means of the models that have the metric."""
        found = {model: self.mean(table, model, metric) for model in models}
        return {model: value for model, value in found.items() if value is not None}

    def best(self, table: str, models: Iterable[str], metric: str) -> str | None:
        """Return the model with the best mean, or None."""
        means = self.means(table, models, metric)
        if not means:
            return None
        sign = -1 if metric in ("rmse", "crps") else 1
        return max(means, key=lambda model: sign * means[model])

    def difference(self, table: str, other: str, ours: str = OURS) -> Difference | None:
        """Return the paired difference of the scores per row, over the splits that both have.

        Cells that were stored without scores of rows are compared by their means; the standard error is that of an
        earlier comparison.
        """
        mine, theirs = self.cells.get((table, ours), {}), self.cells.get((table, other), {})
        both = [s for s in mine if s in theirs]
        splits = [s for s in both if "scores" in mine[s] and "scores" in theirs[s]]
        if splits:
            return paired([np.array(mine[s]["scores"]) - np.array(theirs[s]["scores"]) for s in splits])
        name, error = self.score_name(table), self.errors.get(f"{table}/{other}")
        if error is None or not all(name in cell[s] for cell in (mine, theirs) for s in both) or not both:
            return None
        gap = fmean(mine[s][name] - theirs[s][name] for s in both)
        return Difference(-gap if name == "crps" else gap, error / math.sqrt(len(both)))

    def standing(self, table: str) -> tuple[str, Difference] | None:
        """Return the best rival by score, and the difference to it; None while ours or all rivals are missing."""
        found = {rival: gap for rival in RIVALS if (gap := self.difference(table, rival)) is not None}
        return min(found.items(), key=lambda item: item[1].mean) if found else None

    def excess(self, table: str, models: Iterable[str] = RIVALS) -> float | None:
        """Return how far ours is behind the best: RMSE over the lowest minus 1, or the highest accuracy over ours.

        A model is compared on the splits that both have. None while ours or all models are missing.
        """
        metric, ours = self.error_name(table), self.cells.get((table, OURS), {})
        ratios = []
        for model in models:
            theirs = self.cells.get((table, model), {})
            splits = [split for split in ours if split in theirs]
            if splits:
                ratio = sum(ours[s][metric] for s in splits) / sum(theirs[s][metric] for s in splits)
                ratios.append(1 / ratio if metric == "accuracy" else ratio)
        return max(0.0, max(ratios) - 1) if ratios else None


_ORDER = {"regression": 0, "counts": 1, "classes": 2}


def paired(parts: list[np.ndarray]) -> Difference:
    """Return the mean of paired differences and its standard error, rows within splits.

    The error has two parts: rows within a split, and what varies between splits beyond that, which is the effect of
    the training rows (estimated as in an analysis of variance, not below zero).
    """
    means = [float(part.mean()) for part in parts]
    within = [float(part.var(ddof=1)) / len(part) if len(part) > 1 else 0.0 for part in parts]
    between = 0.0 if len(parts) < 2 else max(0.0, stdev(means) ** 2 - fmean(within))
    return Difference(fmean(means), math.sqrt((fmean(within) + between) / len(parts)))


def standard_error(values: list[float]) -> float | None:
    """Return the standard error of a mean over splits; None for one split."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


# -- goals ------------------------------------------------------------------------------------------------------------
def goals(results: Results) -> list[tuple[str, str, bool | None]]:
    """Return each goal, the value reached and whether it is met (None without results of ours)."""
    standings = {table: results.standing(table) for table in results.tables}
    known = {table: found for table, found in standings.items() if found is not None}
    if not known:
        return [("all goals", "no cells of `credibly fit` beside those of a peer yet", None)]
    tied = [table for table, (_, difference) in known.items() if difference.tied]
    behind = [f"{t} ({d.mean:+.3f} ± {d.error:.3f} against {r})" for t, (r, d) in known.items() if not d.tied]
    excesses = {t: e for t in results.tables if (e := results.excess(t)) is not None}
    everything = {t: e for t in results.tables if (e := results.excess(t, (*RIVALS, "catboost_rmse"))) is not None}
    coverages = results_coverage(results)
    worst = max(excesses, key=lambda t: excesses[t])
    lines: list[tuple[str, str, bool | None]] = [
        (
            "score best or tied within two standard errors on 14 of 17 tables",
            f"{len(tied)} of {len(known)}" + (f"; behind on {', '.join(behind)}" if behind else ""),
            len(tied) >= TIED_FRACTION * len(known),
        ),
        (
            "RMSE or accuracy within 3 % of the best on average",
            f"{fmean(excesses.values()):.1%} over {len(excesses)} tables (median {median(excesses.values()):.1%}); "
            f"most on {worst} ({excesses[worst]:.1%}); "
            f"{fmean(everything.values()):.1%} with CatBoost's default loss among the peers",
            fmean(excesses.values()) <= EXCESS,
        ),
        _coverage_goal("coverage of 90 % between 0.87 and 0.93 on every table", coverages, results),
    ]
    exact = coverages | results_coverage(results, metric="coverage_exact")
    if exact != coverages:
        what = "the same with randomised intervals of counts and sets of classes, which can cover exactly 90 %"
        lines.append(_coverage_goal(what, exact, results))
    timed = (_time_goal(results, above, limit) for above, limit in zip((0, SECONDS[0][0]), SECONDS))
    return lines + [line for line in timed if line is not None]


def _coverage_goal(what: str, coverages: Mapping[str, float], results: Results) -> tuple[str, str, bool | None]:
    """Return the goal for coverage; tables outside are marked if two standard errors of their rows are inside."""
    least, most = COVERAGE
    outside = []
    for table, value in coverages.items():
        error = math.sqrt(LEVEL * (1 - LEVEL) / results.test_rows(table))
        chance = " (within chance of 0.90)" if abs(value - LEVEL) <= TIE * error else ""
        outside += [] if least <= value <= most else [f"{table} {value:.3f}{chance}"]
    found = f"{min(coverages.values()):.3f} to {max(coverages.values()):.3f}"
    return what, found + (f"; outside on {', '.join(outside)}" if outside else ""), not outside


def results_coverage(results: Results, model: str = OURS, metric: str = "coverage") -> dict[str, float]:
    """Return the coverage of a model by table, where it has the metric."""
    found = {table: results.mean(table, model, metric) for table in results.tables}
    return {table: value for table, value in found.items() if value is not None}


def _time_goal(results: Results, above: int, limit: tuple[int, float]) -> tuple[str, str, bool | None] | None:
    most, seconds = limit
    found = {
        table: max(values)
        for table in results.tables
        if above < results.about[table]["rows"] <= most and (values := results.values(table, OURS, "seconds"))
    }
    if not found:
        return None
    slowest = max(found, key=lambda table: found[table])
    rows = results.about[slowest]["rows"]
    what = f"a fit of up to {most:,} rows in at most {seconds:.0f} s"
    return what, f"{found[slowest]:.0f} s at most ({slowest}, {rows:,} rows)", found[slowest] <= seconds
