"""Are several HMC chains better than one at equal cost?

`chains-at-equal-cost`. A budget of iterations is spent on one chain or divided among 2, 3 or 4, each of which discards
its own burn-in. Rule: on a data set the finding is reproduced if 2 or 3 chains have a significantly higher log density
than one, not reproduced if 2 and 3 chains are both significantly worse, and inconclusive otherwise, or if the chains
after burn-in have not mixed (`hmc_mixing`). Overall it must be reproduced on all data sets.

Chains have the same length whether they have mixed or not, because their cost is part of the question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from credibly.diagnostics.convergence import rhat
from credibly.posterior.draws import DrawsPosterior
from credibly.report.page import Column, Table, Value
from studies.hmc_chains import FILES, PUBLISHED_CHAINS, quick_settings
from studies.hmc_mixing import FIXED_FIRST, has_mixed, mixing_sentences, worst_rhat
from studies.hmc_parts import (
    SOURCE,
    Cells,
    Tally,
    Task,
    all_reproduced,
    boston_and_mnist,
    clear,
    clearly_below,
    curves,
    difference,
    hmc,
    one_thread,
    part_of,
    score_of,
    signed,
    size_note,
    summary,
    verdict,
)
from studies.study import Options, Result, Study, plus_minus

COUNTS = (1, 2, 3, 4)


def run_cost(options: Options) -> Result:
    """Run one set of long chains; every division of the budget is a part of them."""
    tasks, tally, checks = boston_and_mnist(options, 3, 3), Tally(), Tally()
    chains = 4 if options.quick else 12
    budget, burn = (40, 4) if options.quick else (600, 100)
    least = budget // COUNTS[-1] - burn
    with one_thread():
        for done, task in enumerate(tasks):
            options.report(f"{task.group} {task.repeat}", done, len(tasks))
            problem, small = task.problem(), quick_settings(options)
            pilot = hmc(problem, task.seed + 1, chains=4, warmup=30 if options.quick else 100, draws=1, **small)
            step = float(pilot.record.history["step_size"][0])
            length = {"trajectory_length": 8 * step, "compile": False} if options.quick else {}
            posterior = hmc(problem, task.seed, chains=chains, warmup=0, draws=budget, step_size=step, **length)
            for count in COUNTS:
                tally.add(task.group, str(count), shared(task, posterior, count, budget, burn))
            found = worst_rhat(task, part_of(posterior, posterior.draws[:, burn:]))
            after = posterior.statistics["log_likelihood"][:, burn : burn + least].double()
            checks.add(task.group, "all", found | {"burn_in": float(rhat(after.unsqueeze(-1)).max())})
    worst = ", ".join(f"{g} {max(c['all']['burn_in']):.3f}" for g, c in checks.groups.items())
    notes = (
        size_note(tasks),
        f"A budget of {budget} iterations, with {burn} burn-in iterations per chain: "
        + ", ".join(f"{k} x {budget // k - burn}" for k in COUNTS)
        + f" draws. All divisions come from {chains} chains of {budget} iterations, randomly initialised, with a step "
        "size from a separate run: k chains are the first iterations of k of them, averaged over all groups of k. "
        f"{FIXED_FIRST}",
        "At full size the burn-in is the shortest of 12, 25, 50 and 100 iterations after which R-hat of the training "
        "log likelihood over the next 50 iterations of 12 chains was at most 1.05, on that split and that subset. The "
        "chains have then reached the posterior before the first draw that is compared, and a further chain costs only "
        f"the iterations of its burn-in. In these runs this R-hat (next {least} iterations) is at most: {worst}.",
        "Published: 1, 2 and 3 chains on CIFAR-10 and IMDB, with the best strategy for a given cost.",
    )
    return result_of_cost(tally.groups, checks.groups, notes)


def shared(task: Task, posterior: DrawsPosterior, count: int, budget: int, burn: int) -> dict[str, float]:
    """Evaluate `count` chains that share the budget, averaged over groups of chains."""
    draws = posterior.draws
    found = []
    for first in range(0, len(draws) - count + 1, count):
        some = draws[first : first + count, burn : budget // count]
        found.append(task.judge(part_of(posterior, some).predict(task.x_test)))
    return {k: float(np.mean([f[k] for f in found])) for k in found[0]}


def judge_cost(cells: Cells, checks: Cells) -> bool | None:
    """Return whether the finding is reproduced on one data set, by the rule above."""
    if not has_mixed(checks, "all"):
        return None
    gains = [difference(cells, k, "1", "log_density") for k in ("2", "3")]
    if any(map(clear, gains)):
        return True
    return False if all(map(clearly_below, gains)) else None


def result_of_cost(groups: Mapping[str, Cells], checks: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    each = {g: judge_cost(cells, checks[g]) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    text = [verdict(reproduced, "at equal cost two or three chains beat one")]
    rows: list[tuple[Value, ...]] = []
    for g, cells in groups.items():
        gains = {k: difference(cells, k, "1", "log_density") for k in cells if k != "1"}
        text.append(
            f"{g}: log density relative to one chain: "
            + ", ".join(f"{signed(v, 4)} with {k} chains" for k, v in gains.items())
            + "."
        )
        key, _, digits = score_of(g)
        for k in cells:
            accuracy, ll = PUBLISHED_CHAINS.get(int(k), ("", "")) if g == "mnist" else ("", "")
            rows.append(
                (
                    f"{g}, {k}",
                    plus_minus(*summary(cells, k, "log_density"), 4),
                    signed(gains[k], 4) if k in gains else "",
                    plus_minus(*summary(cells, k, key), digits + 1),
                    str(accuracy),
                    str(ll),
                )
            )
    text += mixing_sentences(checks)
    text.append("Published (CIFAR-10, read off a figure): accuracy 0.896, 0.904, 0.907 for 1, 2, 3 chains.")
    columns = (
        Column("data, chains"),
        Column("log density"),
        Column("relative to one chain"),
        Column("RMSE or accuracy"),
        Column("published accuracy (CIFAR-10)"),
        Column("published LL (CIFAR-10)"),
    )
    zero = {
        g: [(0.0, math.nan), *(difference(c, str(k), "1", "log_density") for k in COUNTS[1:])]
        for g, c in groups.items()
    }
    zero["published, CIFAR-10"] = [(PUBLISHED_CHAINS[k][1] - PUBLISHED_CHAINS[1][1], math.nan) for k in (1, 2, 3)] + [
        (math.nan, math.nan)
    ]
    shown = curves(
        "chains-cost",
        [float(k) for k in COUNTS],
        zero,
        xlabel="chains that share the budget",
        ylabel="log density relative to one chain",
        log=False,
        alt="Gain in log density over a single chain, against the number of chains that share the budget",
    )
    numbers = {
        "groups": groups,
        "checks": checks,
        "held_by_group": each,
        "published": {str(k): v for k, v in PUBLISHED_CHAINS.items()},
    }
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


STUDIES = {
    "chains-at-equal-cost": Study(
        "chains-at-equal-cost",
        "Two or three chains for the price of one",
        f"Finding 9: at equal cost two or three chains beat one ({SOURCE}).",
        run_cost,
        FILES,
    ),
}
