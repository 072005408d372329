"""A candidate for smooth targets: small networks that are trained by damped Gauss-Newton steps on all rows.

Wide networks with embeddings, trained by Adam, follow steps and waves, but stop at a few hundredths of a standard
deviation of the target. A small network with a smooth activation and second-order steps ends at a thousandth of it if
the target allows that, as in simulations and noise-free measurements, and takes a few seconds to fail otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from credibly.inference.training.settings import GAUSS_NEWTON
from credibly.tables.recipe import Recipe

NAME = "small smooth network, Gauss-Newton steps"
NETWORK: dict[str, Any] = {"hidden": (16, 16), "activation": "tanh", "embedding": False, "noise_floor": 0.0}
PRIOR_SCALE = 2.0
TRAINING: dict[str, Any] = {
    "optimiser": GAUSS_NEWTON, "steps": 100, "validation": 0.1, "patience": 15, "noise_from": "held-out",
    "prior": True, "anchored": False, "init": "fresh",
}  # fmt: skip
PILOT: dict[str, Any] = {"members": 3, "steps": 60, "patience": 10}
# Number of inputs up to which it is tried: the time of a step grows with the third power of the number of parameters.
MOST_INPUTS = 60
# Rows up to which an ensemble has MEMBERS members; larger tables have fewer.
FEW_ROWS, MEMBERS, FEWEST_MEMBERS = 10_000, 10, 4


def is_smooth(recipe: Recipe) -> bool:
    """Return whether a recipe is one of these candidates."""
    return recipe.settings.get("optimiser") == GAUSS_NEWTON


def smooth_recipe(best: Recipe, rows: int, *, prior_scale: bool, inputs: bool) -> Recipe:
    """Return the candidate.

    Args:
        best: the best recipe so far, an ensemble.
        rows: number of rows of the table.
        prior_scale, inputs: which of these may be changed.
    """
    members = MEMBERS if rows <= FEW_ROWS else FEWEST_MEMBERS
    made = dataclasses.replace(best, **NETWORK, settings={**TRAINING, "members": members})
    if prior_scale:
        made = dataclasses.replace(made, prior_scale=PRIOR_SCALE)
    if inputs:
        # A smooth function of a column is not a smooth function of its ranks.
        made = dataclasses.replace(made, inputs="standard")
    return made
