"""The choice of a recipe for a prepared table: by folds of its rows, or by the older rules of `tuning`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from credibly.tables.array_table import ArrayTable
from credibly.tables.choosing import choose
from credibly.tables.prepared import Prepared
from credibly.tables.recipe import Recipe
from credibly.tables.tuning import RULES, tune

# Rows times parameters up to which HMC with trajectories of at most STEPS steps, its pilots and its folds take about
# two minutes on two cores.
AFFORDABLE = 1_200_000
STEPS = 100
HIDDEN = (50,)
# Rows times parameters times iterations per draw: smaller tables can afford longer chains, up to MOST_THINNED.
THINNED, MOST_THINNED = 1_500_000, 6
# Networks of larger tables.
EMBEDDED: dict[str, Any] = {"hidden": (256, 256), "activation": "relu", "embedding": True}
# Rows from which an ensemble has half as many members.
MANY = 12_000
# Most steps of training, of tables up to MANY rows and of larger ones: what two minutes and five minutes allow.
LONGEST, LONGEST_OF_MANY = 4_500, 12_000
BATCH = 256

Progress = Callable[[int, int], None]


def choose_table(prepared: Prepared, progress: Progress | None = None) -> Prepared:
    """Return the table with the best recipe by the rule in its configuration. What was given explicitly is kept."""
    config = prepared.config
    if config.tune in RULES:
        return _tuned(prepared, config.tune, progress)
    if config.tune == "none" or config.method not in ("auto", "hmc", "ensemble"):
        return prepared
    recipe, why = starting_recipe(prepared)
    free = {
        "hidden": config.hidden is None,
        "embedding": config.embedding is None,
        "prior_scale": config.prior_scale is None,
        "noise": config.noise == "auto",
        "transform": config.transform == "auto",
        "inputs": config.inputs == "auto",
    }
    fixed = [name for name, is_free in free.items() if not is_free]
    best, candidates = choose(recipe, prepared.data, fixed=fixed, seed=config.seed, progress=progress)
    return dataclasses.replace(prepared.with_recipe(best, candidates), why=why)


def starting_recipe(prepared: Prepared | ArrayTable) -> tuple[Recipe, str]:
    """Return the recipe that the search starts from, and why it has its method."""
    config, data = prepared.config, prepared.data
    given = config.recipe(prepared.preparation.task)
    noise = "heteroscedastic" if config.noise == "auto" and given.task == "regression" else given.noise
    hidden = HIDDEN if config.hidden is None else config.hidden
    small = dataclasses.replace(
        given,
        method="hmc",
        hidden=hidden,
        noise=noise,
        prior_scale=2.0 if config.prior_scale is None else config.prior_scale,
    )
    parameters = small.problem(data.x[:2], prepared.preparation.standardise(data.y[:2]), classes=data.classes).dim
    rows = data.rows.count
    thin = max(2, min(MOST_THINNED, THINNED // (rows * parameters)))
    work = f"{rows:,} rows by {parameters:,} parameters"
    # The compiled sampler has these likelihoods; with others a gradient takes many times as long.
    fast = given.task == "classification" or (given.task == "regression" and noise != "student")
    if config.method == "hmc" or (config.method == "auto" and fast and rows * parameters <= AFFORDABLE):
        reason = f"{work} is small enough for HMC, which samples the posterior without approximating it"
        small = dataclasses.replace(small, settings={"max_steps": STEPS, "thin": thin, **given.settings})
        return small, "requested" if config.method == "hmc" else reason
    reason = f"{work} is too large for HMC to finish within about two minutes"
    if not fast:
        reason = f"HMC is slow for {given.task if given.task != 'regression' else 'Student noise'}"
    members, longest = (10, LONGEST) if rows <= MANY else (5, LONGEST_OF_MANY)
    epochs = max(30, min(200, longest * BATCH // rows))
    # A batch cannot have more rows than the smallest fold has left after a tenth of them has gone into validation.
    fewest = min((len(fitted) for fitted, _ in prepared.splits), default=rows)
    batch = min(BATCH, max(1, 4 * fewest // 5))
    settings = {
        "members": members, "epochs": epochs, "batch_size": batch, "lr": 1e-3, "schedule": "constant",
        "validation": 0.1, "patience": 12, "prior": False, "anchored": False, "init": "fresh",
    }  # fmt: skip
    if "steps" in given.settings:
        del settings["epochs"]
    large = dataclasses.replace(given, method="ensemble", noise=noise, settings={**settings, **given.settings})
    if config.hidden is None:
        large = dataclasses.replace(large, **EMBEDDED)
    if not data.numeric or config.embedding is False:
        large = dataclasses.replace(large, embedding=False)
    why = "requested" if config.method == "ensemble" else f"{reason}; a deep ensemble is the best of the fast methods"
    return large, why


def _tuned(prepared: Prepared, rule: str, progress: Progress | None) -> Prepared:
    """Choose the prior scale and the noise and, by evidence, the width, as in `credibly.tables.tuning`."""
    config, data = prepared.config, prepared.data
    recipe, _ = tune(
        prepared.recipe,
        prepared.preparation.scaling(data.x),
        prepared.preparation.standardise(data.y),
        sample_weight=data.weight,
        rule=rule,
        classes=data.classes,
        seed=config.seed,
        scale=config.prior_scale is None,
        noise=config.noise in ("auto", "learned"),
        width=rule == "evidence",
        progress=progress,
    )
    return prepared.with_recipe(recipe)
