"""`evidence-picks-the-model`: does the marginal likelihood, or leave-one-out, pick the model that predicts best?

Networks with one hidden layer over a grid of widths and prior scales, on splits of three tables. For each: the Laplace
log marginal likelihood (full curvature), the ELBO of Bayes by Backprop (mean field) and PSIS-LOO of HMC, all from the
training rows alone; and the test log density of the same method. A criterion works if it ranks the models as the test
rows do.

Values of a model are averaged over splits before ranking; intervals are from 2,000 bootstrap samples of the splits. The
rule was fixed before any run; the lengths of chains and fits were chosen to limit run time, after a look at a few
models on yacht and Boston. On a data set a criterion passes if Spearman's rank correlation is at least 0.5 and the
lower end of its 90 % interval is above 0; it fails if the upper end is below 0.5; otherwise it is inconclusive. The
finding is reproduced if both the Laplace marginal likelihood and LOO pass on all data sets, and not reproduced if one
of them fails on one. The ELBO is reported as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from credibly import plot
from credibly.comparing import compare_models
from credibly.errors import InputError
from credibly.methods import BayesByBackprop, Laplace
from credibly.report.page import Column, Table, Value
from credibly.report.pictures import Picture
from studies import side_by_side as side
from studies.hmc_parts import Cells, Tally, Task, all_reproduced, hmc, one_thread, summary, table_task, verdict
from studies.study import Options, Result, Study, plus_minus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[np.float64]

NAMES = ("yacht", "boston", "energy")
FILES = tuple(f"uci/{name}.npz" for name in NAMES)
WIDTHS = (5, 20, 50)
SCALES = (0.3, 1.0, 3.0)
CRITERIA = {"laplace": "Laplace marginal likelihood", "elbo": "ELBO", "loo": "LOO of HMC"}
JUDGED = ("laplace", "loo")  # the two that the rule is about
LEAST = 0.5
SAMPLES = 2_000
RHAT = 1.1


def run(options: Options) -> Result:
    """Evaluate every model on every split."""
    splits = _splits(options)
    widths, scales = ((2, 4), (0.5, 2.0)) if options.quick else (WIDTHS, SCALES)
    tasks = [table_task(options, name, split) for name in _names(options) for split in range(splits)]
    tally, done = Tally(), 0
    with one_thread():
        for task in tasks:
            for width in widths:
                for scale in scales:
                    sentences = f"{task.group} {task.repeat}: {width} units, scale {scale:g}"
                    options.report(sentences, done, len(tasks) * len(widths) * len(scales))
                    one = dataclasses.replace(task, hidden=width)
                    tally.add(task.group, f"{width}, {scale:g}", criteria_of(one, scale, options.quick))
                    done += 1
    return result_of(tally.groups, _notes(tally.groups, tasks, options.quick), options.seed)


def _splits(options: Options) -> int:
    text = options.extra.get("splits", "1" if options.quick else "3")
    if not text.isdigit() or int(text) < 1:
        raise InputError("--set splits", f"must be a positive integer, got {text!r}")
    return int(text)


def _names(options: Options) -> tuple[str, ...]:
    chosen = tuple(options.extra.get("data", ",".join(NAMES)).split(","))
    if any(name not in NAMES for name in chosen):
        raise InputError("--set data", f"must be some of {','.join(NAMES)}, got {','.join(chosen)!r}")
    return chosen


def criteria_of(task: Task, scale: float, quick: bool = False) -> dict[str, float]:
    """Return the criteria per training row and the log density per test row of one model, by three methods."""
    problem, n = task.problem(scale), len(task.x)
    training: dict[str, Any] = {"compile": False, "init": "fresh", "lr": 2e-2, "steps": 40 if quick else 1000}
    laplace = Laplace(structure="full", **training).fit(problem, seed=task.seed, progress=False)
    longer = training | ({} if quick else {"steps": 2000})
    bbb = BayesByBackprop(**longer).fit(problem, seed=task.seed, progress=False)
    # Short trajectories with partial momentum refreshment, started at ensemble members: a bounded cost on every table.
    settings: dict[str, Any] = {
        "chains": 6,
        "warmup": 60,
        "draws": 100,
        "trajectory_length": 0.5,
        "refresh": 0.3,
        "max_steps": 30,
        "init": "ensemble",
    }
    if quick:
        settings = {"chains": 2, "warmup": 20, "draws": 20, "max_steps": 5}
    sampled = hmc(problem, task.seed, compile=False, **settings)
    posteriors = {"laplace": laplace, "elbo": bbb, "loo": sampled}
    found = compare_models({"loo": (sampled, problem)}, criteria=("loo",))["loo"]
    bound = compare_models({"elbo": (bbb, problem)}, criteria=("evidence",))["elbo"]
    criteria = {"laplace": laplace.log_evidence, "elbo": bound.figures["elbo"].value, "loo": found.figures["loo"].value}
    mixing = sampled.diagnostics(task.x_test).functions
    per_row = {key: value / n - math.log(task.y_std) for key, value in criteria.items()}  # in the units of the data
    tests = {f"{k}_test": task.judge(p.predict(task.x_test))["log_density"] for k, p in posteriors.items()}
    rhat = math.nan if mixing is None else mixing.rhat_most
    return per_row | tests | {"bad_k": found.bad_k / n, "rhat": rhat}


# -- from criteria to conclusions --------------------------------------------------------------------------------------
def spearman(a: Sequence[float] | Array, b: Sequence[float] | Array) -> Array:
    """Return the rank correlation along the last axis, with ties at their mean rank; NaN if one side is constant."""
    x, y = (_ranks(np.asarray(v, dtype=np.float64)) for v in (a, b))
    x, y = (v - v.mean(-1, keepdims=True) for v in (x, y))
    norm = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    found: Array = np.where(norm > 0, (x * y).sum(-1) / np.where(norm > 0, norm, 1.0), np.nan)
    return found


def _ranks(values: Array) -> Array:
    one, other = values[..., :, None], values[..., None, :]
    ranks: Array = (one > other).sum(-1) + (one == other).sum(-1) / 2
    return ranks


def correlation(cells: Cells, criterion: str, seed: int = 0) -> tuple[float, float, float]:
    """Return Spearman's correlation of a criterion with the test log density, and its 90 % bootstrap interval."""
    given = np.array([list(cells[model][criterion]) for model in cells])  # (models, splits)
    tested = np.array([list(cells[model][f"{criterion}_test"]) for model in cells])
    splits = given.shape[1]
    value = float(spearman(given.mean(1), tested.mean(1)))
    if splits < 2:
        return value, math.nan, math.nan
    picks = np.random.default_rng([seed, 0xE71]).integers(0, splits, (SAMPLES, splits))
    found = spearman(given[:, picks].mean(-1).T, tested[:, picks].mean(-1).T)  # (samples,)
    low, high = np.nanquantile(found, [0.05, 0.95])
    return value, float(low), float(high)


