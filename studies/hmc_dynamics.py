"""Two findings on how HMC is run: how long a trajectory should be, and what the step size does to acceptance.

`trajectory-length`. Trajectories of 0.25, 0.5, 1 and 1.5 times tau = pi sigma / 2 (in units of the prior's scales), all with
one step size, with equal numbers of burn-in iterations and of draws. Rule, set before any run, for each data set: the finding
holds where the rule's length gives clearly more effective draws (median bulk ESS of the predictions) than 0.25 and 0.5 times
it, no other length has a clearly higher log density, and its effective draws a gradient are at least half of the best
length's. It fails where a shorter length gives clearly more effective draws, another one a clearly higher log density, or the
effective draws a gradient are clearly under half of the best. Otherwise the numbers cannot tell. It holds if it does on all data sets.

`step-size-acceptance`. Steps of 1/4 to 3 times the size that warm-up finds for an acceptance of 0.7, each run from the draws
of one short chain. Rule: the finding holds where on every data set no larger step has a clearly higher acceptance than the
next smaller one, and the smallest step a clearly higher one than the largest. It fails where either is clearly the other way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credibly.errors import SamplingError
from credibly.report.page import Column, Table, Value
from studies.hmc_parts import (
    MNIST,
    SOURCE,
    Cells,
    Tally,
    Task,
    acceptance_of,
    all_reproduced,
    clear,
    clearly_below,
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
from studies.study import Options, Result, Study, mean_error, plus_minus

FILES = ("uci/boston.npz", MNIST)
FACTORS = (0.25, 0.5, 1.0, 1.5)
STEPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
LENGTH = math.pi / 2  # in units of the prior's scales

PUBLISHED_LENGTH = {0.25: (0.83, -0.50), 0.5: (0.86, -0.42), 1.0: (0.889, -0.35), 1.5: (0.887, -0.35)}
PUBLISHED_ACCEPTANCE = {1e-5: 0.722, 5e-5: 0.463, 1e-4: 0.222, 5e-4: 0.125}


def _tasks(options: Options, splits: int, parts: int) -> list[Task]:
    if options.quick:
        return [table_task(options, "boston", 0), image_task(options, 0, 100, side=4, hidden=8, test=100)]
    tables = [table_task(options, "boston", i) for i in range(splits)]
    return [*tables, *(image_task(options, i) for i in range(parts))]


def _pilot(task: Task, options: Options) -> tuple[float, Tensor, int]:
    """The step size of an acceptance near 0.7, the chains' last draws and their number."""
    chains = 2 if options.quick else 8 if not task.labels else 4
    settings = {"warmup": 20, "draws": 2, "max_steps": 20} if options.quick else {"warmup": 60, "draws": 10}
    posterior = hmc(task.problem(), task.seed, chains=chains, compile=_pays(task, options), **settings)
    return float(posterior.record.history["step_size"][0]), posterior.draws[:, -1], chains


def _pays(task: Task, options: Options) -> bool:
    """The small steps of a table's network are mostly overhead, which a compiler takes away."""
    return not options.quick and not task.labels


# -- trajectory length ---------------------------------------------------------------------------------------------------
def run_length(options: Options) -> Result:
    """Four lengths on every task."""
    tasks, tally = _tasks(options, 3, 3), Tally()
    burn, draws = (4, 8) if options.quick else (30, 60)
    total, done, sizes = len(tasks) * len(FACTORS), 0, {}
    with one_thread():
        for task in tasks:
            options.report(f"{task.group} {task.repeat}: step size", done, total)
            step, _, chains = _pilot(task, options)
            sizes[task.group], rule = step, 8 * step if options.quick else LENGTH
            for factor in FACTORS:
                options.report(f"{task.group} {task.repeat}: {factor:g} times the rule", done, total)
                posterior = hmc(
                    task.problem(),
                    task.seed + 1,
                    chains=chains,
                    warmup=burn,
                    draws=draws,
                    step_size=step,
                    trajectory_length=factor * rule,
                    compile=_pays(task, options),
                )
                tally.add(task.group, f"{factor:g}", _efficiency(task, posterior, factor * rule / step * draws))
                done += 1
    return result_of_length(tally.groups, _notes(tasks, sizes, f"{burn} burn-in iterations and {draws} draws a chain"))


