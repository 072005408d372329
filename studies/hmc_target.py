"""Two findings on the density that HMC draws from: its temperature and the scale of its prior.

`temperature`. The whole posterior, prior included, at T from 0.03 to 10, trajectories of pi sigma sqrt(T) / 2 as in the article.
Rule, set before any run: on a data set the finding (tempering is hardly needed without data augmentation) holds where no T below 1
has a clearly higher log density than T = 1, and fails where one has. It holds if it does on all data sets.

`prior-scale`. The prior's variance over the range of the article, 1/8 to 5 times the one that was fixed beforehand. Rule: on a data
set the finding (the average is robust to the prior's scale) holds where the best of the scales gains at most 0.05 nats a row over
the worst, and fails where it gains clearly more; between the two the numbers cannot tell. It holds if it does on all data
sets. (The published range is about 0.03 nats on CIFAR-10.) MAP at the same scales is told beside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from credibly.methods import MAP
from credibly.report.page import Column, Table, Value
from studies.hmc_parts import (
    IMAGE_SCALE,
    MNIST,
    SOURCE,
    TABLE_SCALE,
    Cells,
    Estimate,
    Tally,
    Task,
    acceptance_of,
    all_reproduced,
    clear,
    curves,
    difference,
    hmc,
    image_task,
    one_thread,
    score_of,
    size_note,
    summary,
    table_task,
    signed,
    verdict,
)
from studies.study import Options, Result, Study, plus_minus

FILES = ("uci/boston.npz", MNIST)
TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
VARIANCES = (1 / 8, 1 / 2, 1.0, 5.0)  # times the fixed one
ROBUST = 0.05
APART = 1.2

# IMDB: accuracy and log likelihood, read off a figure.
PUBLISHED_TEMPERATURE = {
    0.03: (0.77, -0.47),
    0.1: (0.80, -0.43),
    0.3: (0.83, -0.38),
    1.0: (0.865, -0.31),
    3.0: (0.83, -0.42),
    10.0: (0.67, -0.66),
}
PUBLISHED_SCALE = "CIFAR-10, variance 1/40 to 1: accuracy 0.867 to 0.880, log likelihood about -0.41 to -0.38"


def _tasks(options: Options, splits: int, parts: int) -> list[Task]:
    if options.quick:
        return [table_task(options, "boston", 0), image_task(options, 0, 100, side=4, hidden=8, test=100)]
    tables = [table_task(options, "boston", i) for i in range(splits)]
    return [*tables, *(image_task(options, i) for i in range(parts))]


def _settings(task: Task, quick: bool) -> dict[str, Any]:
    if quick:
        return {"chains": 2, "warmup": 20, "draws": 8, "max_steps": 10, "compile": False}
    return {"chains": 4 if task.labels else 6, "warmup": 25, "draws": 25, "compile": not task.labels}


def _fitted(task: Task, options: Options, scale: float, temperature: float = 1.0) -> dict[str, float]:
    """Figures of HMC at one scale and temperature."""
    length = math.pi / 2 * math.sqrt(temperature)
    problem = task.problem(scale, temperature)
    posterior = hmc(problem, task.seed, trajectory_length=length, **_settings(task, options.quick))
    found = posterior.diagnostics(task.x_test[:500]).functions
    return task.judge(posterior.predict(task.x_test)) | {
        "rhat": math.nan if found is None else found.rhat_most,
        "acceptance": acceptance_of(posterior),
    }


def unmixed(groups: Mapping[str, Cells]) -> list[str]:
    """A sentence on the settings whose chains have not mixed; none where all have."""
    found = {g: [name for name in c if summary(c, name, "rhat")[0] > APART] for g, c in groups.items()}
    said = "; ".join(f"{g} at {', '.join(names)}" for g, names in found.items() if names)
    if not said:
        return []
    return [
        f"Chains have not mixed (99 of 100 predictions have R-hat within {APART} or more, on average) in {said}: there the figures are "
        "those of the chains as they were run, not of the density itself."
    ]


def _how(groups: Mapping[str, Cells], quick: bool) -> str:
    worst = ", ".join(f"{g} {max(max(row['rhat']) for row in c.values()):.2f}" for g, c in groups.items())
    size = (
        "2 chains of 8 draws"
        if quick
        else "6 chains on tables, 4 on images, 25 iterations of warm-up and 25 draws each"
    )
    return (
        f"HMC: {size}, begun at fresh networks; 99 of 100 predictions have R-hat within (the worst setting): {worst}."
    )


# -- temperature ---------------------------------------------------------------------------------------------------------
def run_temperature(options: Options) -> Result:
    """Six temperatures on every task."""
    tasks, tally, done = _tasks(options, 3, 3), Tally(), 0
    with one_thread():
        for task in tasks:
            for t in TEMPERATURES:
                options.report(f"{task.group} {task.repeat}: T = {t:g}", done, len(tasks) * len(TEMPERATURES))
                tally.add(task.group, f"{t:g}", _fitted(task, options, task.scale, t))
                done += 1
    notes = (
        size_note(tasks),
        _how(tally.groups, options.quick),
        "The published figures are of a CNN-LSTM on IMDB, read off a figure. Test log densities alone do not choose T here: the "
        "question is whether T = 1, which was fixed, is beaten.",
    )
    return result_of_temperature(tally.groups, notes)


def judge_temperature(cells: Cells) -> bool | None:
    """Whether no cold posterior is clearly better on one data set; with one repeat nothing is clear."""
    colder = [difference(cells, t, "1", "log_density") for t in cells if float(t) < 1]
    if any(map(clear, colder)):
        return False
    return None if any(math.isnan(error) for _, error in colder) else True


def result_of_temperature(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """The result from the figures."""
    each = {g: judge_temperature(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    said = [verdict(reproduced, "without data augmentation tempering is hardly needed (T = 1 is best or tied)")]
    rows: list[tuple[Value, ...]] = []
    for g, cells in groups.items():
        best = max(cells, key=lambda t: summary(cells, t, "log_density")[0])
        against = "" if best == "1" else f", {signed(difference(cells, best, '1', 'log_density'), 4)} over T = 1"
        said.append(
            f"{g}: the highest log density is at T = {best} ({plus_minus(*summary(cells, best, 'log_density'))}{against}); less that of "
            "T = 1: " + ", ".join(f"{signed(difference(cells, t, '1', 'log_density'))} at {t}" for t in cells if t != "1") + "."
        )
        key, _, digits = score_of(g)
        for t in cells:
            published = "accuracy {:.3f}, LL {:.2f}".format(*PUBLISHED_TEMPERATURE[float(t)]) if g == "mnist" else ""
            rows.append(
                (
                    f"{g}, {t}",
                    plus_minus(*summary(cells, t, "log_density")),
                    plus_minus(*summary(cells, t, key), digits),
                    summary(cells, t, "acceptance")[0],
                    summary(cells, t, "rhat")[0],
                    published,
                )
            )
    said += unmixed(groups)
    said.append("Published (IMDB, read off a figure): T = 1 is best in accuracy and log likelihood.")
    columns = (
        Column("data, T"),
        Column("log density"),
        Column("RMSE or accuracy"),
        Column("acceptance", digits=2),
        Column("R-hat", digits=2, note="What 99 of 100 predictions stay within"),
        Column("published (IMDB)"),
    )
    lines = {g: [difference(c, f"{t:g}", "1", "log_density") for t in TEMPERATURES] for g, c in groups.items()}
    at_one = PUBLISHED_TEMPERATURE[1.0][1]
    lines["published, IMDB"] = [(PUBLISHED_TEMPERATURE[t][1] - at_one, math.nan) for t in TEMPERATURES]
    shown = curves(
        "temperature",
        TEMPERATURES,
        lines,
        xlabel="temperature T",
        ylabel="log density less that at T = 1",
        mark=1.0,
        alt="Log density against temperature, relative to T = 1",
        caption="Below zero is worse than the posterior itself (T = 1).",
    )
    numbers = {
        "groups": groups,
        "held_by_group": each,
        "published": {str(t): v for t, v in PUBLISHED_TEMPERATURE.items()},
    }
    return Result(tuple(said), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


# -- prior scale ---------------------------------------------------------------------------------------------------------
def run_scale(options: Options) -> Result:
    """Four scales of the prior on every task, with MAP beside."""
    tasks, tally, points, done = _tasks(options, 2, 3), Tally(), Tally(), 0
    steps = 60 if options.quick else 1500
    with one_thread():
        for task in tasks:
            for v in VARIANCES:
                options.report(f"{task.group} {task.repeat}: {v:g} times the variance", done, len(tasks) * len(VARIANCES))
                scale = task.scale * math.sqrt(v)
                tally.add(task.group, f"{v:g}", _fitted(task, options, scale))
                point = MAP(steps=steps, compile=False).fit(task.problem(scale), seed=task.seed, progress=False)
                points.add(task.group, f"{v:g}", task.judge(point.predict(task.x_test)))
                done += 1
    notes = (
        size_note(tasks),
        _how(tally.groups, options.quick),
        f"Variances are multiples of the fixed prior's (scale {TABLE_SCALE:g} on tables, {IMAGE_SCALE:g} on images); the article's range "
        "around its own prior. It trains on 40,960 images or 20,000 texts, here it is a few hundred rows, where a prior counts for more.",
    )
    return result_of_scale(tally.groups, points.groups, notes)


def spread(cells: Cells) -> Estimate:
    """The log density at the best scale less that at the worst, by their means, paired over repeats."""
    order = sorted(cells, key=lambda v: summary(cells, v, "log_density")[0])
    return difference(cells, order[-1], order[0], "log_density")


def judge_scale(cells: Cells) -> bool | None:
    """Whether the average is robust on one data set, by the rule above."""
    found = spread(cells)
    if clear((found[0] - ROBUST, found[1])):
        return False
    return True if found[0] <= ROBUST and not math.isnan(found[1]) else None


def result_of_scale(groups: Mapping[str, Cells], points: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """The result from the figures."""
    each = {g: judge_scale(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    said = [verdict(reproduced, f"the average is robust to the prior's scale (within {ROBUST} nats a row)")]
    rows: list[tuple[Value, ...]] = []
    lines: dict[str, list[Estimate]] = {}
    for g, cells in groups.items():
        key, name, digits = score_of(g)
        means = [summary(cells, v, key)[0] for v in cells]
        worst = min(cells, key=lambda v: summary(cells, v, "log_density")[0])
        said.append(
            f"{g}: from the worst ({worst} times the variance) to the best scale HMC gains {plus_minus(*spread(cells))} in log density, "
            f"MAP {plus_minus(*spread(points[g]))}; {name} of HMC from {min(means):.{digits}f} to {max(means):.{digits}f}."
        )
        for v in cells:
            rows.append(
                (
                    f"{g}, {v}",
                    plus_minus(*summary(cells, v, "log_density")),
                    plus_minus(*summary(cells, v, key), digits),
                    plus_minus(*summary(points[g], v, "log_density")),
                    plus_minus(*summary(points[g], v, key), digits),
                    summary(cells, v, "rhat")[0],
                )
            )
        for label, found in ((f"{g}, HMC", cells), (f"{g}, MAP", points[g])):
            lines[label] = [
                (m - summary(cells, "1", "log_density")[0], e)
                for m, e in (summary(found, v, "log_density") for v in found)
            ]
    said += unmixed(groups)
    said.append(f"Published (read off a figure): {PUBLISHED_SCALE}.")
    columns = (
        Column("data, times the variance"),
        Column("log density, HMC"),
        Column("RMSE or accuracy, HMC"),
        Column("log density, MAP"),
        Column("RMSE or accuracy, MAP"),
        Column("R-hat", digits=2, note="What 99 of 100 predictions stay within"),
    )
    shown = curves(
        "prior-scale",
        VARIANCES,
        lines,
        xlabel="prior variance / the fixed one",
        mark=1.0,
        ylabel="log density less HMC's\nat the fixed prior",
        alt="Log density of HMC and MAP against the prior's variance",
    )
    numbers = {
        "groups": groups,
        "map": points,
        "held_by_group": each,
        "spread": {g: spread(c) for g, c in groups.items()},
        "published": PUBLISHED_SCALE,
    }
    return Result(tuple(said), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


STUDIES = {
    "temperature": Study(
        "temperature",
        "Does a cold posterior predict better?",
        f"Finding 3: tempering is hardly needed without data augmentation ({SOURCE}).",
        run_temperature,
        FILES,
    ),
    "prior-scale": Study(
        "prior-scale",
        "Does the scale of the prior matter?",
        f"Finding 4: the Bayesian model average is robust to the prior's scale ({SOURCE}).",
        run_scale,
        FILES,
    ),
}
