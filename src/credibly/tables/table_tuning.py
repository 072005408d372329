"""What a table is fitted with, chosen by its training rows before the fit: prior scale and noise, and by evidence the width too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from credibly.tables.run import Prepared, fitter_of
from credibly.tables.tuning import Trial, tune


def tuned(
    prepared: Prepared, rule: str, progress: Callable[[int, int], None] | None = None
) -> tuple[Prepared, tuple[Trial, ...]]:
    """The same table with the settings that did best, and what was tried. What was asked for by name stays.

    Args:
        prepared: as `prepare` gives it.
        rule: "rows" or "evidence", as in `credibly.tables.tuning`.
        progress: called with the fits done and those in all.
    """
    config, known, problem = prepared.config, prepared.preparation, prepared.problem
    classes = None if known.classes is None else len(known.classes)
    x, y = problem.x, problem.y if classes is not None and classes > 2 else problem.likelihood.restore(problem.y)
    assert not isinstance(x, (tuple, dict))
    recipe, trials = tune(
        prepared.recipe, x.cpu().numpy(), y.cpu().numpy(), rule=rule, classes=classes, seed=config.seed,
        scale=config.prior_scale is None, noise=config.noise == "learned", width=rule == "evidence", progress=progress,
    )  # fmt: skip
    config = dataclasses.replace(config, prior_scale=recipe.scale, noise=recipe.noise, hidden=recipe.hidden)
    again = recipe.problem(x.cpu().numpy(), y.cpu().numpy(), classes=classes, seed=config.seed, device=config.device)
    size = again.n, again.layout.dim
    ready = dataclasses.replace(
        prepared, config=config, recipe=recipe, problem=again, method=fitter_of(recipe, *size), why=recipe.resolved(*size)[1]
    )  # fmt: skip
    return ready, trials