def _efficiency(task: Task, posterior: Any, gradients: float) -> dict[str, float]:
    found = posterior.diagnostics(task.x_test)
    chains, draws = found.chains, found.draws
    ess = found.functions.ess_bulk_median
    return task.judge(posterior.predict(task.x_test)) | {
        "ess_share": ess / (chains * draws),
        "ess_weights": found.weights.ess_bulk_median / (chains * draws),
        "per_1000_gradients": 1000 * ess / (chains * gradients),
        "rhat": found.functions.rhat_most,
        "acceptance": acceptance_of(posterior),
    }


def judge_length(cells: Cells) -> bool | None:
    """Whether the finding reproduced on one data set, by the rule above."""
    if against_length(cells):
        return False
    more = [difference(cells, "1", f, "ess_share") for f in ("0.25", "0.5")]
    per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
    return True if all(map(clear, more)) and per["1"] >= 0.5 * max(per.values()) else None


def against_length(cells: Cells) -> list[str]:
    """What speaks clearly against the rule's length on one data set, in words."""
    per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
    best = max(per, key=lambda f: per[f])
    costs = zip(cells[best]["per_1000_gradients"], cells["1"]["per_1000_gradients"], strict=True)
    found = [
        f"more effective draws at {f} times it"
        for f in ("0.25", "0.5")
        if clearly_below(difference(cells, "1", f, "ess_share"))
    ]
    found += [
        f"a log density higher by {plus_minus(*difference(cells, f, '1', 'log_density'))} at {f} times it"
        for f in cells
        if f != "1" and clear(difference(cells, f, "1", "log_density"))
    ]
    if clear(mean_error([0.5 * b - one for b, one in costs])):
        found.append(f"less than half of the effective draws a gradient of {best} times it")
    return found


