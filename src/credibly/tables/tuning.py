"""Choice of the prior scale, the noise model and the width on the training rows.

By validation rows: each candidate is fitted as a small ensemble to 80 % of the rows and scored by the mean log
predictive density of the others, over two such splits, which keep groups together and validate later rows by earlier
ones, as the folds of a table do; if rows have weights, so has that mean. By evidence: each candidate is fitted once to
all rows and scored by its log marginal likelihood (Laplace's, or the ELBO if the recipe's method is Bayes by Backprop).

First the prior scale (and the width) is chosen, then the noise: homoscedastic, unless heteroscedastic noise is better
by more than the standard error of the difference, or has more than three times the evidence.
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

from credibly.core.checks import check_choice
from credibly.core.threads import one_thread
from credibly.errors import TrainingError
from credibly.methods import BayesByBackprop, DeepEnsemble, Laplace
from credibly.problem import Problem
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import Rows, held_out_split
from credibly.tables.weighted_scores import standard_error, weighted_mean

Array = npt.NDArray[Any]
_Rows = tuple[Array, Array, Array | None]

RULES = ("rows", "evidence")
SCALES = (1.0, 2.0, 4.0)
# Multiples of the widths in the recipe.
WIDTHS = (0.5, 1.0, 2.0)
SPLITS = 2
# Fraction of the rows that validate.
VALIDATED = 0.2
# Maximum number of rows used.
ROWS = 5_000
SETTINGS: dict[str, Any] = {"members": 4, "steps": 1500, "compile": False}
BOUND: dict[str, Any] = {"steps": 3000, "compile": False}
POINT: dict[str, Any] = {"steps": 1500, "lr": 2e-2, "compile": False}
# Number of parameters of the largest candidate up to which Laplace uses the full curvature.
FULL_CURVATURE = 2_000


@dataclass(frozen=True)
class Trial:
    """A candidate and its score.

    Attributes:
        noise: noise model.
        prior_scale: prior scale.
        score: mean log predictive density of the validation rows, or log evidence per row.
        error: standard error of the score.
        hidden: widths of the hidden layers.
    """

    noise: str | float
    prior_scale: float
    score: float
    error: float
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class _Score:
    """The score of a candidate and, by validation rows, the values it is the mean of."""

    score: float
    error: float
    values: Array | None = None


def tune(
    recipe: Recipe,
    x: Array,
    y: Array,
    *,
    sample_weight: Array | None = None,
    respected: Rows | None = None,
    rule: str = "rows",
    classes: int | None = None,
    seed: int = 0,
    scale: bool = True,
    noise: bool = True,
    width: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Recipe, tuple[Trial, ...]]:
    """Return the recipe with the best prior scale, noise and width, and the candidates tried.

    Args:
        recipe: determines everything else: the task, the depth of the network, the method.
        x, y: training rows, as `Recipe.problem` takes them.
        sample_weight: weights of the rows, (N,); None for ones.
        respected: groups and times that the splits have to respect; None for random splits.
        rule: "rows" for validation rows, or "evidence".
        classes: number of classes; None for regression.
        seed: seed of the splits and of the fits.
        scale, noise, width: which of the three to choose. Widths are half, one and two times those of the recipe.
        progress: called with the number of fits done and in total.
    """
    check_choice("tune", rule, RULES)
    noise = noise and recipe.task == "regression"
    scales = SCALES if scale else (recipe.scale,)
    widths = tuple(_scaled(recipe.hidden, w) for w in WIDTHS) if width and recipe.hidden else (recipe.hidden,)
    rng = np.random.default_rng([seed, 0x7E5])
    some = rng.permutation(len(x))[:ROWS]
    splits = _splits(Rows(len(x)) if respected is None else respected, some, rng)
    rows = (x, y, sample_weight)
    validated = None if sample_weight is None else sample_weight[np.concatenate([held for _, held in splits])]
    trials: list[Trial] = []

    def score_of(candidate: Recipe) -> _Score:
        if rule == "rows":
            values = np.concatenate([_validate(candidate, rows, *split, classes, seed) for split in splits])
            found = _Score(weighted_mean(values, validated), standard_error(values, validated), values)
        else:
            found = _evidence(candidate, _select(rows, some), classes, seed, structure)
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
    # One structure for all candidates: evidence under different structures is not comparable.
    structure = "full" if largest.problem(x[:2], y[:2], classes=classes, seed=seed).dim <= FULL_CURVATURE else "kron"
    scores = [score_of(candidate) for candidate in grid]
    best = max(range(len(grid)), key=lambda i: scores[i].score)
    chosen = grid[best]
    if noise:
        other = dataclasses.replace(chosen, noise="heteroscedastic")
        weight = float(len(some)) if sample_weight is None else float(sample_weight[some].sum())
        if _clearly_better(score_of(other), scores[best], weight, validated):
            chosen = other
    return chosen, tuple(trials)


def _clearly_better(new: _Score, old: _Score, rows: float, weight: Array | None) -> bool:
    """Return whether the richer noise model is clearly better."""
    if new.values is not None and old.values is not None:
        gain = new.values - old.values
        return weighted_mean(gain, weight) > standard_error(gain, weight)
    return (new.score - old.score) * rows > max(math.log(3), 2 * rows * math.hypot(new.error, old.error))


def _splits(rows: Rows, some: Array, rng: np.random.Generator) -> list[tuple[Array, Array]]:
    """Return (training, validation) rows of each split of some of the rows; times determine a single one."""
    part = dataclasses.replace(rows.at(some), strata=None)
    fraction = max(VALIDATED, 1 / part.count)
    count = SPLITS if rows.times is None else 1
    parts = [held_out_split(part, fraction, int(rng.integers(2**31))) for _ in range(count)]
    return [(some[fitted], some[held]) for fitted, held in parts]


def _select(rows: _Rows, some: Array) -> _Rows:
    x, y, weight = rows
    return x[some], y[some], None if weight is None else weight[some]


def _problem(recipe: Recipe, rows: _Rows, classes: int | None, seed: int) -> Problem:
    x, y, weight = rows
    return recipe.problem(x, y, sample_weight=weight, classes=classes, seed=seed)


def _validate(recipe: Recipe, rows: _Rows, train: Array, validation: Array, classes: int | None, seed: int) -> Array:
    """Return log predictive densities of the validation rows by a fit to the training rows."""
    problem = _problem(recipe, _select(rows, train), classes, seed)
    try:
        with one_thread():
            fitted = DeepEnsemble(**SETTINGS).fit(problem, seed=seed, progress=False)
    except TrainingError:
        return np.full(len(validation), -np.inf)
    x, y, _ = _select(rows, validation)
    inputs = torch.from_numpy(np.ascontiguousarray(x, np.float32))
    targets = torch.from_numpy(np.ascontiguousarray(y))
    values: Array = fitted.predict(inputs).log_prob(targets).double().numpy()
    return values


def _evidence(recipe: Recipe, rows: _Rows, classes: int | None, seed: int, structure: str) -> _Score:
    """Return the log evidence per row of a fit to all rows, per unit of their weight if they have weights."""
    problem = _problem(recipe, rows, classes, seed)
    total = problem.total_weight
    try:
        with one_thread():
            if recipe.method == "bbb":
                bound = BayesByBackprop(**BOUND).fit(problem, seed=seed, progress=False).elbo(problem, seed=seed)
                return _Score(float(bound.value) / total, float(bound.standard_error) / total)
            fitted = Laplace(structure=structure, **POINT).fit(problem, seed=seed, progress=False)
            return _Score(fitted.log_evidence / total, 0.0)
    except TrainingError:
        return _Score(-math.inf, math.inf)


def _scaled(hidden: tuple[int, ...], factor: float) -> tuple[int, ...]:
    return tuple(max(1, round(w * factor)) for w in hidden)