def judge(found: tuple[float, float, float]) -> bool | None:
    """Return whether a criterion ranks the models as the test rows do, by the rule above."""
    value, low, high = found
    if high < LEAST:
        return False
    return True if value >= LEAST and low > 0 else None


def result_of(groups: Mapping[str, Cells], notes: tuple[str, ...], seed: int = 0) -> Result:
    """Return the result computed from the values of all splits."""
    found = {g: {c: correlation(cells, c, seed) for c in CRITERIA} for g, cells in groups.items()}
    each = {g: {c: judge(v) for c, v in of.items()} for g, of in found.items()}
    reproduced = all_reproduced([each[g][c] for g in groups for c in JUDGED])
    sentences = [
        verdict(
            reproduced,
            "marginal likelihood and leave-one-out rank models as test rows do (rank correlation of 0.5 or more)",
        )
    ]
    rows: list[tuple[Value, ...]] = []
    for c, name in CRITERIA.items():
        correlations = "; ".join(f"{g} {_interval(found[g][c])}" for g in groups)
        lost = "; ".join(f"{g} {loss(cells, c):.3f}" for g, cells in groups.items())
        usual = "; ".join(f"{g} {typical_loss(cells, c):.3f}" for g, cells in groups.items())
        sentences.append(
            f"{name}: rank correlation with the test log density {correlations}. Loss of the picked model against the "
            f"best of the grid, in nats per test row: {lost}; of a random model: {usual}."
        )
        for g, cells in groups.items():
            best, picked = top(cells, f"{c}_test"), top(cells, c)
            rows.append(
                (
                    f"{g}, {name}",
                    _interval(found[g][c]),
                    picked,
                    plus_minus(*summary(cells, picked, f"{c}_test")),
                    best,
                    plus_minus(*summary(cells, best, f"{c}_test")),
                    loss(cells, c),
                    typical_loss(cells, c),
                )
            )
    columns = (
        Column("data, criterion"),
        Column("rank correlation", note="With its 90 % bootstrap interval over splits"),
        Column("picked (units, scale)"),
        Column("its test log density"),
        Column("best (units, scale)"),
        Column("its test log density"),
        Column("loss", digits=3),
        Column("loss of a random model", digits=3),
    )
    numbers = {"groups": groups, "correlations": found, "held_by_group": each}
    wide = {g: wider(cells) for g, cells in groups.items()}
    if all(len(cells) > 2 for cells in wide.values()):
        correlations = "; ".join(
            f"{name} {', '.join(f'{g} {correlation(cells, c, seed)[0]:.2f}' for g, cells in wide.items())}"
            for c, name in CRITERIA.items()
        )
        sentences.append(f"Post hoc, without the narrowest prior: rank correlation of {correlations}.")
    edge = sum(top(cells, f"{c}_test") not in narrower(cells) for cells in groups.values() for c in CRITERIA)
    sentences.append(
        f"In {edge} of {len(rows)} rows the best model has the widest prior of the grid; wider ones were not tried."
    )
    return Result(tuple(sentences), reproduced, Table(columns, tuple(rows)), (_scatter(groups),), numbers, notes)


def wider(cells: Cells) -> Cells:
    """Return the models except those with the smallest prior scale."""
    least = min(map(_scale, cells))
    return {model: row for model, row in cells.items() if _scale(model) > least}


