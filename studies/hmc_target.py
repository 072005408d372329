"""Two findings on the target density of HMC: its temperature and its prior scale.

`temperature`. The full posterior, prior included, at T from 0.03 to 10, with trajectories of pi sigma sqrt(T) / 2 as in
the article. Rule, fixed before any run: on a data set the finding (without data augmentation tempering is hardly
needed) is reproduced if no T below 1 has a significantly higher log density than T = 1, and not reproduced otherwise.
Overall it must be reproduced on all data sets.

`prior-scale`. Prior variances over the range of the article, 1/8 to 5 times the one fixed in advance. Rule: on a data
set the finding (the model average is robust to the prior scale) is reproduced if the best scale gains at most 0.05 nats
per row over the worst, not reproduced if it gains significantly more, and inconclusive in between, or if chains of any
scale have not mixed (`hmc_mixing`). Overall it must be reproduced on all data sets. (The published range is about 0.03
nats on CIFAR-10.) MAP at the same scales is reported for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from credibly.methods import MAP
from credibly.report.page import Column, Table, Value
from studies.hmc_mixing import MIXED, has_mixed, mixing_sentences, worst_rhat
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
    boston_and_mnist,
    clear,
    curves,
    difference,
    hmc,
    one_thread,
    score_of,
    signed,
    size_note,
    summary,
    verdict,
)
from studies.study import Options, Result, Study, plus_minus

FILES = ("uci/boston.npz", MNIST)
TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
VARIANCES = (1 / 8, 1 / 2, 1.0, 5.0)  # relative to the fixed prior's
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


def _settings(task: Task, quick: bool) -> dict[str, Any]:
    if quick:
        return {"chains": 2, "warmup": 20, "draws": 8, "max_steps": 10, "compile": False}
    return {"chains": 4 if task.labels else 6, "warmup": 25, "draws": 25, "compile": not task.labels}


def _fitted(task: Task, options: Options, scale: float, temperature: float = 1.0) -> dict[str, float]:
    """Return the metrics of HMC at one prior scale and temperature."""
    length = math.pi / 2 * math.sqrt(temperature)
    problem = task.problem(scale, temperature)
    posterior = hmc(problem, task.seed, trajectory_length=length, **_settings(task, options.quick))
    found = posterior.diagnostics(task.x_test[:500]).functions
    return task.judge(posterior.predict(task.x_test)) | {
        "rhat": math.nan if found is None else found.rhat_most,
        "acceptance": acceptance_of(posterior),
    }


def unmixed(groups: Mapping[str, Cells]) -> list[str]:
    """Return a sentence that lists the settings whose chains have not mixed; no sentence if all have."""
    found = {g: [name for name in c if summary(c, name, "rhat")[0] > APART] for g, c in groups.items()}
    text = "; ".join(f"{g} at {', '.join(names)}" for g, names in found.items() if names)
    if not text:
        return []
    return [
        f"Chains have not mixed (mean 99 % quantile of R-hat over predictions above {APART}) in {text}: there the "
        "metrics describe the chains as run, not the target density."
    ]


def _how(groups: Mapping[str, Cells], quick: bool) -> str:
    worst = ", ".join(f"{g} {max(max(row['rhat']) for row in c.values()):.2f}" for g, c in groups.items())
    size = (
        "2 chains of 8 draws" if quick else "6 chains on tables, 4 on images, 25 warm-up iterations and 25 draws each"
    )
    return f"HMC: {size}, randomly initialised. 99 % quantile of R-hat over predictions in the worst setting: {worst}."


# -- temperature -------------------------------------------------------------------------------------------------------
def run_temperature(options: Options) -> Result:
    """Run six temperatures on every task."""
    tasks, tally, done = boston_and_mnist(options, 3, 3), Tally(), 0
    with one_thread():
        for task in tasks:
            for t in TEMPERATURES:
                options.report(f"{task.group} {task.repeat}: T = {t:g}", done, len(tasks) * len(TEMPERATURES))
                tally.add(task.group, f"{t:g}", _fitted(task, options, task.scale, t))
                done += 1
    notes = (
        size_note(tasks),
        _how(tally.groups, options.quick),
        "The published values are for a CNN-LSTM on IMDB, read off a figure. Test log densities are not used to "
        "choose T: the question is whether any T beats T = 1, which was fixed in advance.",
    )
    return result_of_temperature(tally.groups, notes)


def judge_temperature(cells: Cells) -> bool | None:
    """Return whether no cold posterior is significantly better on one data set; None with a single repeat."""
    colder = [difference(cells, t, "1", "log_density") for t in cells if float(t) < 1]
    if any(map(clear, colder)):
        return False
    return None if any(math.isnan(error) for _, error in colder) else True


def result_of_temperature(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    each = {g: judge_temperature(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    text = [verdict(reproduced, "without data augmentation tempering is hardly needed (T = 1 is best or tied)")]
    rows: list[tuple[Value, ...]] = []
    for g, cells in groups.items():
        best = max(cells, key=lambda t: summary(cells, t, "log_density")[0])
        against = "" if best == "1" else f", {signed(difference(cells, best, '1', 'log_density'), 4)} over T = 1"
        text.append(
            f"{g}: the highest log density is at T = {best} "
            f"({plus_minus(*summary(cells, best, 'log_density'))}{against}); relative to T = 1: "
            + ", ".join(f"{signed(difference(cells, t, '1', 'log_density'))} at {t}" for t in cells if t != "1")
            + "."
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
    text += unmixed(groups)
    text.append("Published (IMDB, read off a figure): T = 1 is best in accuracy and log likelihood.")
    columns = (
        Column("data, T"),
        Column("log density"),
        Column("RMSE or accuracy"),
        Column("acceptance", digits=2),
        Column("R-hat", digits=2, note="99 % quantile over predictions"),
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
        ylabel="log density relative to T = 1",
        mark=1.0,
        alt="Log density against temperature, relative to T = 1",
        caption="Below zero is worse than the posterior itself (T = 1).",
    )
    numbers = {
        "groups": groups,
        "held_by_group": each,
        "published": {str(t): v for t, v in PUBLISHED_TEMPERATURE.items()},
    }
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


# -- prior scale -------------------------------------------------------------------------------------------------------
def _scale_settings(task: Task, quick: bool) -> dict[str, Any]:
    """Return the settings of HMC: a fixed warm-up, then draws until chains agree on predictions at training rows."""
    if quick:
        return {"chains": 2, "warmup": 20, "draws": 8, "max_steps": 10, "compile": False}
    # The mass that suits a network without its output layer is adapted, which takes a longer warm-up.
    return {"chains": 4, "warmup": 100 if task.labels else 200, "draws": 300, "until": "mixed", "collapse": "auto"}


def _at_scale(task: Task, options: Options, scale: float) -> dict[str, float]:
    """Return the metrics of HMC at one prior scale, its worst R-hat, and how the chains were run."""
    posterior = hmc(task.problem(scale), task.seed, **_scale_settings(task, options.quick))
    return (
        task.judge(posterior.predict(task.x_test))
        | worst_rhat(task, posterior)
        | {
            "acceptance": acceptance_of(posterior),
            "draws": posterior.draws.shape[1],
            "shortened": float(posterior.record.history["trajectory_shortened"]),
        }
    )


def _how_scale(groups: Mapping[str, Cells], quick: bool) -> str:
    most = ", ".join(f"{g} {max(max(row['draws']) for row in c.values()):,.0f}" for g, c in groups.items())
    short = any(any(row["shortened"]) for c in groups.values() for row in c.values())
    size = (
        "2 chains of 8 draws"
        if quick
        else "4 chains, randomly initialised; warm-up of 200 iterations on tables, whose output layer is integrated "
        "out, and 100 on images; 300 draws per chain, and more until R-hat is at most 1.03 and the effective sample "
        f'size at least 400 for predictions at 64 training rows (until="mixed"; at most, draws per chain: {most})'
    )
    return (
        f"HMC: {size}. {'Some trajectories were' if short else 'No trajectory was'} truncated. Chains count as mixed "
        f"if R-hat of the worst test row is at most {MIXED}, mean over repeats. These settings were fixed by R-hat on "
        "a split and a subset that no study uses, before any metric was computed."
    )


def run_scale(options: Options) -> Result:
    """Run four prior scales on every task, with HMC and MAP."""
    tasks, tally, points, done = boston_and_mnist(options, 3, 3), Tally(), Tally(), 0
    steps = 60 if options.quick else 1500
    with one_thread():
        for task in tasks:
            for v in VARIANCES:
                options.report(
                    f"{task.group} {task.repeat}: {v:g} times the variance", done, len(tasks) * len(VARIANCES)
                )
                scale = task.scale * math.sqrt(v)
                tally.add(task.group, f"{v:g}", _at_scale(task, options, scale))
                point = MAP(steps=steps, compile=False if options.quick else "auto").fit(
                    task.problem(scale), seed=task.seed, progress=False
                )
                points.add(task.group, f"{v:g}", task.judge(point.predict(task.x_test)))
                done += 1
    notes = (
        size_note(tasks),
        _how_scale(tally.groups, options.quick),
        f"Variances are multiples of the fixed prior's (scale {TABLE_SCALE:g} on tables, {IMAGE_SCALE:g} on images), "
        "over the article's range around its own prior. The article trains on 40,960 images or 20,000 texts; with a "
        "few hundred rows, as here, the prior matters more.",
    )
    return result_of_scale(tally.groups, points.groups, notes)


def best_minus_worst(cells: Cells) -> Estimate:
    """Return the log density at the best scale minus that at the worst, paired over repeats."""
    order = sorted(cells, key=lambda v: summary(cells, v, "log_density")[0])
    return difference(cells, order[-1], order[0], "log_density")


def judge_scale(cells: Cells) -> bool | None:
    """Return whether the finding is reproduced on one data set, by the rule above."""
    found = best_minus_worst(cells)
    if not all(has_mixed(cells, v) for v in cells):
        return None
    if clear((found[0] - ROBUST, found[1])):
        return False
    return True if found[0] <= ROBUST and not math.isnan(found[1]) else None


def result_of_scale(groups: Mapping[str, Cells], points: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    each = {g: judge_scale(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    text = [verdict(reproduced, f"the model average is robust to the prior scale (within {ROBUST} nats per row)")]
    rows: list[tuple[Value, ...]] = []
    lines: dict[str, list[Estimate]] = {}
    for g, cells in groups.items():
        key, name, digits = score_of(g)
        means = [summary(cells, v, key)[0] for v in cells]
        worst = min(cells, key=lambda v: summary(cells, v, "log_density")[0])
        text.append(
            f"{g}: from the worst ({worst} times the variance) to the best scale HMC gains "
            f"{plus_minus(*best_minus_worst(cells))} in log density, MAP {plus_minus(*best_minus_worst(points[g]))}; "
            f"the {name} of HMC ranges from {min(means):.{digits}f} to {max(means):.{digits}f}."
        )
        for v in cells:
            rows.append(
                (
                    f"{g}, {v}",
                    plus_minus(*summary(cells, v, "log_density")),
                    plus_minus(*summary(cells, v, key), digits),
                    plus_minus(*summary(points[g], v, "log_density")),
                    plus_minus(*summary(points[g], v, key), digits),
                    summary(cells, v, "worst_rhat")[0],
                )
            )
        for label, found in ((f"{g}, HMC", cells), (f"{g}, MAP", points[g])):
            lines[label] = [
                (m - summary(cells, "1", "log_density")[0], e)
                for m, e in (summary(found, v, "log_density") for v in found)
            ]
    text += mixing_sentences(groups)
    text.append(f"Published (read off a figure): {PUBLISHED_SCALE}.")
    columns = (
        Column("data, variance / fixed"),
        Column("log density, HMC"),
        Column("RMSE or accuracy, HMC"),
        Column("log density, MAP"),
        Column("RMSE or accuracy, MAP"),
        Column("R-hat", digits=3, note="Worst test row, mean over repeats"),
    )
    shown = curves(
        "prior-scale",
        VARIANCES,
        lines,
        xlabel="prior variance / fixed prior variance",
        mark=1.0,
        ylabel="log density relative to HMC\nat the fixed prior",
        alt="Log density of HMC and MAP against the prior's variance",
    )
    numbers = {
        "groups": groups,
        "map": points,
        "held_by_group": each,
        "spread": {g: best_minus_worst(c) for g, c in groups.items()},
        "published": PUBLISHED_SCALE,
    }
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


STUDIES = {
    "temperature": Study(
        "temperature",
        "Does a cold posterior predict better?",
        f"Finding 3: without data augmentation tempering is hardly needed ({SOURCE}).",
        run_temperature,
        FILES,
    ),
    "prior-scale": Study(
        "prior-scale",
        "Does the prior scale matter?",
        f"Finding 4: the Bayesian model average is robust to the prior scale ({SOURCE}).",
        run_scale,
        FILES,
    ),
}
