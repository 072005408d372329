"""How long should an HMC trajectory be?

`trajectory-length`. Trajectories of 0.25, 0.5, 1 and 1.5 times tau = pi sigma / 2 (in units of the prior scales), all
with the same step size and a warm-up of as many gradients as a fixed number of iterations at tau takes. Rule, fixed
before any run: on a data set the finding is reproduced

    at equal draws        if length tau has a significantly higher effective sample size (median bulk ESS of the
                          predictions) than 0.25 tau and 0.5 tau, and no other length a significantly higher log
                          density;
    at equal gradients    if no other length has a significantly higher log density, and the ESS per gradient at tau is
                          at least half of the best length's.

At equal draws it is not reproduced if a shorter length has a significantly higher ESS, or another length a
significantly higher log density; at equal gradients if another length has a significantly higher log density, or if the
ESS per gradient is significantly below half of the best. Otherwise, or if the chains at tau have not mixed
(`hmc_mixing`), it is inconclusive. It must be reproduced in both comparisons and on all data sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from credibly.posterior.draws import DrawsPosterior
from credibly.report.page import Column, Table, Value
from credibly.report.pictures import Picture
from studies.hmc_mixing import FIXED_FIRST, ROWS, has_mixed, mixing_sentences
from studies.hmc_parts import (
    MNIST,
    OUTCOMES,
    SMALLER,
    SOURCE,
    Cells,
    Estimate,
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
    part_of,
    score_of,
    signed,
    size_note,
    summary,
    verdict,
)
from studies.study import Options, Result, Study, mean_error, plus_minus

FACTORS = (0.25, 0.5, 1.0, 1.5)
LENGTH = math.pi / 2  # in units of the prior scales
DRAWS, GRADIENTS = "draws", "gradients"
DENSITIES = {DRAWS: "log_density", GRADIENTS: "log_density_paid"}  # the measure of either comparison

PUBLISHED = {0.25: (0.83, -0.50), 0.5: (0.86, -0.42), 1.0: (0.889, -0.35), 1.5: (0.887, -0.35)}


def run_length(options: Options) -> Result:
    """Run four trajectory lengths on every task, each with equal draws and with equal gradients."""
    tasks, tally = boston_and_mnist(options, 3, 3), Tally()
    chains, burn, draws = (2, 4, 12) if options.quick else (4, 100, 200)
    small = {"max_steps": 20, "compile": False} if options.quick else {}
    total, done, sizes = len(tasks) * len(FACTORS), 0, {}
    with one_thread():
        for task in tasks:
            options.report(f"{task.group} {task.repeat}: step size", done, total)
            pilot = hmc(task.problem(), task.seed, chains=chains, warmup=max(20, burn), draws=1, **small)
            step = float(pilot.record.history["step_size"][0])
            sizes[task.group], rule = step, 8 * step if options.quick else LENGTH
            for factor in FACTORS:
                options.report(f"{task.group} {task.repeat}: {factor:g} tau", done, total)
                posterior = hmc(
                    task.problem(),
                    task.seed + 1,
                    chains=chains,
                    warmup=round(burn / factor),
                    draws=max(draws, round(draws / factor)),
                    step_size=step,
                    trajectory_length=factor * rule,
                    compile=False if options.quick else "auto",
                )
                found = _efficiency(task, posterior, draws, round(draws / factor), factor * rule / step)
                tally.add(task.group, f"{factor:g}", found)
                done += 1
    equal = ", ".join(f"{round(draws / f)} at {f:g} tau" for f in FACTORS)
    notes = (
        size_note(tasks),
        f"{chains} chains, randomly initialised. Equal draws: {draws} per chain at every length. Equal gradients: as "
        f"many as {draws} trajectories of length tau take, that is draws per chain: {equal}. The burn-in of every "
        f"length takes the gradients of {burn} trajectories of length tau ({round(burn / FACTORS[0])} iterations at "
        f"{FACTORS[0]:g} tau). One step size per task, adapted at tau in a separate run (last repeat): "
        + ", ".join(f"{g} {s:.2g}" for g, s in sizes.items())
        + f". {FIXED_FIRST} Here R-hat is that of the chains with equal gradients.",
        SMALLER,
    )
    return result_of_length(tally.groups, notes)


def _efficiency(task: Task, posterior: DrawsPosterior, draws: int, paid: int, steps: float) -> dict[str, float]:
    """Return metrics and effective sample sizes of the first `draws` draws, and of the first `paid` ones.

    Args:
        steps: leapfrog steps per trajectory.
    """
    first, equal = (part_of(posterior, posterior.draws[:, :count]) for count in (draws, paid))
    one, other = (part.diagnostics(task.x_test[:ROWS]) for part in (first, equal))
    assert one.functions is not None
    assert other.functions is not None
    chains = posterior.draws.shape[0]
    return (
        task.judge(first.predict(task.x_test))
        | {f"{k}_paid": v for k, v in task.judge(equal.predict(task.x_test)).items()}
        | {
            "ess_share": one.functions.ess_bulk_median / (chains * draws),
            "ess_weights": one.weights.ess_bulk_median / (chains * draws),
            "per_1000_gradients": 1000 * other.functions.ess_bulk_median / (chains * paid * steps),
            "worst_rhat": other.functions.rhat_worst,
            "acceptance": acceptance_of(posterior),
        }
    )


def judge_length(cells: Cells) -> dict[str, bool | None]:
    """Return whether the finding is reproduced on one data set by the rule above, in either comparison."""
    against = against_length(cells)
    more = [difference(cells, "1", f, "ess_share") for f in ("0.25", "0.5")]
    per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
    for_it = {DRAWS: all(map(clear, more)), GRADIENTS: per["1"] >= 0.5 * max(per.values())}
    if not has_mixed(cells, "1"):
        return dict.fromkeys(for_it)
    return {how: False if against[how] else True if for_it[how] else None for how in for_it}


def against_length(cells: Cells) -> dict[str, list[str]]:
    """Return what argues against length tau on one data set in either comparison, as phrases."""
    per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
    best = max(per, key=lambda f: per[f])
    costs = zip(cells[best]["per_1000_gradients"], cells["1"]["per_1000_gradients"], strict=True)
    found = {
        DRAWS: [
            f"a higher ESS at {f} tau" for f in ("0.25", "0.5") if clearly_below(difference(cells, "1", f, "ess_share"))
        ],
        GRADIENTS: [f"an ESS per gradient below half of that at {best} tau"]
        if clear(mean_error([0.5 * b - one for b, one in costs]))
        else [],
    }
    for how, measure in DENSITIES.items():
        found[how] += [
            f"a log density higher by {plus_minus(*difference(cells, f, '1', measure), 4)} at {f} tau"
            for f in cells
            if f != "1" and clear(difference(cells, f, "1", measure))
        ]
    return found


def result_of_length(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    each = {g: judge_length(cells) for g, cells in groups.items()}
    reproduced = all_reproduced([one for found in each.values() for one in found.values()])
    text = [verdict(reproduced, "tau = pi sigma / 2 is a good trajectory length")]
    for how in DENSITIES:
        alone = OUTCOMES[all_reproduced([found[how] for found in each.values()])]
        text.append(f"At equal {how} alone: {alone.lower()}.")
    rows: list[tuple[Value, ...]] = []
    for g, cells in groups.items():
        ratio = {f: summary(cells, f, "ess_share") for f in cells}
        per = {f: summary(cells, f, "per_1000_gradients")[0] for f in cells}
        best = max(per, key=lambda f: per[f])
        lower = {
            how: ", ".join(signed(difference(cells, "1", f, measure), 4) for f in cells if f != "1")
            for how, measure in DENSITIES.items()
        }
        text.append(
            f"{g}: at equal numbers of draws, ESS / draws is {plus_minus(*ratio['1'], 2)} at tau, "
            f"{plus_minus(*ratio['0.5'], 2)} at 0.5 tau and {plus_minus(*ratio['0.25'], 2)} at 0.25 tau. An effective "
            f"draw is cheapest at {best} tau (ESS per 1,000 gradients {per[best]:.2f}; {per['1']:.2f} at tau). Log "
            f"density at tau minus that at 0.25, 0.5 and 1.5 tau: {lower[DRAWS]} at equal draws; {lower[GRADIENTS]} at "
            "equal gradients."
        )
        for how, against in against_length(cells).items():
            if each[g][how] is False:
                verb = "argues" if len(against) == 1 else "argue"
                text.append(f"{g}, equal {how}: {' and '.join(against)} {verb} against tau.")
        key, _, digits = score_of(g)
        for f in cells:
            published = PUBLISHED[float(f)] if g == "mnist" else ("", "")
            rows.append(
                (
                    f"{g}, {f}",
                    plus_minus(*summary(cells, f, "log_density")),
                    plus_minus(*summary(cells, f, key), digits),
                    ratio[f][0],
                    summary(cells, f, "ess_weights")[0],
                    plus_minus(*summary(cells, f, "log_density_paid")),
                    plus_minus(*summary(cells, f, f"{key}_paid"), digits),
                    per[f],
                    summary(cells, f, "worst_rhat")[0],
                    *map(str, published),
                )
            )
    text += mixing_sentences(groups)
    text.append("Published (CIFAR-10, read off a figure): accuracy 0.83, 0.86, 0.889, 0.887 at 0.25, 0.5, 1, 1.5 tau.")
    columns = (
        Column("data, length / tau"),
        Column("log density, equal draws"),
        Column("RMSE or accuracy, equal draws"),
        Column("ESS / draws", digits=2, note="Median bulk ESS of the predictions"),
        Column("ESS / draws, weights", digits=2),
        Column("log density, equal gradients"),
        Column("RMSE or accuracy, equal gradients"),
        Column("ESS per 1,000 gradients", digits=2),
        Column("R-hat, equal gradients", digits=3, note="Worst test row, mean over repeats"),
        Column("published accuracy (CIFAR-10)"),
        Column("published LL (CIFAR-10)"),
    )
    numbers = {"groups": groups, "held_by_group": each, "published": {str(k): v for k, v in PUBLISHED.items()}}
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), _length_pictures(groups), numbers, notes)


def _length_pictures(groups: Mapping[str, Cells]) -> tuple[Picture, ...]:
    names, label = [f"{f:g}" for f in FACTORS], "trajectory length / (pi sigma / 2)"

    def drawn(name: str, lines: Mapping[str, list[Estimate]], ylabel: str, title: str, alt: str) -> Picture:
        return curves(name, FACTORS, lines, xlabel=label, ylabel=ylabel, mark=1.0, log=False, title=title, alt=alt)

    share = {g: [summary(c, f, "ess_share") for f in names] for g, c in groups.items()}
    cost = {g: [summary(c, f, "per_1000_gradients") for f in names] for g, c in groups.items()}
    density = {
        f"{g}, equal {how}": [(0.0, math.nan) if f == "1" else difference(c, f, "1", measure) for f in names]
        for g, c in groups.items()
        for how, measure in DENSITIES.items()
    }
    return (
        drawn("length-draws", share, "ESS / draws", "At equal draws", "ESS / draws against trajectory length"),
        drawn(
            "length-gradients",
            cost,
            "ESS per 1,000 gradients",
            "At equal cost",
            "ESS per gradient against trajectory length",
        ),
        drawn(
            "length-density",
            density,
            "log density relative to tau",
            "Predictions",
            "Log density relative to length tau against trajectory length, at equal draws and at equal gradients",
        ),
    )


STUDIES = {
    "trajectory-length": Study(
        "trajectory-length",
        "How long should an HMC trajectory be?",
        "Finding 7: tau = pi sigma / 2, where sigma is the prior's standard deviation, is a good trajectory length "
        f"({SOURCE}).",
        run_length,
        ("uci/boston.npz", MNIST),
    )
}
