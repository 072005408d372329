"""A candidate for smooth targets: small networks that are trained by damped Gauss-Newton steps on all rows.

Wide networks with embeddings, trained by Adam, follow steps and waves, but stop at a few hundredths of a standard
deviation of the target. A small network with a smooth activation and second-order steps ends at a thousandth of it if
the target allows that, as in simulations and noise-free measurements, and takes a few seconds to fail otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from credibly.inference.training.gauss_newton import matrix_rows
from credibly.inference.training.settings import GAUSS_NEWTON
from credibly.tables.recipe import Recipe

NAME = "small smooth network, Gauss-Newton steps"
MEAN_FIRST = f"{NAME}, mean first"
NETWORK: dict[str, Any] = {"hidden": (16, 16), "activation": "tanh", "embedding": False, "noise_floor": 0.0}
PRIOR_SCALE = 2.0
TRAINING: dict[str, Any] = {
    "optimiser": GAUSS_NEWTON, "steps": 100, "validation": 0.1, "patience": 15, "noise_from": "held-out",
    "prior": True, "anchored": False, "init": "fresh",
}  # fmt: skip
PILOT: dict[str, Any] = {"members": 3, "steps": 60, "patience": 10}
# Maximum number of inputs, and of members; an ensemble with fewer members is not worth choosing.
MOST_INPUTS, MEMBERS, FEWEST_MEMBERS = 60, 10, 4
# Rows up to which a table has five folds, with a fifth of the members each, but at least two; larger ones have a single
# held-out part.
FEW_ROWS, FOLDS, FEWEST_OF_FOLD = 10_000, 5, 2
# Multiplications per row and parameter of the loss and its gradient, at all attempts of a step.
LOSS = 20
# Cost of as many steps for the mean, whose matrix has half as many terms, and as many for mean and noise.
MEAN_FIRST_COST = 1.5
# Number of either. More than without: such targets have hardly any noise, and their errors go on falling.
MEAN_FIRST_STEPS = 150
# Multiplications that the final fit and those to folds may take together, at the maximum number of steps: about a
# minute on two cores, and half as long again with the mean first.
WORK = 1.5e12


def is_smooth(recipe: Recipe) -> bool:
    """Return whether a recipe is one of these candidates."""
    return recipe.settings.get("optimiser") == GAUSS_NEWTON


def affordable_members(rows: int, inputs: int, cost: float = 1.0) -> int:
    """Return the number of members for a table of this size; 0 if it is too large for this candidate.

    A step sums a matrix over some of the rows and decomposes it, and networks are trained one after another. `cost` is
    the cost of a network relative to one whose mean and noise are trained together from the start.
    """
    if inputs > MOST_INPUTS:
        return 0
    first, second = NETWORK["hidden"]
    parameters = first * (inputs + 1) + second * (first + 1) + 2 * (second + 1)
    step = matrix_rows(rows, parameters) * parameters**2 + parameters**3 + LOSS * rows * parameters
    networks = int(WORK / (cost * TRAINING["steps"] * step))
    for members in range(MEMBERS, FEWEST_MEMBERS - 1, -1):
        of_folds = members if rows > FEW_ROWS else FOLDS * max(FEWEST_OF_FOLD, members // FOLDS)
        if members + of_folds <= networks:
            return members
    return 0


def smooth_recipe(best: Recipe, members: int, *, prior_scale: bool, inputs: bool) -> Recipe:
    """Return the candidate.

    Args:
        best: the best recipe so far, an ensemble.
        members: number of networks, see `affordable_members`.
        prior_scale, inputs: which of these may be changed.
    """
    made = dataclasses.replace(best, **NETWORK, settings={**TRAINING, "members": members})
    if prior_scale:
        made = dataclasses.replace(made, prior_scale=PRIOR_SCALE)
    if inputs:
        # A smooth function of a column is not a smooth function of its ranks.
        made = dataclasses.replace(made, inputs="standard")
    return made


def with_mean_first(best: Recipe, rows: int, inputs: int) -> Iterator[tuple[str, Recipe]]:
    """Yield this candidate with the mean fitted before the noise, if it is the best so far and there is time for it."""
    members = affordable_members(rows, inputs, MEAN_FIRST_COST)
    if is_smooth(best) and best.noise == "heteroscedastic" and members:
        settings = {**best.settings, "mean_first": True, "members": members, "steps": MEAN_FIRST_STEPS}
        yield MEAN_FIRST, dataclasses.replace(best, settings=settings)


def smooth_changes(
    rows: int, inputs: int, *, prior_scale: bool, encoding: bool
) -> list[Callable[[Recipe], Iterator[tuple[str, Recipe]]]]:
    """Return the changes to these candidates, each a function from the best recipe so far; none on large tables.

    Args:
        rows, inputs: the size of the table.
        prior_scale, encoding: whether the prior scale and the encoding of the inputs may be changed.
    """
    members = affordable_members(rows, inputs)
    if not members:
        return []
    return [
        lambda best: iter([(NAME, smooth_recipe(best, members, prior_scale=prior_scale, inputs=encoding))]),
        lambda best: with_mean_first(best, rows, inputs),
    ]
