"""Choice of the network, the prior, the noise and the encodings for a table, by folds of its own rows.

Candidates are fitted to some of the rows and scored by the mean log predictive density of the others, in the units of
the target, so that transforms of the target compare. Small tables are fitted by short runs of HMC, larger ones by small
ensembles of networks with periodic embeddings, or without them if the target is smooth. The search starts from a
default and changes one thing at a time; a change is kept if the density rises by more than a quarter of the standard
error of the difference. These means are weighted if the rows are. A candidate that is clearly worse on the folds so far
is not fitted to the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.threads import torch_threads
from credibly.errors import InputError, TrainingError
from credibly.posterior.base import Posterior
from credibly.predictive.base import Predictive
from credibly.tables.choices.batches import with_smaller_batch
from credibly.tables.choices.smooth_candidate import PILOT, is_smooth, smooth_changes
from credibly.tables.columns.scaling import InputScaling
from credibly.tables.fit_summary import Candidate
from credibly.tables.missing.training_gaps import TrainingGaps
from credibly.tables.recipe import Recipe
from credibly.tables.splitting import Rows, folds_of
from credibly.tables.targets.scale import TargetScale, candidate_transforms
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
# Rows from which tables have one held-out part instead of folds, and longer training.
MANY = 10_000
SCALES = (0.5, 1.0, 2.0, 4.0)
# Inputs that an encoding may add to a table for HMC, and to others.
SMALL_ADDED, LARGE_ADDED = 50, 200
# Patience that disables early stopping.
UNSTOPPED = 10_000
# Gain, in standard errors of the difference, from which a change is kept, and from which one is that slows HMC down (a
# smaller noise floor, a wider prior, or many more inputs).
CLEAR, CLEAR_SLOW = 0.25, 2.0
# Loss on the folds so far, in standard errors of the difference, from which a candidate is not fitted to the others.
HOPELESS = 2.0
# Noise floors to try after the first.
FLOORS = (0.03, 0.01)


@dataclass(frozen=True, eq=False)
class Rowset:
    """The rows that a choice is made on.

    Attributes:
        x: standardised inputs, (N, P).
        y: targets in their own units, (N,) or (N, K), or class indices.
        numeric: indices of the numeric columns of x.
        rows: what splits have to respect.
        weight: weights of the rows; None for ones.
        classes: number of classes; None if there are none.
        gaps: missing cells of x, which holds means over completions there; None if there are none.
    """

    x: Array
    y: Array
    numeric: tuple[int, ...]
    rows: Rows
    weight: Array | None = None
    classes: int | None = None
    gaps: TrainingGaps | None = None

    def at(self, rows: Array) -> Rowset:
        """Return some of the rows."""
        weight = None if self.weight is None else self.weight[rows]
        gaps = None if self.gaps is None else self.gaps.at(rows)
        return Rowset(self.x[rows], self.y[rows], self.numeric, self.rows.at(rows), weight, self.classes, gaps)


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
    used = next((folds for rows, folds in USED if part.rows.count <= rows), 1)
    splits = weighted_splits(folds_of(part.rows, seed, FOLDS), part.weight)[:used]
    weight = None if part.weight is None else part.weight[np.concatenate([predicted for _, predicted in splits])]
    tried: dict[Recipe, Array] = {}
    scores: dict[Recipe, Candidate] = {}
    most = _most(recipe, data, fixed)

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
                if rival is not None and _clearly_worse(values, known[: len(values)], _first(weight, len(values))):
                    break
            tried[candidate] = values
            n, own = len(values), _first(weight, len(values))
            value, error = weighted_mean(values, own), standard_error(values, own)
            if n < len(known) and np.isfinite(known).all():
                # On fewer rows: the score of the rival, and the difference on those rows.
                value += weighted_mean(known, weight) - weighted_mean(known[:n], own)
            scores[candidate] = Candidate(name, value, error)
            if progress is not None:
                progress(len(tried), most)
        return tried[candidate]

    best = recipe
    score(best, _describe(recipe))
    for change in _changes(recipe, data, fixed):
        for name, candidate in change(best):
            densities, margin = score(candidate, name, best), _margin(candidate, best, data.rows.count)
            if _clearly_better(densities, tried[best], weight, _bar(candidate, best), margin):
                best = candidate
    found = tuple(dataclasses.replace(one, chosen=tried_one == best) for tried_one, one in scores.items())
    return best, found


Change = Callable[[Recipe], Iterator[tuple[str, Recipe]]]


def _changes(recipe: Recipe, data: Rowset, fixed: Sequence[str]) -> list[Change]:
    """Return the changes to try in turn, each a function from the best recipe so far to its variants."""
    found: list[Change] = []

    def free(*names: str) -> bool:
        return not set(names) & set(fixed)

    real = recipe.task == "regression"
    small = recipe.method == "hmc"
    # First, since short fits of small networks take less time than those of wide ones, also to further candidates.
    if not small and real and free("embedding", "hidden", "settings"):
        width = data.x.shape[1]
        if not free("inputs"):
            width = InputScaling.fit(recipe.inputs, data.x, data.numeric).outputs(width)
        found += smooth_changes(data.rows.count, width, prior_scale=free("prior_scale"), encoding=free("inputs"))
    noises: list[Change] = []
    if real and small and free("noise") and recipe.noise_floor:
        noises.append(_floors)
    if real and free("noise"):
        other = "learned" if recipe.noise == "heteroscedastic" else "heteroscedastic"
        noises.append(lambda best: iter([(f"noise {other}", dataclasses.replace(best, noise=other))]))
    if real and not small and free("noise"):
        noises.append(_unless_smooth(_heavy_tails))
    if recipe.task == "counts" and free("noise"):
        noises.append(lambda best: iter([("noise poisson", dataclasses.replace(best, noise="poisson"))]))
    transforms: list[Change] = []
    if real and free("transform"):
        kinds = [kind for kind in candidate_transforms(data.y) if kind != recipe.transform]
        transforms.append(lambda best: ((f"target {k}", dataclasses.replace(best, transform=k)) for k in kinds))
    # A skewed target would need a wide prior and a low floor, which slow HMC down, so that its transform comes first.
    found += transforms + noises if small else noises + transforms
    if small and free("prior_scale"):
        found += [_scales, _scales]
    if free("inputs") and data.numeric:
        encodings = [k for k in ("quantile", "categories") if _useful(k, data, SMALL_ADDED if small else LARGE_ADDED)]
        found.append(
            _unless_smooth(lambda best: ((f"inputs {k}", dataclasses.replace(best, inputs=k)) for k in encodings))
        )
    if not small and data.rows.count > MANY and recipe.settings.get("schedule") == "constant":
        found.append(_unless_smooth(lambda best: iter([("falling learning rate", _decayed(best))])))
    if not small and free("embedding", "hidden") and data.numeric:
        plain: dict[str, Any] = {"embedding": False, "activation": "silu"}
        found.append(_unless_smooth(lambda best: iter([("no embedding", dataclasses.replace(best, **plain))])))
    return found


def _unless_smooth(change: Change) -> Change:
    """Return a change of wide networks, which small smooth ones do not have."""
    return lambda best: iter(()) if is_smooth(best) else change(best)


def _useful(kind: str, data: Rowset, most: int) -> bool:
    """Return whether an encoding changes anything, with at most `most` further inputs."""
    scaling = InputScaling.fit(kind, data.x, data.numeric)
    width = data.x.shape[1]
    return bool(scaling.columns) and scaling.outputs(width) <= width + most


def _scales(best: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield the next smaller and the next larger prior scale."""
    for scale in (best.scale / 2, best.scale * 2):
        if SCALES[0] <= scale <= SCALES[-1]:
            yield f"prior scale {scale:g}", dataclasses.replace(best, prior_scale=scale)


