"""How the step size of HMC affects acceptance.

`step-size-acceptance`. Step sizes of 1/4 to 3 times the one adapted for an acceptance of 0.7, each run from the draws
of one short chain. Rule: the finding is reproduced if on every data set no step size has a significantly higher
acceptance than the next smaller one, and the smallest a significantly higher one than the largest. It is not reproduced
if either is significantly reversed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from credibly.errors import SamplingError
from credibly.report.page import Column, Table, Value
from studies.hmc_parts import (
    MNIST,
    SMALLER,
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
    signed,
    size_note,
    summary,
    verdict,
)
from studies.study import Options, Result, Study, plus_minus

FILES = ("uci/boston.npz", MNIST)
STEPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
LENGTH = math.pi / 2  # in units of the prior scales

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
        SMALLER,
    )


STUDIES = {
    "step-size-acceptance": Study(
        "step-size-acceptance",
        "Smaller steps, higher acceptance",
        "Finding 8: the smaller the leapfrog step size, the higher the acceptance: 72, 46, 22, 12 % at step sizes "
        f"1e-5, 5e-5, 1e-4, 5e-4 ({SOURCE}).",
        run_steps,
        FILES,
    ),
}
