"""The choice of a recipe for a prepared table: by folds of its rows, or by the older rules of `tuning`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from credibly.tables.choices.array_table import ArrayTable
from credibly.tables.choices.chain_candidates import CHAINS, is_affordable
from credibly.tables.choices.chain_plan import LENGTHS, ChainPlan, plan_chains
from credibly.tables.choices.changes import MANY, UNSTOPPED
from credibly.tables.choices.fallback import FoldFits, compare
from credibly.tables.choices.search import choose
from credibly.tables.fit_summary import Candidate
from credibly.tables.prepared import Prepared
from credibly.tables.recipe import Recipe
from credibly.tables.tuning import RULES, tune

HIDDEN = (50,)
# Smallest standard deviation of the noise, in standard deviations of the target, that the search starts from. Without
# one, the variance at repeated rows has no bound, and neither has the curvature that step sizes follow.
FLOOR = 0.1
# Networks of larger tables.
EMBEDDED: dict[str, Any] = {"hidden": (256, 256), "activation": "relu", "embedding": True}
# Most steps of training, of tables up to MANY rows and of larger ones, which have half as many members: what two
# minutes and five minutes allow.
LONGEST, LONGEST_OF_MANY = 4_500, 12_000
BATCH = 256
# Training of an ensemble in place of chains that would not mix: a falling learning rate and small batches.
SMALL_BATCH, SMALL_STEPS, SMALL_EPOCHS = 64, 1_500, (40, 200)

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
        "settings": not config.settings,
        "method": config.method == "auto",
    }
    fixed = [name for name, is_free in free.items() if not is_free]
    best, candidates = choose(recipe, prepared.data, fixed=fixed, seed=config.seed, progress=progress)
    if best.method != recipe.method:
        kind = "network" if best.hidden else "linear model"
        why = f"a small {kind} sampled by HMC predicts rows that it has not seen better than a deep ensemble does"
    found = dataclasses.replace(prepared.with_recipe(best, candidates), why=why)
    if best.method != "hmc" or set(config.settings) & set(LENGTHS):
        return found
    plan = plan_chains(found)
    settings = {**best.settings, **plan.settings, **config.settings}
    if "until" in config.settings and "budget" not in config.settings:
        # Explicitly without a limit.
        settings.pop("budget", None)
    found = found.with_recipe(dataclasses.replace(best, settings=settings), candidates)
    if plan.attainable or config.method == "hmc" or config.settings:
        return dataclasses.replace(found, why=why)
    return _chains_or_ensemble(prepared, found, plan, fixed, progress)


def _chains_or_ensemble(
    prepared: Prepared, chains: Prepared, plan: ChainPlan, fixed: list[str], progress: Progress | None
) -> Prepared:
    """Return chains that would not mix in time, or an ensemble that predicts as well as they do."""
    start = small_ensemble(prepared, chains.recipe)
    ours, others = FoldFits(chains), tuple[Candidate, ...]()
    ensemble = prepared.with_recipe(start)
    # One fold first: most of the time goes into the choice of an ensemble, which is not worth it if none is needed.
    result = compare(ours, FoldFits(ensemble), folds=1)
    if not result.hopeless:
        other, others = choose(
            start, prepared.data, fixed=[*fixed, "method"], seed=prepared.config.seed, progress=progress
        )
        ensemble = prepared.with_recipe(other)
        result = compare(ours, FoldFits(ensemble))
    why = (
        f"HMC would not mix in time: a trial run gave {plan.effective:,.0f} effective draws, and enough of them would"
        f" take {plan.times:,.1f} times the time budget"
    )
    density = f"{result.difference:+.3f} ± {result.error:.3f} in log density per row that neither has seen"
    candidates: tuple[Candidate, ...]
    if result.replaces:
        chosen, why = ensemble, f"{why}; a deep ensemble is the best of the fast methods ({density})"
        candidates = (*_not_chosen(chains.candidates), *others)
    else:
        chosen = dataclasses.replace(chains, fold_fits=ours.for_final_fit())
        why = f"{why}; it is kept because a deep ensemble would predict worse ({density})"
        candidates = (*chains.candidates, *_not_chosen(others))
    return dataclasses.replace(chosen, candidates=candidates, why=why)


def _not_chosen(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    return tuple(dataclasses.replace(one, chosen=False) for one in candidates)


def small_ensemble(prepared: Prepared, chosen: Recipe) -> Recipe:
    """Return the ensemble that a table has in place of chains that would not mix, with the choices made for those."""
    config, rows = prepared.config, prepared.data.rows.count
    fewest = min((len(fitted) for fitted, _ in prepared.splits), default=rows)
    batch = min(SMALL_BATCH, max(1, 4 * fewest // 5))
    epochs = max(SMALL_EPOCHS[0], min(SMALL_EPOCHS[1], SMALL_STEPS * batch // rows))
    settings = {
        "members": 10, "epochs": epochs, "batch_size": batch, "lr": 2e-3, "schedule": "cosine", "validation": 0.1,
        "patience": UNSTOPPED, "prior": False, "anchored": False, "init": "fresh",
    }  # fmt: skip
    made = dataclasses.replace(chosen, method="ensemble", noise_floor=0.0, settings=settings)
    if config.hidden is None:
        made = dataclasses.replace(made, **EMBEDDED)
    embedded = made.embedding and bool(prepared.data.numeric) and config.embedding is not False
    return dataclasses.replace(made, embedding=embedded)


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
        noise_floor=FLOOR if config.noise == "auto" and noise == "heteroscedastic" else given.noise_floor,
        prior_scale=2.0 if config.prior_scale is None else config.prior_scale,
    )
    parameters = small.problem(data.x[:2], prepared.preparation.standardise(data.y[:2]), classes=data.classes).dim
    rows = data.rows.count
    work = f"{rows:,} rows by {parameters:,} parameters"
    fast = small.compiled
    if config.method == "hmc" or (config.method == "auto" and fast and is_affordable(small, rows, parameters)):
        reason = f"{work} is small enough for HMC, which samples the posterior without approximating it"
        small = dataclasses.replace(small, settings={**CHAINS, **given.settings})
        return small, "requested" if config.method == "hmc" else reason
    reason = f"{work} is too large for HMC to finish within about two minutes"
    if not fast:
        reason = f"HMC is slow for {given.task if given.task != 'regression' else 'Student noise'}"
    members, longest = (10, LONGEST) if rows <= MANY else (5, LONGEST_OF_MANY)
    epochs = max(30, min(200, longest * BATCH // rows))
    # A batch cannot have more rows than the smallest fold has left after a tenth of them has gone into validation. The
    # search fits to fewer rows still, with smaller batches.
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
        respected=data.rows,
        rule=rule,
        classes=data.classes,
        seed=config.seed,
        scale=config.prior_scale is None,
        noise=config.noise == "auto",
        width=rule == "evidence",
        progress=progress,
    )
    return prepared.with_recipe(recipe)