def narrower(cells: Cells) -> Cells:
    """Return the models except those with the largest prior scale."""
    most = max(map(_scale, cells))
    return {model: row for model, row in cells.items() if _scale(model) < most}


def _scale(model: str) -> float:
    return float(model.split(", ")[1])


def top(cells: Cells, measure: str) -> str:
    """Return the model with the highest mean."""
    return max(cells, key=lambda model: summary(cells, model, measure)[0])


def loss(cells: Cells, criterion: str) -> float:
    """Return the log density lost by a criterion's pick against the best model of each split, averaged over splits."""
    given, tested = (np.array([list(cells[m][k]) for m in cells]) for k in (criterion, f"{criterion}_test"))
    picked = given.argmax(0)
    return float(np.mean(tested.max(0) - tested[picked, np.arange(given.shape[1])]))


def typical_loss(cells: Cells, criterion: str) -> float:
    """Return the same for a model picked at random."""
    tested = np.array([list(cells[m][f"{criterion}_test"]) for m in cells])
    return float(np.mean(tested.max(0) - tested.mean(0)))


def _interval(found: tuple[float, float, float]) -> str:
    value, low, high = found
    return f"{value:.2f} ({low:.2f} to {high:.2f})" if math.isfinite(low) else f"{value:.2f}"


def _scatter(groups: Mapping[str, Cells]) -> Picture:
    """Draw test log density against each criterion for each data set, both relative to the best model."""
    models = list(next(iter(groups.values())))
    widths, scales = (list(dict.fromkeys(m.split(", ")[i] for m in models)) for i in (0, 1))

    def paint(axes: list[Axes]) -> None:
        places = [(g, c) for g in groups for c in CRITERIA]
        for number, (axis, (g, c)) in enumerate(zip(axes, places, strict=True)):
            cells = groups[g]
            x, y = ({m: summary(cells, m, k)[0] for m in models} for k in (c, f"{c}_test"))
            for m in models:
                width, scale = m.split(", ")
                axis.plot(
                    x[m] - max(x.values()),
                    y[m] - max(y.values()),
                    "osD^v"[scales.index(scale) % 5],
                    ms=5.5,
                    linestyle="none",
                    color=plot.PALETTE[widths.index(width) % len(plot.PALETTE)],
                    label=f"{width} units, scale {scale}",
                )
            axis.set_title(f"{g}, {CRITERIA[c]}")
            if number >= len(places) - len(CRITERIA):
                axis.set_xlabel("criterion per training row")
            if number % len(CRITERIA) == 0:
                axis.set_ylabel("test log density")

    return side.panels(
        "evidence",
        paint,
        rows=len(groups),
        columns=len(CRITERIA),
        size=(9.0, 2.5 * len(groups) + 1.0),
        shared=False,
        legend=3,
        alt="Test log density against each criterion for models over widths and prior scales, one panel per data set "
        "and criterion",
        caption="Each mark is a width and a prior scale, averaged over splits; both axes are relative to the best "
        "model. Up and to the right is better.",
    )


def _notes(groups: Mapping[str, Cells], tasks: Sequence[Task], quick: bool) -> tuple[str, ...]:
    worst = ", ".join(f"{g} {max(max(row['rhat']) for row in cells.values()):.2f}" for g, cells in groups.items())
    high = ", ".join(f"{g} {np.mean([row['bad_k'] for row in cells.values()]):.1%}" for g, cells in groups.items())
    values = [v for cells in groups.values() for row in cells.values() for v in row["rhat"]]
    first = {t.group: t for t in reversed(tasks)}
    sizes = "; ".join(f"{g}: {len(t.x)} training and {len(t.x_test)} test rows" for g, t in first.items())
    count = len({t.repeat for t in tasks})
    return (
        f"{sizes}; {count} of the standard splits; one hidden layer, SiLU, learned noise, prior scale divided by the "
        "square root of the fan-in. Each criterion is compared with the predictions of its own method.",
        f"HMC: {'2 chains of 20' if quick else '6 chains of 100'} draws. 99 % quantile of R-hat over predictions for "
        f"the worst model: {worst}. Rows whose Pareto k is above its limit: {high}. In "
        f"{sum(v > RHAT for v in values)} of {len(values)} fits that quantile is above {RHAT:g}: those chains have "
        "not mixed, so LOO and the test density describe these draws, not the posterior, and with so many rows above "
        "the limit LOO may be too high.",
        "With few splits the bootstrap is coarse; Laplace and Bayes by Backprop are single fits from one "
        "initialisation.",
    )


STUDIES = {
    "evidence-picks-the-model": Study(
        "evidence-picks-the-model",
        "Does the marginal likelihood pick the best model?",
        "The marginal likelihood of a model, or its leave-one-out density, needs training rows only and prefers the "
        "model that predicts best (MacKay 1992, A practical Bayesian framework for backpropagation networks, for the "
        "marginal likelihood; Vehtari, Gelman & Gabry 2017 for leave-one-out).",
        run,
        FILES,
    )
}
