"""The prior's scale and the noise model, chosen by the training rows alone.

Each candidate is fitted to four fifths of the rows as a small ensemble and judged by the log predictive density of the others,
averaged over two such splits. First the prior's scale is chosen, then the noise: one scale for all rows, unless a noise that
depends on the inputs predicts better by more than its standard error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.errors import TrainingError
from credibly.methods import DeepEnsemble
from credibly.recipe import Recipe

Array = npt.NDArray[Any]

SCALES = (1.0, 2.0, 4.0)
SPLITS = 2
ROWS = 5_000  # that are looked at, at most
SETTINGS: dict[str, Any] = {"members": 4, "steps": 1500, "compile": False}


@dataclass(frozen=True)
class Trial:
    """A candidate and how well it predicts rows that it was not fitted to.

    Attributes:
        score: mean log predictive density of a row. error: its standard error.
    """

    noise: str | float
    prior_scale: float
    score: float
    error: float


def tune(
    recipe: Recipe, x: Array, y: Array, *, classes: int | None = None, seed: int = 0, scale: bool = True, noise: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Recipe, tuple[Trial, ...]]:  # fmt: skip
    """The recipe with the prior's scale and the noise that predict best, and what was tried.

    Args:
        recipe: what is kept of it: the task, the network, the method.
        x, y: training rows, as `Recipe.problem` takes them.
        scale, noise: which of the two to choose.
        progress: called with the fits done and those in all.
    """
    noise = noise and recipe.task == "regression"
    scales = SCALES if scale else (recipe.scale,)
    total = len(scales) * (1 if scale or noise else 0) + int(noise)
    rng = np.random.default_rng([seed, 0x7E5])
    some = rng.permutation(len(x))[:ROWS]
    splits = [rng.permutation(some) for _ in range(SPLITS)]
    trials: list[Trial] = []
    found: dict[int, Array] = {}

    def score(candidate: Recipe) -> Array:
        values = np.concatenate([_held_back(candidate, x, y, order, classes, seed) for order in splits])
        trials.append(Trial(candidate.noise, candidate.scale, float(values.mean()), _error(values)))
        if progress is not None:
            progress(len(trials), total)
        return values

    if not total:
        return recipe, ()
    plain = dataclasses.replace(recipe, noise="learned") if noise else recipe
    candidates = [dataclasses.replace(plain, prior_scale=s) for s in scales]
    for i, candidate in enumerate(candidates):
        found[i] = score(candidate)
    best = max(range(len(candidates)), key=lambda i: found[i].mean())
    chosen = candidates[best]
    if noise:
        other = dataclasses.replace(chosen, noise="heteroscedastic")
        gain = score(other) - found[best]
        if gain.mean() > _error(gain):
            chosen = other
    return chosen, tuple(trials)


def _held_back(recipe: Recipe, x: Array, y: Array, order: Array, classes: int | None, seed: int) -> Array:
    """Log predictive densities of the fifth of the rows that comes last in the order, by a fit to the others."""
    cut = max(1, int(0.8 * len(order)))
    train, others = order[:cut], order[cut:]
    problem = recipe.problem(x[train], y[train], classes=classes, seed=seed)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fitted = DeepEnsemble(**SETTINGS).fit(problem, seed=seed, progress=False)
    except TrainingError:
        return np.full(len(others), -np.inf)
    finally:
        torch.set_num_threads(before)
    inputs = torch.from_numpy(np.ascontiguousarray(x[others], np.float32))
    targets = torch.from_numpy(np.ascontiguousarray(y[others]))
    values: Array = fitted.predict(inputs).log_prob(targets).double().numpy()
    return values


def _error(values: Array) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")