def _floors(best: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield smaller noise floors."""
    if best.noise == "heteroscedastic":
        yield from ((f"noise floor {floor:g}", dataclasses.replace(best, noise_floor=floor)) for floor in FLOORS)


def _heavy_tails(best: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield heteroscedastic noise with heavy tails."""
    if best.noise == "heteroscedastic":
        yield "noise heteroscedastic-student", dataclasses.replace(best, noise="heteroscedastic-student")


def _decayed(best: Recipe) -> Recipe:
    """Return a recipe whose learning rate falls to zero over all epochs; nothing stops training before that."""
    settings = {**best.settings, "schedule": "cosine", "patience": UNSTOPPED}
    return dataclasses.replace(best, settings=settings)


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
    smaller = is_smooth(new) and not is_smooth(old)
    return max(0.0, float(np.log(rows / ROWS)) / 2) if smaller else 0.0


def _most(recipe: Recipe, data: Rowset, fixed: Sequence[str]) -> int:
    """Return the most candidates there can be."""
    return 1 + sum(len(list(change(recipe))) for change in _changes(recipe, data, fixed))


def _describe(recipe: Recipe) -> str:
    kind = "HMC" if recipe.method == "hmc" else "ensemble"
    widths = " and ".join(str(w) for w in recipe.hidden) or "no"
    embedded = ", periodic embeddings" if recipe.embedding else ""
    return f"{kind}, {widths} units{embedded}, prior scale {recipe.scale:g}, noise {recipe.noise}"


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
