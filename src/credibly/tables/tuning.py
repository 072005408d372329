"""The prior's scale, the noise model and the width, chosen by the training rows alone.

By rows held back: each candidate is fitted to four fifths of the rows as a small ensemble and judged by the log predictive density
of the others, averaged over two such splits. By evidence: each candidate is fitted once to all rows, and judged by its log evidence
(that of Laplace, or the ELBO where the recipe's method is Bayes by Backprop), which asks how well the prior foretold the rows.

First the prior's scale (and the width) is chosen, then the noise: one scale for all rows, unless a noise that depends on the
inputs is better by more than its standard error, or has an evidence more than three times as high.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.threads import one_thread
from credibly.errors import InputError, TrainingError
from credibly.methods import BayesByBackprop, DeepEnsemble, Laplace
from credibly.tables.recipe import Recipe

Array = npt.NDArray[Any]

RULES = ("rows", "evidence")
SCALES = (1.0, 2.0, 4.0)
WIDTHS = (0.5, 1.0, 2.0)  # times those of the recipe
SPLITS = 2
ROWS = 5_000  # that are looked at, at most
SETTINGS: dict[str, Any] = {"members": 4, "steps": 1500, "compile": False}
BOUND: dict[str, Any] = {"steps": 3000, "compile": False}
POINT: dict[str, Any] = {"steps": 1500, "lr": 2e-2, "compile": False}
WHOLE = 2_000  # parameters up to which Laplace takes the whole curvature, if all candidates have so few


@dataclass(frozen=True)
class Trial:
    """A candidate and how well it did.

    Attributes:
        score: mean log predictive density of a row held back, or log evidence by the number of rows. error: its standard error.
        hidden: widths of its hidden layers.
    """

    noise: str | float
    prior_scale: float
    score: float
    error: float
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _Judged:
    """A candidate's score and, by rows held back, the values it is the mean of."""

    score: float
    error: float
    values: Array | None = None


def tune(
    recipe: Recipe, x: Array, y: Array, *, rule: str = "rows", classes: int | None = None, seed: int = 0, scale: bool = True,
    noise: bool = True, width: bool = False, progress: Callable[[int, int], None] | None = None,
) -> tuple[Recipe, tuple[Trial, ...]]:  # fmt: skip
    """The recipe with the prior's scale, the noise and the width that do best, and what was tried.

    Args:
        recipe: what is kept of it: the task, the network's depth, the method.
        x, y: training rows, as `Recipe.problem` takes them.
        rule: "rows" for rows held back, or "evidence".
        scale, noise, width: which of the three to choose; widths are half, once and twice those of the recipe.
        progress: called with the fits done and those in all.
    """
    if rule not in RULES:
        raise InputError("tune", f"found {rule!r}", f"Pass {' or '.join(RULES)}")
    noise = noise and recipe.task == "regression"
    scales = SCALES if scale else (recipe.scale,)
    widths = tuple(_times(recipe.hidden, w) for w in WIDTHS) if width and recipe.hidden else (recipe.hidden,)
    rng = np.random.default_rng([seed, 0x7E5])
    some = rng.permutation(len(x))[:ROWS]
    splits = [rng.permutation(some) for _ in range(SPLITS)]
    trials: list[Trial] = []

    def judge(candidate: Recipe) -> _Judged:
        if rule == "rows":
            values = np.concatenate([_held_back(candidate, x, y, order, classes, seed) for order in splits])
            found = _Judged(float(values.mean()), _error(values), values)
        else:
            found = _evidence(candidate, x[some], y[some], classes, seed, structure)
        trials.append(Trial(candidate.noise, candidate.scale, found.score, found.error, candidate.hidden))
        if progress is not None:
            progress(len(trials), total)
        return found

    candidates = len(scales) * len(widths)
    total = (candidates if scale or noise or len(widths) > 1 else 0) + int(noise)
    if not total:
        return recipe, ()
    plain = dataclasses.replace(recipe, noise="learned") if noise else recipe
    grid = [dataclasses.replace(plain, prior_scale=s, hidden=w) for w in dict.fromkeys(widths) for s in scales]
    total = len(grid) + int(noise)
    largest = max(grid, key=lambda r: sum(r.hidden))
    if noise:
        largest = dataclasses.replace(largest, noise="heteroscedastic")
    # One structure for all: evidence of different ones cannot be compared.
    structure = "full" if largest.problem(x[:2], y[:2], classes=classes, seed=seed).dim <= WHOLE else "kron"
    judged = [judge(candidate) for candidate in grid]
    best = max(range(len(grid)), key=lambda i: judged[i].score)
    chosen = grid[best]
    if noise:
        other = dataclasses.replace(chosen, noise="heteroscedastic")
        if _clearly(judge(other), judged[best], len(some)):
            chosen = other
    return chosen, tuple(trials)


def _clearly(new: _Judged, old: _Judged, rows: int) -> bool:
    """Whether the richer noise has earned its place."""
    if new.values is not None and old.values is not None:
        gain = new.values - old.values
        return bool(gain.mean() > _error(gain))
    return (new.score - old.score) * rows > max(math.log(3), 2 * rows * math.hypot(new.error, old.error))


def _held_back(recipe: Recipe, x: Array, y: Array, order: Array, classes: int | None, seed: int) -> Array:
    """Log predictive densities of the fifth of the rows that comes last in the order, by a fit to the others."""
    cut = max(1, int(0.8 * len(order)))
    train, others = order[:cut], order[cut:]
    problem = recipe.problem(x[train], y[train], classes=classes, seed=seed)
    try:
        with one_thread():
            fitted = DeepEnsemble(**SETTINGS).fit(problem, seed=seed, progress=False)
    except TrainingError:
        return np.full(len(others), -np.inf)
    inputs = torch.from_numpy(np.ascontiguousarray(x[others], np.float32))
    targets = torch.from_numpy(np.ascontiguousarray(y[others]))
    values: Array = fitted.predict(inputs).log_prob(targets).double().numpy()
    return values


def _evidence(recipe: Recipe, x: Array, y: Array, classes: int | None, seed: int, structure: str) -> _Judged:
    """Log evidence a row of a fit to all rows."""
    problem = recipe.problem(x, y, classes=classes, seed=seed)
    try:
        with one_thread():
            if recipe.method == "bbb":
                bound = BayesByBackprop(**BOUND).fit(problem, seed=seed, progress=False).elbo(problem, seed=seed)
                return _Judged(float(bound.value) / problem.n, float(bound.standard_error) / problem.n)
            fitted = Laplace(structure=structure, **POINT).fit(problem, seed=seed, progress=False)
            return _Judged(fitted.log_evidence / problem.n, 0.0)
    except TrainingError:
        return _Judged(-math.inf, math.inf)


def _times(hidden: tuple[int, ...], factor: float) -> tuple[int, ...]:
    return tuple(max(1, round(w * factor)) for w in hidden)


def _error(values: Array) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")
