"""Tuning of a prepared table on its training rows: prior scale and noise and, by evidence, the width."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from credibly.tables.run import Prepared, fitter_of
from credibly.tables.tuning import Trial, tune


def tune_table(
    prepared: Prepared, rule: str, progress: Callable[[int, int], None] | None = None
) -> tuple[Prepared, tuple[Trial, ...]]:
    """Return the table with the best settings, and the candidates tried. Settings that were given explicitly are kept.

    Args:
        prepared: result of `prepare`.
        rule: "rows" or "evidence", as in `credibly.tables.tuning`.
        progress: called with the number of fits done and in total.
    """
    config, known, problem = prepared.config, prepared.preparation, prepared.problem
    classes = None if known.classes is None else len(known.classes)
    weight = None if problem.sample_weight is None else problem.sample_weight.cpu().numpy()
    x, y = problem.x, problem.y if classes is not None and classes > 2 else problem.likelihood.restore(problem.y)
    assert not isinstance(x, (tuple, dict))
    recipe, trials = tune(
        prepared.recipe,
        x.cpu().numpy(),
        y.cpu().numpy(),
        sample_weight=weight,
        rule=rule,
        classes=classes,
        seed=config.seed,
        scale=config.prior_scale is None,
        noise=config.noise == "learned",
        width=rule == "evidence",
        progress=progress,
    )
    config = dataclasses.replace(config, prior_scale=recipe.scale, noise=recipe.noise, hidden=recipe.hidden)
    problem = recipe.problem(
        x.cpu().numpy(),
        y.cpu().numpy(),
        sample_weight=weight,
        classes=classes,
        seed=config.seed,
        device=config.device,
    )
    size = problem.n, problem.layout.dim
    ready = dataclasses.replace(
        prepared,
        config=config,
        recipe=recipe,
        problem=problem,
        method=fitter_of(recipe, *size),
        why=recipe.resolved(*size)[1],
    )
    return ready, trials
