"""The choice of the recipe of an estimator by folds of its training rows, as in `credibly fit`."""

from __future__ import annotations

from typing import Any

from credibly.core.checks import check_choice
from credibly.errors import InputError
from credibly.tables.choices.array_table import ArrayTable, ArrayTargets
from credibly.tables.choices.rowset import Rowset
from credibly.tables.choices.search import choose
from credibly.tables.choices.table_choice import starting_recipe
from credibly.tables.config import Config
from credibly.tables.fit_summary import Candidate
from credibly.tables.recipe import Recipe
from credibly.tables.tuning import RULES

METHODS = ("auto", "hmc", "ensemble")
# Number of rows below which folds are too small to choose by.
FEW = 50


def tuning_rule(tune: str | None, recipe: Recipe) -> str | None:
    """Return the rule that "auto" stands for, or the one given. Raise on an unknown one."""
    if tune is None:
        return None
    check_choice("tune", tune, ("auto", "folds", *RULES), "None fits the parameters as they are")
    if tune != "auto":
        return tune
    return "folds" if recipe.method == "auto" and not recipe.settings else None


def choose_recipe(
    recipe: Recipe, data: Rowset, estimator: type[Any], seed: int
) -> tuple[Recipe, tuple[Candidate, ...], str]:
    """Return the recipe with the best choices, the candidates tried, and why it has its method.

    Chosen are the prior scale, transforms of inputs and targets, the noise if it is "learned", and for tables too large
    for HMC the network. Parameters of the estimator that differ from their defaults are kept.

    Args:
        recipe: from the parameters of the estimator.
        data: its training rows.
        estimator: its class, for the defaults of its parameters.
        seed: of the folds and of the fits.
    """
    if recipe.method not in METHODS:
        found = f'"folds" is for the methods {", ".join(METHODS)}, got {recipe.method!r}'
        raise InputError("tune", found, 'Use tune="rows" or "evidence"')
    if data.rows.count < FEW:
        return recipe, (), ""
    default = estimator()
    open_hidden = recipe.hidden == tuple(default.hidden)
    open_scale = recipe.prior_scale == default.prior_scale
    open_noise = recipe.task == "regression" and recipe.noise == default.noise
    config = Config(
        "X",
        "y",
        task=recipe.task,
        method=recipe.method,
        hidden=None if open_hidden else recipe.hidden,
        activation=recipe.activation,
        prior_scale=None if open_scale else recipe.prior_scale,
        noise="auto" if open_noise else recipe.noise,
        settings=recipe.settings,
        seed=seed,
    )
    table = ArrayTable(config, data, ArrayTargets.of(recipe.task, data.y))
    start, why = starting_recipe(table)
    free = {"hidden": open_hidden, "embedding": open_hidden, "prior_scale": open_scale, "noise": open_noise}
    free["method"] = recipe.method == "auto"
    fixed = [name for name, is_open in (free | {"settings": not recipe.settings}).items() if not is_open]
    best, candidates = choose(start, data, fixed=fixed, seed=seed)
    return best, candidates, why
