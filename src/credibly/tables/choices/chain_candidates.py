"""Candidates with few parameters that are sampled by HMC: a linear model, and a small network.

On rows of later times a linear model continues a trend, or stays where it ended if its inputs are clipped to the range
of earlier rows. A network may bend anywhere beyond that range. For censored times, counts and other tasks without a
compiled sampler the default is an ensemble of wide networks; on a few hundred rows the posterior of a few parameters
often predicts better.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from credibly.tables.choices.rowset import Rowset
from credibly.tables.recipe import Recipe
from credibly.tables.targets.scale import candidate_transforms

# Rows times parameters up to which HMC, its pilots, its trial and its folds take about two minutes on two cores. A
# gradient takes several times as long without the compiled sampler.
AFFORDABLE, SLOWER = 1_200_000, 8
# Chains of a table. Steps of half the default error, with a warm-up that also finds step sizes which shrink while the
# chains approach noise of small variance.
CHAINS: dict[str, Any] = {"warmup": 300, "max_steps": 250, "target_accept": 0.9, "thin": 4}
# Width of the small network.
FEW_UNITS = 16


def is_affordable(recipe: Recipe, rows: int, parameters: int) -> bool:
    """Return whether HMC finishes within about two minutes."""
    return rows * parameters <= AFFORDABLE // (1 if recipe.compiled else SLOWER)


def few_parameters(best: Recipe, data: Rowset, fixed: Sequence[str]) -> list[tuple[str, Recipe]]:
    """Return the candidates that this table has; none if what they change is fixed, or if HMC would take too long.

    Args:
        best: the best recipe so far.
        data: the rows.
        fixed: fields of the recipe that must not change.
    """
    needed = {"hidden", "embedding"} | ({"method", "settings"} if best.method != "hmc" else set())
    if needed & set(fixed):
        return []
    chains = dataclasses.replace(best, method="hmc", embedding=False)
    if best.method != "hmc":
        chains = dataclasses.replace(chains, activation="silu", settings=CHAINS)
    tasks, times = best.task not in ("regression", "classification"), data.rows.times is not None
    found = []
    if tasks or times:
        found += _lines(dataclasses.replace(chains, hidden=()), data, fixed)
    if tasks:
        found.append((f"HMC, {FEW_UNITS} units", dataclasses.replace(chains, hidden=(FEW_UNITS,))))
    return [(name, one) for name, one in found if is_affordable(one, data.rows.count, _parameters(one, data))]


def _lines(line: Recipe, data: Rowset, fixed: Sequence[str]) -> list[tuple[str, Recipe]]:
    """Return linear models: with times those that continue a trend and those that do not, on both scales.

    Their noise may differ from that of a network: what a line does not follow adds to it.
    """
    real, times = line.task == "regression", data.rows.times is not None
    noises = ("learned", "heteroscedastic") if real and "noise" not in fixed else (line.noise,)
    inputs = tuple(dict.fromkeys((line.inputs, "clipped"))) if times and "inputs" not in fixed else (line.inputs,)
    scales: tuple[str, ...] = (line.transform,)
    if real and times and "transform" not in fixed:
        scales = tuple(dict.fromkeys((*scales, *candidate_transforms(data.y)[:1])))
    found = []
    for noise, kind, scale in itertools.product(noises, inputs, scales):
        changed = [f"noise {noise}"] * (len(noises) > 1)
        changed += [f"inputs {kind}"] * (kind != line.inputs) + [f"target {scale}"] * (scale != line.transform)
        one = dataclasses.replace(line, noise=noise, inputs=kind, transform=scale)
        found.append((", ".join(["HMC, linear model", *changed]), one))
    return found


def has_few_parameters(recipe: Recipe) -> bool:
    """Return whether a recipe is one of these candidates."""
    return recipe.method == "hmc" and sum(recipe.hidden) <= FEW_UNITS


def _parameters(recipe: Recipe, data: Rowset) -> int:
    targets = 1 if data.y.ndim == 1 else data.y.shape[1]
    widths = [data.x.shape[1], *recipe.hidden, recipe.outputs(targets, data.classes)]
    return sum((before + 1) * after for before, after in itertools.pairwise(widths))
