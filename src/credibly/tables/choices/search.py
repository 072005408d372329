"""Choice of the network, the prior, the noise and the encodings for a table, by folds of its own rows.

Candidates are fitted to some of the rows and scored by the mean log predictive density of the others, in the units of
the target, so that transforms of the target compare. Small tables are fitted by short runs of HMC, larger ones by small
ensembles of networks with periodic embeddings, or without them if the target is smooth. Tasks for which HMC is slow
also have a linear model and a small network that are sampled. With times, later rows are predicted from earlier ones,
several times over, also by a linear model, which continues a trend. The search starts from a default and changes one
thing at a time; a change is kept if the density rises by more than a quarter of the standard error of the difference.
These means are weighted if the rows are. A candidate that is clearly worse on the folds so far is not fitted to the
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.threads import torch_threads
from credibly.errors import InputError, TrainingError
from credibly.posterior.base import Posterior
from credibly.predictive.base import Predictive
from credibly.tables.choices.batches import with_smaller_batch
from credibly.tables.choices.chain_candidates import has_few_parameters
from credibly.tables.choices.changes import UNSTOPPED, changes_of
from credibly.tables.choices.rowset import Rowset
from credibly.tables.choices.smooth_candidate import PILOT, is_smooth
from credibly.tables.columns.scaling import InputScaling
from credibly.tables.fit_summary import Candidate
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import choice_folds
from credibly.tables.targets.scale import TargetScale
from credibly.tables.threads import threads_for
from credibly.tables.weighted_scores import standard_error, weighted_mean, weighted_splits

Array = npt.NDArray[Any]

# Maximum number of rows used.
ROWS = 4_000
# Number of folds, of which those up to the given number of rows are used.
FOLDS = 4
USED = ((600, 4), (1_200, 2))
HMC_PILOT: dict[str, Any] = {
    "chains": 4, "warmup": 100, "draws": 40, "thin": 1, "max_steps": 48, "until": None, "budget": None,
}  # fmt: skip
ENSEMBLE_PILOT: dict[str, Any] = {"members": 3, "epochs": 40, "patience": 6}
# Gain, in standard errors of the difference, from which a change is kept, and from which one is that slows HMC down (a
# smaller noise floor, a wider prior, or many more inputs).
CLEAR, CLEAR_SLOW = 0.25, 2.0
# With times: the gain, in standard errors over the folds, since rows of one fold share the error of its extrapolation;
# and the least number of folds.
CLEAR_LATER, LEAST_LATER = 1.0, 2
# Loss on the folds so far, in standard errors of the difference, from which a candidate is not fitted to the others.
HOPELESS = 2.0


def choose(
    recipe: Recipe,
    data: Rowset,
    *,
    fixed: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Recipe, tuple[Candidate, ...]]:
    """Return the recipe with the best choices, and the candidates tried.

    Args:
        recipe: the default, from which the search starts, with a method that is "hmc" or "ensemble".
        data: the rows.
        fixed: fields of the recipe that must not change; "settings" if some of them were given.
        seed: seed of the folds and of the fits.
        progress: called with the number of candidates done and the most there can be.
    """
    rng = np.random.default_rng([seed, 0xC400])
    some = np.sort(rng.permutation(data.rows.count)[:ROWS])
    part = data.at(some) if len(some) < data.rows.count else data
    later = part.rows.times is not None
    used = next((folds for rows, folds in USED if part.rows.count <= rows), LEAST_LATER if later else 1)
    splits = weighted_splits(choice_folds(part.rows, seed, FOLDS), part.weight)[:used]
    weight = None if part.weight is None else part.weight[np.concatenate([predicted for _, predicted in splits])]
    tried: dict[Recipe, Array] = {}
    scores: dict[Recipe, Candidate] = {}
    changes = changes_of(recipe, data, fixed)
    most = 1 + sum(len(list(change(recipe))) for change in changes)

    def score(candidate: Recipe, name: str, rival: Recipe | None = None) -> Array:
        """Return the densities of all folds; of fewer if the candidate is clearly worse than its rival on them."""
        if candidate not in tried:
            values, known = np.empty(0), np.empty(0) if rival is None else tried[rival]
            for split in splits:
                try:
                    found = _densities(candidate, part, *split, seed)
                except InputError:
                    # Such as a transform of the target that these rows do not allow.
                    if rival is None:
                        raise
                    found = np.full(len(split[1]), -np.inf)
                values = np.concatenate([values, found])
                if (
                    rival is not None
                    and not later
                    and _clearly_worse(values, known[: len(values)], _first(weight, len(values)))
                ):
                    break
            tried[candidate] = values
            n, own = len(values), _first(weight, len(values))
            value, error = weighted_mean(values, own), standard_error(values, own)
            if n < len(known) and np.isfinite(known).all():
                # On fewer rows: the score of the rival, and the difference on those rows.
                value += weighted_mean(known, weight) - weighted_mean(known[:n], own)
            scores[candidate] = Candidate(name, value, error)
            if progress is not None:
                progress(len(tried), max(most, len(tried)))
        return tried[candidate]

    best = recipe
    score(best, _describe(recipe))
    for change in changes:
        for name, candidate in change(best):
            densities, margin = score(candidate, name, best), _margin(candidate, best, data.rows.count)
            bar = _bar(candidate, best)
            if later:
                sizes = [len(predicted) for _, predicted in splits]
                # Of two that extrapolate as well the one with few parameters.
                bar = 0.0 if _is_small(candidate) and not _is_small(best) else max(bar, CLEAR_LATER)
                better = _better_by_folds(densities, tried[best], weight, sizes, bar, margin)
            else:
                better = _clearly_better(densities, tried[best], weight, bar, margin)
            if better:
                best = candidate
    found = tuple(dataclasses.replace(one, chosen=tried_one == best) for tried_one, one in scores.items())
    return best, found


def _bar(new: Recipe, old: Recipe) -> float:
    """Return the gain, in standard errors, that the new recipe needs."""
    wider = new.noise_floor < old.noise_floor or new.scale > old.scale
    slow = new.method == "hmc" and (wider or new.inputs == "categories")
    return CLEAR_SLOW if slow else CLEAR


def _margin(new: Recipe, old: Recipe, rows: int) -> float:
    """Return the gain in nats that the new recipe needs beyond its standard error, on a table with `rows` rows.

    Short fits leave out all but `ROWS` rows, from which wide networks learn more than small ones. Their error falls at
    most by the square root of the number of rows, so they may gain half its logarithm.
    """
    smaller = _is_small(new) and not _is_small(old)
    return max(0.0, float(np.log(rows / ROWS)) / 2) if smaller else 0.0


def _is_small(recipe: Recipe) -> bool:
    return is_smooth(recipe) or has_few_parameters(recipe)


def _describe(recipe: Recipe) -> str:
    kind = "HMC" if recipe.method == "hmc" else "ensemble"
    widths = " and ".join(str(w) for w in recipe.hidden)
    network = f"{widths} units" if widths else "linear model"
    embedded = ", periodic embeddings" if recipe.embedding else ""
    return f"{kind}, {network}{embedded}, prior scale {recipe.scale:g}, noise {recipe.noise}"


def _densities(recipe: Recipe, data: Rowset, fitted: Array, predicted: Array, seed: int) -> Array:
    """Return log predictive densities of the predicted rows, in the units of the target, by a short fit to others."""
    pilot = _pilot(recipe, data.rows.count)
    given = {name: value for name, value in recipe.settings.items() if name != "steps"}
    short = dataclasses.replace(recipe, settings=given | pilot)
    own, others = data.at(fitted), data.at(predicted)
    try:
        posterior, restore, encode = fit_rows(short, own, seed)
    except TrainingError:
        return np.full(len(predicted), -np.inf)
    inputs = torch.from_numpy(np.ascontiguousarray(encode(others.x), np.float32))
    values: Array = restore(posterior.predict(inputs)).log_prob(torch.from_numpy(others.y)).double().numpy()
    return np.where(np.isnan(values), -np.inf, values)


def _pilot(recipe: Recipe, rows: int) -> dict[str, Any]:
    """Return the settings of a short fit. A learning rate that falls must fall to the end, so nothing stops it."""
    if recipe.method == "hmc":
        return HMC_PILOT
    if is_smooth(recipe):
        return PILOT
    if recipe.settings.get("schedule") != "cosine":
        return ENSEMBLE_PILOT
    epochs = ENSEMBLE_PILOT["epochs"]
    if rows < ROWS:
        epochs = max(epochs, recipe.settings.get("epochs", epochs) // 2)
    return {**ENSEMBLE_PILOT, "epochs": epochs, "patience": UNSTOPPED}


def fit_rows(
    recipe: Recipe, data: Rowset, seed: int
) -> tuple[Posterior, Callable[[Predictive], Predictive], InputScaling]:
    """Fit a recipe. Return the posterior, the way back to the units of the target, and the encoding of inputs."""
    encode = InputScaling.fit(recipe.inputs, data.x, data.numeric)
    y, restore = data.y, _unchanged
    if recipe.task == "regression":
        scale = TargetScale.fit(data.y, recipe.transform, ("y",) * (1 if data.y.ndim == 1 else data.y.shape[1]))
        y, restore = scale.standardise(data.y), scale.restore
    problem = recipe.problem(
        encode(data.x), y, sample_weight=data.weight, classes=data.classes, seed=seed, numeric=data.numeric
    )
    method = with_smaller_batch(recipe.fitter(problem.n, problem.layout.dim), problem.n)
    with torch_threads(threads_for(problem, method)):
        return method.fit(problem, seed=seed, progress=False), restore, encode


def _unchanged(predictive: Predictive) -> Predictive:
    return predictive


def _first(weight: Array | None, rows: int) -> Array | None:
    return None if weight is None else weight[:rows]


def _clearly_worse(new: Array, old: Array, weight: Array | None) -> bool:
    """Return whether the new densities, of the same rows, are so much lower that further rows would not change that."""
    if not np.isfinite(new).all():
        return True
    gain = new - old
    return bool(np.isfinite(old).all()) and weighted_mean(gain, weight) < -HOPELESS * standard_error(gain, weight)


def _clearly_better(new: Array, old: Array, weight: Array | None, bar: float = CLEAR, margin: float = 0.0) -> bool:
    # A candidate that was abandoned early has fewer rows.
    if len(new) < len(old) or not np.isfinite(new).all():
        return False
    if not np.isfinite(old).all():
        return True
    gain = new - old
    return weighted_mean(gain, weight) > margin + bar * standard_error(gain, weight)


def _better_by_folds(
    new: Array, old: Array, weight: Array | None, sizes: Sequence[int], bar: float, margin: float
) -> bool:
    """Return whether the new densities are better by more than chance, with the means of folds as the observations."""
    if not np.isfinite(new).all() or not np.isfinite(old).all() or len(sizes) < 2:
        return _clearly_better(new, old, weight, bar, margin)
    ends = np.cumsum(sizes)[:-1]
    weights = np.split(np.ones(len(new)) if weight is None else weight, ends)
    means = np.array([weighted_mean(gain, own) for gain, own in zip(np.split(new - old, ends), weights)])
    return weighted_mean(new - old, weight) > margin + bar * standard_error(means)
