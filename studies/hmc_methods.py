"""Two findings on HMC and other methods: how far the others are from it, and whether its model average predicts better.

`sgmcmc-vs-hmc`. The HMC chains are divided into two halves: the first is the reference; the second and every other
method (same network, same prior) are compared with it by agreement and total variation. Rule, fixed before any run: the
finding (SG-MCMC and VI do not match the HMC posterior) is reproduced if SGHMC, SGLD and Bayes by Backprop each have a
significantly larger total variation from the reference than the second half of HMC, and not reproduced if one of them
has a significantly smaller one. The number of method pairs in the published order is reported as well.

`bma-vs-sgd-vs-ensemble`. The HMC model average against MAP (plain training with weight decay) and a deep ensemble of
ten. HMC uses the prior fixed in advance; the prior scale of MAP and the ensemble is chosen from half, one and two times
that scale, by the predictions of an ensemble of three on a held-out fifth of the training rows. Rule: the finding is
reproduced if over all repeats the log density of HMC is significantly above that of both, and its mean is above both on
every data set. It is not reproduced if over all repeats it is not above one of them. Otherwise it is inconclusive.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from credibly.core.rng import stream
from credibly.methods import MAP, SGHMC, SGLD, BayesByBackprop, DeepEnsemble
from credibly.metrics import evaluation
from credibly.report.page import Column, Table, Value
from studies.hmc_parts import (
    MNIST,
    SOURCE,
    Cells,
    Tally,
    Task,
    clear,
    clearly_below,
    difference,
    dots,
    hmc,
    image_task,
    one_thread,
    part_of,
    score_of,
    signed,
    size_note,
    summary,
    table_task,
    verdict,
)
from studies.study import Options, Result, Study, mean_error, plus_minus

TABLES = ("boston", "concrete", "energy", "yacht")
SAMPLERS = ("SGHMC", "SGLD", "BBB")
# Agreement in per cent and total variation on CIFAR-10, in the order of the article and under the names used here.
PUBLISHED_DISTANCE = {
    "HMC": (94.01, 0.074),
    "SGHMC": (91.98, 0.109),
    "SGLD": (91.54, 0.110),
    "ensemble": (91.52, 0.115),
    "BBB": (88.75, 0.136),
    "MAP": (85.48, 0.190),
}
# Accuracy and log likelihood on CIFAR-10, read off a figure; log likelihood of HMC and SGD on other splits of the
# tables.
PUBLISHED_SCORE = {"HMC": (0.906, -0.307), "ensemble": (0.893, -0.32), "MAP": (0.833, -0.795)}
PUBLISHED_TABLES = {"concrete": (-2.67, -3.37), "yacht": (0.56, -2.9), "boston": (-2.39, -2.71), "energy": (-1.1, -1.5)}


# -- distance from HMC -------------------------------------------------------------------------------------------------
def run_distance(options: Options) -> Result:
    """Compare every method with one half of the HMC chains."""
    quick = options.quick
    small = {"side": 4, "hidden": 8, "test": 100}
    tasks = [image_task(options, 0, 100, **small)] if quick else [image_task(options, i) for i in range(3)]
    tally, mixing, total = Tally(), Tally(), len(tasks) * len(PUBLISHED_DISTANCE)
    with one_thread():
        for repeat, task in enumerate(tasks):
            problem, done = task.problem(), repeat * len(PUBLISHED_DISTANCE)
            options.report(f"{task.group} {task.repeat}: HMC", done, total)
            size = (
                {"chains": 4, "warmup": 20, "draws": 8, "max_steps": 10}
                if quick
                else {"chains": 8, "warmup": 40, "draws": 50}
            )
            posterior = hmc(problem, task.seed, compile=False, **size)
            first, second = (part_of(posterior, half).predict(task.x_test) for half in posterior.draws.tensor_split(2))
            mixing.add("rhat", "HMC", {"most": _rhat(task, posterior)})
            tally.add(task.group, "HMC", evaluation.compare(second, first) | task.judge(second))
            for place, (name, method) in enumerate(_others(quick).items(), 1):
                options.report(f"{task.group} {task.repeat}: {name}", done + place, total)
                fitted = method.fit(problem, seed=task.seed, progress=False)
                predictive = fitted.predict(task.x_test)
                tally.add(task.group, name, evaluation.compare(predictive, first) | task.judge(predictive))
                if name in ("SGHMC", "SGLD"):
                    mixing.add("rhat", name, {"most": _rhat(task, fitted)})
    worst = ", ".join(f"{name} {max(row['most']):.2f}" for name, row in mixing.groups["rhat"].items())
    settings = "; ".join(f"{n}: {_settings_text(m)}" for n, m in _others(quick).items())
    notes = (
        size_note(tasks),
        f"HMC: {size['chains']} chains of {size['draws']} draws after {size['warmup']} warm-up iterations, randomly "
        f"initialised. {settings}. 99 % quantile of R-hat over predictions in the worst repeat: {worst}.",
        "How close SG-MCMC comes depends on the length of its chains: a first run with 5,000 steps per chain instead "
        "of 44,000 left SGHMC and SGLD at a total variation of 0.121 and 0.120, as far as MAP, with 8 of the 15 "
        "pairs in the published order. Whether the chains have mixed is shown by R-hat above.",
        "SGLD and SGHMC use this library's default step size, which limits their bias, with a constant schedule. The "
        "article's runs were longer. The published columns are for ResNet-20-FRN on CIFAR-10, from a table.",
    )
    return result_of_distance(tally.groups["mnist"], notes)


def _others(quick: bool) -> dict[str, Any]:
    chains: dict[str, Any] = (
        {"chains": 2, "warmup": 50, "draws": 10, "thin": 2}
        if quick
        else {"chains": 4, "warmup": 4000, "draws": 100, "thin": 400}
    )
    steps: dict[str, Any] = {"steps": 60 if quick else 1500, "compile": False}
    return {
        "SGHMC": SGHMC(init="fresh", compile=not quick, **chains),
        "SGLD": SGLD(init="fresh", compile=not quick, **chains),
        "ensemble": DeepEnsemble(members=2 if quick else 10, **steps),
        "BBB": BayesByBackprop(**steps),
        "MAP": MAP(**steps),
    }


def _rhat(task: Task, posterior: Any) -> float:
    """Return the 99 % quantile of R-hat over predictions."""
    found = posterior.diagnostics(task.x_test[:500]).functions
    return float("nan") if found is None else float(found.rhat_most)


def _settings_text(method: Any) -> str:
    known = ("chains", "warmup", "draws", "thin", "members", "steps")
    values = {key: getattr(method, key, None) for key in known}
    return ", ".join(f"{key} {value:,}" for key, value in values.items() if isinstance(value, int) and value)


def _per_cent(found: tuple[float, float]) -> tuple[float, float]:
    return 100 * found[0], 100 * found[1]


def pairs_in_order(cells: Cells) -> tuple[int, int]:
    """Return how many pairs of methods have their total variations in the published order, and the number of pairs."""
    pairs = list(itertools.combinations([m for m in PUBLISHED_DISTANCE if m in cells], 2))
    means = {m: summary(cells, m, "total_variation")[0] for m in cells}
    return sum(means[a] < means[b] for a, b in pairs), len(pairs)


def judge_distance(cells: Cells) -> bool | None:
    """Return whether SG-MCMC and VI differ from HMC by more than HMC from itself, by the rule above."""
    beyond = [difference(cells, name, "HMC", "total_variation") for name in SAMPLERS]
    if any(map(clearly_below, beyond)):
        return False
    return True if all(map(clear, beyond)) else None


def result_of_distance(cells: Cells, notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    reproduced = judge_distance(cells)
    right, pairs = pairs_in_order(cells)
    order = sorted(cells, key=lambda m: summary(cells, m, "total_variation")[0])
    floor = summary(cells, "HMC", "total_variation")
    text = (
        verdict(reproduced, "SG-MCMC and VI do not match the HMC posterior"),
        f"Total variation from one half of the HMC chains: {plus_minus(*floor)} for the other half, "
        + ", ".join(f"{plus_minus(*summary(cells, m, 'total_variation'))} for {m}" for m in order if m != "HMC")
        + ".",
        f"In order of total variation: {', '.join(order)}. {right} of {pairs} pairs of methods are in the published "
        f"order ({', '.join(PUBLISHED_DISTANCE)}).",
    )
    rows = tuple(
        (
            "HMC, other half" if m == "HMC" else m,
            plus_minus(*summary(cells, m, "total_variation")),
            plus_minus(*_per_cent(summary(cells, m, "agreement")), 1),
            plus_minus(*summary(cells, m, "accuracy")),
            plus_minus(*summary(cells, m, "log_density")),
            f"{PUBLISHED_DISTANCE[m][1]:.3f}",
            f"{PUBLISHED_DISTANCE[m][0]:.1f}",
        )
        for m in PUBLISHED_DISTANCE
    )
    columns = (
        Column("method"),
        Column("total variation", note="From the first half of the HMC chains"),
        Column("agreement %"),
        Column("accuracy"),
        Column("log density"),
        Column("published total variation (CIFAR-10)"),
        Column("published agreement % (CIFAR-10)"),
    )
    names = list(PUBLISHED_DISTANCE)
    lines = {
        "here": [summary(cells, m, "total_variation") for m in names],
        "published, CIFAR-10": [(PUBLISHED_DISTANCE[m][1], 0.0) for m in names],
    }
    shown = dots(
        "distance",
        ["HMC, other half", *names[1:]],
        lines,
        xlabel="total variation from HMC",
        alt="Total variation of each method from HMC, here and as published",
        size=(5.0, 3.4),
        caption="Top to bottom in the published order. Further right is further from HMC.",
    )
    numbers = {
        "methods": cells,
        "order": order,
        "pairs_in_order": right,
        "pairs": pairs,
        "published": PUBLISHED_DISTANCE,
    }
    return Result(text, reproduced, Table(columns, rows), (shown,), numbers, notes)


# -- the HMC model average against MAP and ensembles -------------------------------------------------------------------
def run_scores(options: Options) -> Result:
    """Run MAP, the ensemble and HMC on every data set."""
    if options.quick:
        tasks = [table_task(options, "boston", 0), image_task(options, 0, 100, side=4, hidden=8, test=100)]
    else:
        tasks = [table_task(options, name, i) for name in TABLES for i in range(2)]
        tasks += [image_task(options, i) for i in range(3)]
    tally, chosen, mixing = Tally(), Tally(), Tally()
    with one_thread():
        for done, task in enumerate(tasks):
            options.report(f"{task.group} {task.repeat}", done, len(tasks))
            scale = best_scale(task, _trial(options.quick))
            chosen.add(task.group, "scale", {"scale": scale})
            for name, method in _plain(options.quick).items():
                fitted = method.fit(task.problem(scale), seed=task.seed, progress=False)
                tally.add(task.group, name, task.judge(fitted.predict(task.x_test)))
            posterior = hmc(task.problem(), task.seed, **_hmc_settings(task, options.quick))
            tally.add(task.group, "HMC", task.judge(posterior.predict(task.x_test)))
            mixing.add(task.group, "HMC", {"rhat": _rhat(task, posterior)})
    worst = ", ".join(f"{g} {max(c['HMC']['rhat']):.2f}" for g, c in mixing.groups.items())
    scales = "; ".join(f"{g} {'/'.join(f'{s:g}' for s in c['scale']['scale'])}" for g, c in chosen.groups.items())
    notes = (
        size_note(tasks),
        ("Quick: two short chains, 60 steps and 2 members. At full size " if options.quick else "")
        + "HMC on tables: 6 chains, 50 warm-up iterations, 40 draws, trajectories of length 0.5 that keep 70 % of "
        "their momentum; on images: 4 chains, 40 warm-up iterations, 40 draws, trajectories of length pi/2. 99 % "
        f"quantile of R-hat over predictions in the worst repeat: {worst}; above 1.1 the chains have not mixed, and "
        "the average is over separated chains. MAP and ensemble (10 members): 1,200 Adam steps, cosine schedule.",
        f"Prior scales chosen for MAP and the ensemble inside the training part: {scales}.",
        "Published: ResNet-20-FRN on CIFAR-10 with ensembles of 50; tables on non-standard splits, with "
        "input-dependent noise. Here the noise is a single learned value, and repeats are few.",
    )
    return result_of_scores(tally.groups, notes)


def _trial(quick: bool) -> Any:
    """Return the small ensemble that the prior scale of MAP and the ensemble is chosen with."""
    return DeepEnsemble(members=2 if quick else 3, steps=60 if quick else 600, compile=False)


def _plain(quick: bool) -> dict[str, Any]:
    steps: dict[str, Any] = {"steps": 60 if quick else 1200, "compile": False}
    return {"MAP": MAP(**steps), "ensemble": DeepEnsemble(members=2 if quick else 10, **steps)}


def _hmc_settings(task: Task, quick: bool) -> dict[str, Any]:
    if quick:
        return {"chains": 2, "warmup": 20, "draws": 10, "max_steps": 10, "compile": False}
    if task.labels:
        return {"chains": 4, "warmup": 40, "draws": 40, "compile": False}
    short = {"trajectory_length": 0.5, "refresh": 0.3}
    return {"chains": 6, "warmup": 50, "draws": 40, "compile": True, **short}


def best_scale(task: Task, method: Any) -> float:
    """Return the prior scale with the highest log density on a held-out fifth of the training rows."""
    order = torch.randperm(len(task.x), generator=stream(task.seed, "held back", task.repeat))
    kept, back = order[len(order) // 5 :], order[: len(order) // 5]
    found = {}
    for factor in (0.5, 1.0, 2.0):
        fitted = method.fit(task.problem(task.scale * factor, rows=kept), seed=task.seed, progress=False)
        found[task.scale * factor] = task.judge(fitted.predict(task.x[back]), task.y[back])["log_density"]
    return max(found, key=lambda scale: found[scale])


def judge_scores(groups: Mapping[str, Cells]) -> bool | None:
    """Return whether HMC predicts better than both, by the rule above."""
    over = overall(groups)
    if any(mean <= 0 for mean, _ in over.values()):
        return False
    every = all(difference(c, "HMC", m, "log_density")[0] > 0 for c in groups.values() for m in ("MAP", "ensemble"))
    return True if every and all(map(clear, over.values())) else None


def overall(groups: Mapping[str, Cells]) -> dict[str, tuple[float, float]]:
    """Return the log density of HMC minus that of each other method, over all data sets and repeats."""
    gaps: dict[str, list[float]] = {"MAP": [], "ensemble": []}
    for cells in groups.values():
        for m, found in gaps.items():
            found += [a - b for a, b in zip(cells["HMC"]["log_density"], cells[m]["log_density"], strict=True)]
    return {m: mean_error(found) for m, found in gaps.items()}


def result_of_scores(groups: Mapping[str, Cells], notes: tuple[str, ...]) -> Result:
    """Return the result computed from the values of all repeats."""
    reproduced, over = judge_scores(groups), overall(groups)
    text = [
        verdict(reproduced, "the HMC model average beats plain training and a deep ensemble"),
        f"Over all data sets and repeats, the log density of HMC minus that of MAP is {signed(over['MAP'])}, minus "
        f"that of the ensemble {signed(over['ensemble'])}.",
    ]
    rows: list[tuple[Value, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {"over MAP": [], "over ensemble": []}
    for g, cells in groups.items():
        gaps = {m: difference(cells, "HMC", m, "log_density") for m in ("MAP", "ensemble")}
        key, name, digits = score_of(g)
        text.append(
            f"{g}: log density of HMC minus MAP {signed(gaps['MAP'])}, minus the ensemble {signed(gaps['ensemble'])}; "
            f"{name} "
            + ", ".join(f"{plus_minus(*summary(cells, m, key), digits)} ({m})" for m in ("HMC", "ensemble", "MAP"))
            + "."
        )
        for m in gaps:
            lines[f"over {m}"].append(gaps[m])
        for m in ("HMC", "ensemble", "MAP"):
            published = ""
            if g == "mnist":
                published = "accuracy {:.3f}, LL {:.3f} (CIFAR-10)".format(*PUBLISHED_SCORE[m])
            elif g in PUBLISHED_TABLES and m != "ensemble":
                published = f"LL {PUBLISHED_TABLES[g][0 if m == 'HMC' else 1]:.2f} (other splits)"
            rows.append(
                (
                    f"{g}, {m}",
                    plus_minus(*summary(cells, m, "log_density")),
                    plus_minus(*summary(cells, m, key), digits),
                    published,
                )
            )
    columns = (Column("data, method"), Column("log density"), Column("RMSE or accuracy"), Column("published"))
    shown = dots(
        "bma-gain",
        list(groups),
        lines,
        xlabel="gain of HMC in log density",
        zero=True,
        alt="Gain of HMC in log density over MAP and over the ensemble on each data set",
        size=(5.0, 3.4),
        caption="To the right of the line HMC predicts better. Bars are one standard error.",
    )
    numbers = {"groups": groups, "overall": over, "published": PUBLISHED_SCORE, "published_tables": PUBLISHED_TABLES}
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), (shown,), numbers, notes)


STUDIES = {
    "sgmcmc-vs-hmc": Study(
        "sgmcmc-vs-hmc",
        "How far are other methods from HMC?",
        "Finding 6: SG-MCMC and variational inference differ from HMC. From closest to furthest: HMC, SGHMC, SGLD, "
        f"ensemble, MFVI, SGD ({SOURCE}).",
        run_distance,
        (MNIST,),
    ),
    "bma-vs-sgd-vs-ensemble": Study(
        "bma-vs-sgd-vs-ensemble",
        "Does averaging over the posterior predict better?",
        f"Finding 1: the HMC model average beats plain training and deep ensembles ({SOURCE}).",
        run_scores,
        (*(f"uci/{name}.npz" for name in TABLES), MNIST),
    ),
}
