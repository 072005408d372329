"""Two findings on running HMC: the best trajectory length, and how the step size affects acceptance.

`trajectory-length`. Trajectories of 0.25, 0.5, 1 and 1.5 times tau = pi sigma / 2 (in units of the prior scales), all
with the same step size, burn-in and number of draws. Rule, fixed before any run: on a data set the finding is
reproduced if length tau has a significantly higher effective sample size (median bulk ESS of the predictions) than 0.25
tau and 0.5 tau, no other length has a significantly higher log density, and its ESS per gradient is at least half of
the best length's. It is not reproduced if a shorter length has a significantly higher ESS, another length a
significantly higher log density, or if the ESS per gradient is significantly below half of the best. Otherwise it is
inconclusive. Overall it must be reproduced on all data sets.

`step-size-acceptance`. Step sizes of 1/4 to 3 times the one adapted for an acceptance of 0.7, each run from the draws
of one short chain. Rule: the finding is reproduced if on every data set no step size has a significantly higher
acceptance than the next smaller one, and the smallest a significantly higher one than the largest. It is not reproduced
if either is significantly reversed.
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
    boston_and_mnist,
    clear,
    clearly_below,
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
from studies.study import Options, Result, Study, mean_error, plus_minus

FILES = ("uci/boston.npz", MNIST)
FACTORS = (0.25, 0.5, 1.0, 1.5)
STEPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
LENGTH = math.pi / 2  # in units of the prior scales

PUBLISHED_LENGTH = {0.25: (0.83, -0.50), 0.5: (0.86, -0.42), 1.0: (0.889, -0.35), 1.5: (0.887, -0.35)}
PUBLISHED_ACCEPTANCE = {1e-5: 0.722, 5e-5: 0.463, 1e-4: 0.222, 5e-4: 0.125}


def _pilot(task: Task, options: Options) -> tuple[float, Tensor, int]:
    """Return the step size with an acceptance near 0.7, the last draw of each chain, and the number of chains."""
    chains = 2 if options.quick else 8 if not task.labels else 4
    settings = {"warmup": 20, "draws": 2, "max_steps": 20} if options.quick else {"warmup": 60, "draws": 10}
    posterior = hmc(task.problem(), task.seed, chains=chains, compile=_pays(task, options), **settings)
    return float(posterior.record.history["step_size"][0]), posterior.draws[:, -1], chains


def _pays(task: Task, options: Options) -> bool:
    """Return whether compiling pays: a table's small network is mostly overhead, which compilation removes."""
    return not options.quick and not task.labels


# -- trajectory length -------------------------------------------------------------------------------------------------
def run_length(options: Options) -> Result:
    """Run four trajectory lengths on every task."""
    tasks, tally = boston_and_mnist(options, 3, 3), Tally()
    burn, draws = (4, 8) if options.quick else (30, 60)
    total, done, sizes = len(tasks) * len(FACTORS), 0, {}
    with one_thread():
        for task in tasks:
            options.report(f"{task.group} {task.repeat}: step size", done, total)
            step, _, chains = _pilot(task, options)
            sizes[task.group], rule = step, 8 * step if options.quick else LENGTH
            for factor in FACTORS:
                options.report(f"{task.group} {task.repeat}: {factor:g} tau", done, total)
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
    return result_of_length(
        tally.groups, _notes(tasks, sizes, f"{burn} burn-in iterations and {draws} draws per chain")
    )


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
    """Return whether the finding is reproduced on one data set, by the rule above."""
    if against_length(cells):
        return False
    more = [difference(cells, "1", f, "ess_share") for f in ("0.25", "0.5")]
    per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
    return True if all(map(clear, more)) and per["1"] >= 0.5 * max(per.values()) else None


def against_length(cells: Cells) -> list[str]:
    """Return what argues against length tau on one data set, as phrases."""
    per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
    best = max(per, key=lambda f: per[f])
    costs = zip(cells[best]["per_1000_gradients"], cells["1"]["per_1000_gradients"], strict=True)
    found = [
        f"a higher ESS at {f} tau" for f in ("0.25", "0.5") if clearly_below(difference(cells, "1", f, "ess_share"))
    ]
    found += [
        f"a log density higher by {plus_minus(*difference(cells, f, '1', 'log_density'))} at {f} tau"
        for f in cells
        if f != "1" and clear(difference(cells, f, "1", "log_density"))
    ]
    if clear(mean_error([0.5 * b - one for b, one in costs])):
        found.append(f"an ESS per gradient below half of that at {best} tau")
    return found