def result_of_length(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """The result from the figures."""
    each = {g: judge_length(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    said = [verdict(reproduced, "pi sigma / 2 is a good trajectory length")]
    rows: list[tuple[Value, ...]] = []
    for g, cells in groups.items():
        share = {f: summary(cells, f, "ess_share") for f in cells}
        per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
        best = max(per, key=lambda f: per[f])
        said.append(
            f"{g}: at equal numbers of draws, {plus_minus(*share['1'], 2)} of the draws are effective at the rule's length, "
            f"{plus_minus(*share['0.5'], 2)} at half and {plus_minus(*share['0.25'], 2)} at a quarter of it. An effective draw "
            f"costs least at {best} times the rule ({per[best]:.2f} for 1,000 gradients; {per['1']:.2f} at the rule). Log density "
            f"at the rule less that at 0.25, 0.5 and 1.5: "
            + ", ".join(signed(difference(cells, "1", f, "log_density")) for f in cells if f != "1")
            + "."
        )
        if each[g] is False:
            said.append(f"{g}: what speaks against the rule's length is {' and '.join(against_length(cells))}.")
        key, _, digits = score_of(g)
        for f in cells:
            published = PUBLISHED_LENGTH[float(f)] if g == "mnist" else ("", "")
            rows.append(
                (
                    f"{g}, {f}",
                    plus_minus(*summary(cells, f, "log_density")),
                    plus_minus(*summary(cells, f, key), digits),
                    share[f][0],
                    summary(cells, f, "ess_weights")[0],
                    per[f],
                    summary(cells, f, "rhat")[0],
                    *map(str, published),
                )
            )
    said.append(
        "Published (CIFAR-10, read off a figure): accuracy 0.83, 0.86, 0.889, 0.887 at 0.25, 0.5, 1, 1.5 times the rule."
    )
    columns = (
        Column("data, times pi sigma/2"),
        Column("log density"),
        Column("RMSE or accuracy"),
        Column("effective share of draws", digits=2, note="Median bulk ESS of the predictions over the draws"),
        Column("the same, weights", digits=2),
        Column("effective draws in 1,000 gradients", digits=2),
        Column("R-hat", digits=2, note="What 99 of 100 predictions stay within"),
        Column("published accuracy (CIFAR-10)"),
        Column("published LL (CIFAR-10)"),
    )
    x = list(FACTORS)
    names = [f"{f:g}" for f in x]
    lines = {g: [summary(c, f, "ess_share") for f in names] for g, c in groups.items()}
    cost = {g: [summary(c, f, "per_1000_gradients") for f in names] for g, c in groups.items()}
    label = "trajectory length / (pi sigma / 2)"
    pictures = (
        curves(
            "length-draws",
            x,
            lines,
            xlabel=label,
            ylabel="effective share of draws",
            mark=1.0,
            log=False,
            title="At equal draws",
            alt="Effective share of the draws against trajectory length",
        ),
        curves(
            "length-gradients",
            x,
            cost,
            xlabel=label,
            ylabel="effective draws in 1,000 gradients",
            mark=1.0,
            log=False,
            title="At equal cost",
            alt="Effective draws a gradient against trajectory length",
        ),
    )
    numbers = {"groups": groups, "held_by_group": each, "published": {str(k): v for k, v in PUBLISHED_LENGTH.items()}}
    return Result(tuple(said), reproduced, Table(columns, tuple(rows)), pictures, numbers, notes)


# -- step size -----------------------------------------------------------------------------------------------------------
def run_steps(options: Options) -> Result:
    """Six step sizes on every task."""
    tasks, tally, sizes = _tasks(options, 3, 3), Tally(), {}
    draws = 8 if options.quick else 20
    total, done = len(tasks) * len(STEPS), 0
    with one_thread():
        for task in tasks:
            options.report(f"{task.group} {task.repeat}: step size", done, total)
            step, at, chains = _pilot(task, options)
            sizes[task.group] = step
            for factor in STEPS:
                options.report(f"{task.group} {task.repeat}: {factor:g} times the step", done, total)
                tally.add(task.group, f"{factor:g}", _acceptance(task, step * factor, at, chains, draws, options))
                done += 1
    notes = _notes(
        tasks, sizes, f"{draws} trajectories a chain for each step size, of length pi/2, from the same points"
    )
    return result_of_steps(tally.groups, notes)


def _acceptance(task: Task, step: float, at: Tensor, chains: int, draws: int, options: Options) -> dict[str, float]:
    length = 5 * step if options.quick else LENGTH
    try:
        posterior = hmc(
            task.problem(),
            task.seed + 1,
            chains=chains,
            warmup=0,
            draws=draws,
            step_size=step,
            init=at,
            trajectory_length=length,
            jitter=0.0,
            compile=_pays(task, options),
        )
    except SamplingError:  # every trajectory of every chain diverged
        return {"acceptance": 0.0, "divergent": 1.0, "steps": length / step, "step_size": step}
    divergent = float(posterior.statistics["divergent"].double().mean())
    found = {"acceptance": acceptance_of(posterior), "divergent": divergent}
    return found | {"steps": float(math.ceil(length / step - 1e-9)), "step_size": step}


def judge_steps(cells: Cells) -> bool | None:
    """Whether the finding reproduced on one data set: settings are in the order of their steps."""
    names = sorted(cells, key=float)
    rises = [difference(cells, b, a, "acceptance") for a, b in itertools.pairwise(names)]
    whole = difference(cells, names[0], names[-1], "acceptance")
    if any(map(clear, rises)) or clearly_below(whole):
        return False
    return True if clear(whole) else None


def result_of_steps(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """The result from the figures."""
    each = {g: judge_steps(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    said = [verdict(reproduced, "smaller steps are accepted more often")]
    rows: list[tuple[Value, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for g, cells in groups.items():
        names = sorted(cells, key=float)
        found = ", ".join(f"{100 * summary(cells, f, 'acceptance')[0]:.0f} %" for f in names)
        whole = difference(cells, names[0], names[-1], "acceptance")
        said.append(
            f"{g}: acceptance {found} for {', '.join(names)} times the adapted step; smallest less largest {signed(whole)}."
        )
        lines[g] = [summary(cells, f, "acceptance") for f in names]
        for f in names:
            size = summary(cells, f, "step_size")[0]
            rows.append(
                (
                    f"{g}, {f}",
                    f"{size:.2g}",
                    f"{summary(cells, f, 'steps')[0]:,.0f}",
                    plus_minus(*summary(cells, f, "acceptance")),
                    summary(cells, f, "divergent")[0],
                )
            )
        lines[f"{g}, by theory"] = _theory(names, lines[g])
    rows += [(f"published, step {s:g}", f"{s:g}", "", f"{a:.3f}", "") for s, a in PUBLISHED_ACCEPTANCE.items()]
    columns = (
        Column("data, times the adapted step"),
        Column("step size", note="In units of the prior's scales"),
        Column("leapfrog steps"),
        Column("acceptance"),
        Column("share divergent"),
    )
    x = sorted(float(f) for f in next(iter(groups.values())))
    shown = curves(
        "step-acceptance",
        x,
        lines,
        xlabel="step size / adapted step size",
        ylabel="acceptance",
        mark=1.0,
        alt="Acceptance against step size: it falls as the step grows",
        caption="By theory: erfc(c step^2), the limit for many parameters, with c from the acceptance at the adapted step.",
    )
    numbers = {
        "groups": groups,
        "held_by_group": each,
        "published": {str(k): v for k, v in PUBLISHED_ACCEPTANCE.items()},
    }
    return Result(tuple(said), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


def _theory(names: list[str], found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Acceptance erfc(c f^2) for steps of f times the adapted one, c from that one."""
    at = min(range(len(names)), key=lambda i: abs(float(names[i]) - 1))
    known = min(max(found[at][0], 1e-3), 1 - 1e-3)
    c = float(torch.special.ndtri(torch.tensor(1 - known / 2, dtype=torch.float64))) / math.sqrt(2)
    return [(math.erfc(c * (float(f) / float(names[at])) ** 2), math.nan) for f in names]


def _notes(tasks: list[Task], sizes: Mapping[str, float], said: str) -> tuple[str, ...]:
    steps = ", ".join(f"{g} {s:.2g}" for g, s in sizes.items())
    return (
        size_note(tasks),
        f"{said}; 8 chains on tables and 4 on images, begun at fresh networks; adapted steps (last repeat): {steps}.",
        "Published: ResNet-20-FRN on 40,960 CIFAR-10 images with 70,248 leapfrog steps a trajectory. Here networks have about "
        "a thousand weights and trajectories some hundred steps, so only the direction of the effects can be compared.",
    )


STUDIES = {
    "trajectory-length": Study(
        "trajectory-length",
        "How long should an HMC trajectory be?",
        f"Finding 7: pi sigma / 2, sigma the prior's deviation, is a good trajectory length ({SOURCE}).",
        run_length,
        FILES,
    ),
    "step-size-acceptance": Study(
        "step-size-acceptance",
        "Smaller steps, higher acceptance",
        f"Finding 8: the smaller the leapfrog step, the higher the acceptance: 72, 46, 22, 12 % for steps of 1e-5, 5e-5, "
        f"1e-4, 5e-4 ({SOURCE}).",
        run_steps,
        FILES,
    ),
}
