"""Is one long HMC chain enough?

`one-long-chain`. Each of many HMC chains alone against all of them. Rule, fixed before any run: on a data set the
finding is reproduced if one chain retains at least 90 % of the gain in log density of all chains over a single fit
(MAP), with two standard errors to spare, and at least 90 % of the predictions have R-hat below 1.1. It is not
reproduced if the retained fraction, or the fraction of mixed predictions, is significantly below 90 %. All chains are
the reference, so they must have mixed (`hmc_mixing`); otherwise the retained fraction decides nothing. Overall it must
be reproduced on all data sets. R-hat of the weights is reported as well: the claim is that functions mix even if
weights do not. So is the fraction that as many draws retain that are spread over all chains: it is what one chain would
retain if it missed nothing.

Chains have the same length whether they have mixed or not, because their cost is part of the question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.diagnostics.convergence import rhat
from credibly.methods import MAP
from credibly.metrics import evaluation
from credibly.posterior.draws import DrawsPosterior
from credibly.report.page import Column, Table, Value
from credibly.report.pictures import Picture, picture
from studies.hmc_mixing import FIXED_FIRST, has_mixed, mixing_sentences, worst_rhat
from studies.hmc_parts import (
    MNIST,
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

FILES = ("uci/boston.npz", MNIST)
KEPT = 0.9
BELOW = 1.1  # R-hat of predictions that count as mixed in the published finding

# Accuracy and log likelihood, read off a figure in the article.
PUBLISHED_CHAINS = {1: (0.896, -0.322), 2: (0.904, -0.310), 3: (0.907, -0.307)}
PUBLISHED_SGD = (0.833, -0.795)


def quick_settings(options: Options) -> dict[str, Any]:
    """Return the settings of chains in a quick run."""
    return {"max_steps": 10, "compile": False} if options.quick else {}


def run_one(options: Options) -> Result:
    """Run many chains on every task, and compare each with all of them."""
    tasks, tally = boston_and_mnist(options, 3, 3), Tally()
    values: dict[str, dict[str, list[Tensor]]] = {}
    steps = 50 if options.quick else 1500
    with one_thread():
        for done, task in enumerate(tasks):
            options.report(f"{task.group} {task.repeat}", done, len(tasks))
            problem = task.problem()
            chains = 4 if options.quick else 8
            warmup, draws = (20, 12) if options.quick else (100, 240)
            posterior = hmc(
                problem,
                task.seed,
                chains=chains,
                warmup=warmup,
                draws=draws,
                **quick_settings(options),
            )
            point = MAP(steps=steps, compile=False if options.quick else "auto").fit(
                problem, seed=task.seed, progress=False
            )
            tally.add(task.group, "MAP", task.judge(point.predict(task.x_test)))
            _each_chain(task, posterior, tally)
            found = _rhats(task, posterior)
            for space, these in found.items():
                values.setdefault(task.group, {}).setdefault(space, []).append(these)
                mixed = float((these < BELOW).double().mean())
                tally.add(
                    task.group,
                    space,
                    {"mixed": mixed, "most": float(these.quantile(0.99)), "worst": float(these.max())},
                )
            tally.add(task.group, "all", {"acceptance": acceptance_of(posterior)} | worst_rhat(task, posterior))
    histograms = {g: {s: torch.cat(v) for s, v in spaces.items()} for g, spaces in values.items()}
    notes = (
        size_note(tasks),
        f"{chains} chains from random initialisation, {draws} draws each after {warmup} "
        f"warm-up iterations (in the article 240 draws); MAP with the same prior, {steps:,} steps. {FIXED_FIRST}",
        "One chain has only a fraction of the draws of all (an eighth at full size), so the retained fraction "
        "reflects the cost of fewer draws as well as what a single chain misses. As many draws spread over all chains "
        "(every eighth draw of each, at full size) have the first cost only.",
        "R-hat is rank-normalised and split; for images it is computed on class probabilities, for tables on means.",
        "Published: three chains of 240 draws of ResNet-20-FRN on CIFAR-10; R-hat of most predictions is below 1.1 "
        "with a tail up to 4, R-hat of the weights has a tail up to about 55.",
    )
    return result_of_one(tally.groups, notes, [_histogram(g, found) for g, found in histograms.items()])


def _each_chain(task: Task, posterior: DrawsPosterior, tally: Tally) -> None:
    """Evaluate each chain alone, all chains, single draws, and each chain against all others; means over chains."""
    draws = posterior.draws
    whole = posterior.predict(task.x_test)
    tally.add(task.group, "all", task.judge(whole))
    alone, single, apart = [], [], []
    for c in range(len(draws)):
        one = part_of(posterior, draws[c : c + 1]).predict(task.x_test)
        others = part_of(posterior, torch.cat([draws[:c], draws[c + 1 :]])).predict(task.x_test)
        alone.append(task.judge(one))
        single.append(task.judge(part_of(posterior, draws[c : c + 1, -1:]).predict(task.x_test)))
        apart.append(evaluation.compare(one, others)["total_variation"])
    for name, found in (("one chain", alone), ("one draw", single)):
        tally.add(task.group, name, {k: float(np.mean([f[k] for f in found])) for k in found[0]})
    tally.add(task.group, "one chain", {"total_variation": float(np.mean(apart))})
    spread = part_of(posterior, draws[:, :: len(draws)])
    tally.add(task.group, "spread", task.judge(spread.predict(task.x_test)))


def _rhats(task: Task, posterior: DrawsPosterior) -> dict[str, Tensor]:
    functions = posterior.predict(task.x_test[:500]).functions()
    functions = functions.reshape(*posterior.draws.shape[:2], -1)
    return {
        "predictions": torch.as_tensor(rhat(functions)).double(),
        "weights": torch.as_tensor(rhat(posterior.draws)).double(),
    }


def fraction_retained(cells: Cells, part: str = "one chain") -> Estimate:
    """Return the fraction of the gain of all chains over MAP that a part retains, with its standard error."""
    one, all_, point = (cells[name]["log_density"] for name in (part, "all", "MAP"))
    gains = [a - p for a, p in zip(all_, point, strict=True)]
    if any(g <= 0 for g in gains):  # no gain, so no fraction of it
        return math.nan, math.nan
    return mean_error([(o - p) / g for o, p, g in zip(one, point, gains, strict=True)])


def judge_one(cells: Cells) -> bool | None:
    """Return whether the finding is reproduced on one data set, by the rule above."""
    kept, mixed = fraction_retained(cells), summary(cells, "predictions", "mixed")
    if clearly_below((mixed[0] - 0.9, mixed[1])):
        return False
    if math.isnan(kept[0]) or not has_mixed(cells, "all"):
        return None
    if clearly_below((kept[0] - KEPT, kept[1])):
        return False
    return True if clear((kept[0] - KEPT, kept[1])) and mixed[0] >= 0.9 else None


def result_of_one(groups: Mapping[str, Cells], notes: tuple[str, ...], histograms: list[Picture]) -> Result:
    """Return the result computed from the values of all repeats."""
    each = {g: judge_one(cells) for g, cells in groups.items()}
    reproduced = all_reproduced(list(each.values()))
    text = [verdict(reproduced, "one long chain is a good approximation of many")]
    rows: list[tuple[Value, ...]] = []
    for g, cells in groups.items():
        kept, spread = fraction_retained(cells), fraction_retained(cells, "spread")
        gain = (
            "MAP is no worse than HMC in some repeat, so there is no gain to retain"
            if math.isnan(kept[0])
            else (
                f"one chain retains {plus_minus(100 * kept[0], 100 * kept[1], 1)} % of the gain of all chains over "
                f"MAP, and as many draws spread over all chains {plus_minus(100 * spread[0], 100 * spread[1], 1)} %,"
            )
        )
        mixed = {s: 100 * summary(cells, s, "mixed")[0] for s in ("predictions", "weights")}
        most = {s: summary(cells, s, "most")[0] for s in ("predictions", "weights")}
        text.append(
            f"{g}: {gain} in log density (all chains minus one: "
            f"{signed(difference(cells, 'all', 'one chain', 'log_density'), 4)}). R-hat is below 1.1 for "
            f"{mixed['predictions']:.1f} % of the predictions and {mixed['weights']:.1f} % of the weights; its 99 % "
            f"quantiles are {most['predictions']:.2f} and {most['weights']:.2f}."
        )
        key, _, digits = score_of(g)
        titles = {"spread": "as many draws, spread over all"}
        for name in ("one draw", "MAP", "one chain", "spread", "all"):
            apart = summary(cells, name, "total_variation")[0] if name == "one chain" else ""
            rows.append(
                (
                    f"{g}, {titles.get(name, name)}",
                    plus_minus(*summary(cells, name, "log_density")),
                    plus_minus(*summary(cells, name, key), digits),
                    apart,
                )
            )
    rows += [
        (f"published (CIFAR-10), {name}", f"{ll:.3f}", f"{accuracy:.3f}", "")
        for name, (accuracy, ll) in (
            ("SGD", PUBLISHED_SGD),
            ("1 chain", PUBLISHED_CHAINS[1]),
            ("3 chains", PUBLISHED_CHAINS[3]),
        )
    ]
    text += mixing_sentences(groups)
    (a3, l3), (a1, l1), (a0, l0) = PUBLISHED_CHAINS[3], PUBLISHED_CHAINS[1], PUBLISHED_SGD
    text.append(
        f"Published (CIFAR-10, read off a figure): one of three chains retains {(l1 - l0) / (l3 - l0):.0%} of the gain "
        f"in log density and {(a1 - a0) / (a3 - a0):.0%} of the gain in accuracy."
    )
    columns = (
        Column("data, average over"),
        Column("log density"),
        Column("RMSE or accuracy"),
        Column("total variation from the other chains"),
    )
    numbers = {"groups": groups, "held_by_group": each, "kept": {g: fraction_retained(c) for g, c in groups.items()}}
    numbers["kept_spread"] = {g: fraction_retained(c, "spread") for g, c in groups.items()}
    return Result(tuple(text), reproduced, Table(columns, tuple(rows)), tuple(histograms), numbers, notes)


def _histogram(group: str, values: Mapping[str, Tensor]) -> Picture:
    """Draw histograms of R-hat of predictions and of weights."""
    top = max(1.2, *(float(v.quantile(0.995)) for v in values.values()))
    edges = np.linspace(0.98, top, 50)

    def paint(ax: Any) -> None:
        for name, these in values.items():
            inside = these.clamp(max=top).numpy()
            ax.hist(inside, edges, weights=np.full(len(inside), 1 / len(inside)), alpha=0.6, label=name)
        ax.axvline(BELOW, color="0.5", lw=0.8, ls=(0, (2, 2)))
        ax.set(xlabel="R-hat", ylabel="fraction")
        ax.legend()

    alt = f"Histogram of R-hat of predictions and weights on {group}"
    return picture(f"rhat-{group}", paint, alt=alt, title=f"{group}: R-hat", caption="The dashed line is at 1.1.")


STUDIES = {
    "one-long-chain": Study(
        "one-long-chain",
        "Is one long chain enough?",
        f"Finding 2: one long HMC chain is a good approximation; functions mix better than weights ({SOURCE}).",
        run_one,
        FILES,
    ),
}