def result_of_length(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    each = {g: judge_length(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    text = [verdict(reproduced, "tau = pi sigma / 2 is a good trajectory length")]
    rows: list[tuple[Value, ...]] = []
    for g, cells in groups.items():
        ratio = {f: summary(cells, f, "ess_share") for f in cells}
        per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
        best = max(per, key=lambda f: per[f])
        text.append(
            f"{g}: at equal numbers of draws, ESS / draws is {plus_minus(*ratio['1'], 2)} at tau, "
            f"{plus_minus(*ratio['0.5'], 2)} at 0.5 tau and {plus_minus(*ratio['0.25'], 2)} at 0.25 tau. An effective "
            f"draw is cheapest at {best} tau (ESS per 1,000 gradients {per[best]:.2f}; {per['1']:.2f} at tau). Log "
            "density at tau minus that at 0.25, 0.5 and 1.5 tau: "
            + ", ".join(signed(difference(cells, "1", f, "log_density")) for f in cells if f != "1")
            + "."
        )
        if each[g] is False:
            against = against_length(cells)
            text.append(f"{g}: {' and '.join(against)} {'argues' if len(against) == 1 else 'argue'} against tau.")
        key, _, digits = score_of(g)
        for f in cells:
            published = PUBLISHED_LENGTH[float(f)] if g == "mnist" else ("", "")
            rows.append(
                (
                    f"{g}, {f}",
                    plus_minus(*summary(cells, f, "log_density")),
                    plus_minus(*summary(cells, f, key), digits),
                    ratio[f][0],
                    summary(cells, f, "ess_weights")[0],
                    per[f],
                    summary(cells, f, "rhat")[0],
                    *map(str, published),
                )
            )
    text.append("Published (CIFAR-10, read off a figure): accuracy 0.83, 0.86, 0.889, 0.887 at 0.25, 0.5, 1, 1.5 tau.")
    columns = (
        Column("data, length / tau"),
        Column("log density"),
        Column("RMSE or accuracy"),
        Column("ESS / draws", digits=2, note="Median bulk ESS of the predictions"),
        Column("ESS / draws, weights", digits=2),
        Column("ESS per 1,000 gradients", digits=2),
        Column("R-hat", digits=2, note="99 % quantile over predictions"),
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
            ylabel="ESS / draws",
            mark=1.0,
            log=False,
            title="At equal draws",
            alt="ESS / draws against trajectory length",
        ),
        curves(
            "length-gradients",
            x,
            cost,
            xlabel=label,
            ylabel="ESS per 1,000 gradients",
            mark=1.0,
            log=False,
            title="At equal cost",
            alt="ESS per gradient against trajectory length",
        ),
    )
    numbers = {"groups": groups, "held_by_group": each, "published": {str(k): v for k, v in PUBLISHED_LENGTH.items()}}
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), pictures, numbers, notes)


# -- step size ---------------------------------------------------------------------------------------------------------
def run_steps(options: Options) -> Result:
    """Run six step sizes on every task."""
    tasks, tally, sizes = boston_and_mnist(options, 3, 3), Tally(), {}
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
    notes = _notes(tasks, sizes, f"{draws} trajectories of length pi/2 per chain and step size, from the same points")
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
    """Return whether the finding is reproduced on one data set, by the rule above."""
    names = sorted(cells, key=float)
    rises = [difference(cells, b, a, "acceptance") for a, b in itertools.pairwise(names)]
    whole = difference(cells, names[0], names[-1], "acceptance")
    if any(map(clear, rises)) or clearly_below(whole):
        return False
    return True if clear(whole) else None


def result_of_steps(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    each = {g: judge_steps(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    text = [verdict(reproduced, "smaller steps are accepted more often")]
    rows: list[tuple[Value, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for g, cells in groups.items():
        names = sorted(cells, key=float)
        found = ", ".join(f"{100 * summary(cells, f, 'acceptance')[0]:.0f} %" for f in names)
        whole = difference(cells, names[0], names[-1], "acceptance")
        text.append(
            f"{g}: acceptance {found} at {', '.join(names)} times the adapted step size; smallest minus largest "
            f"{signed(whole)}."
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
        lines[f"{g}, theory"] = _theory(names, lines[g])
    rows += [(f"published, step {s:g}", f"{s:g}", "", f"{a:.3f}", "") for s, a in PUBLISHED_ACCEPTANCE.items()]
    columns = (
        Column("data, step size / adapted"),
        Column("step size", note="In units of the prior scales"),
        Column("leapfrog steps"),
        Column("acceptance"),
        Column("fraction divergent"),
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
        caption="Theory: erfc(c step^2), the limit for many parameters, with c from the acceptance at the adapted "
        "step size.",
    )
    numbers = {
        "groups": groups,
        "held_by_group": each,
        "published": {str(k): v for k, v in PUBLISHED_ACCEPTANCE.items()},
    }
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


def _theory(names: list[str], found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the acceptance erfc(c f^2) at f times the adapted step size, with c from the acceptance at f = 1."""
    at = min(range(len(names)), key=lambda i: abs(float(names[i]) - 1))
    known = min(max(found[at][0], 1e-3), 1 - 1e-3)
    c = float(torch.special.ndtri(torch.tensor(1 - known / 2, dtype=torch.float64))) / math.sqrt(2)
    return [(math.erfc(c * (float(f) / float(names[at])) ** 2), math.nan) for f in names]


def _notes(tasks: list[Task], sizes: Mapping[str, float], runs: str) -> tuple[str, ...]:
    steps = ", ".join(f"{g} {s:.2g}" for g, s in sizes.items())
    return (
        size_note(tasks),
        f"{runs}; 8 chains on tables and 4 on images, randomly initialised; adapted step sizes (last repeat): {steps}.",
        "Published: ResNet-20-FRN on 40,960 CIFAR-10 images with 70,248 leapfrog steps per trajectory. Here networks "
        "have about a thousand weights and trajectories some hundred steps, so only the direction of the effects is "
        "comparable.",
    )


STUDIES = {
    "trajectory-length": Study(
        "trajectory-length",
        "How long should an HMC trajectory be?",
        "Finding 7: tau = pi sigma / 2, where sigma is the prior's standard deviation, is a good trajectory length "
        f"({SOURCE}).",
        run_length,
        FILES,
    ),
    "step-size-acceptance": Study(
        "step-size-acceptance",
        "Smaller steps, higher acceptance",
        "Finding 8: the smaller the leapfrog step size, the higher the acceptance: 72, 46, 22, 12 % at step sizes "
        f"1e-5, 5e-5, 1e-4, 5e-4 ({SOURCE}).",
        run_steps,
        FILES,
    ),
}
