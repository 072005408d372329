"""The changes of a recipe that the search tries in turn, each a function from the best recipe so far to variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from credibly.tables.choices.chain_candidates import few_parameters
from credibly.tables.choices.rowset import Rowset
from credibly.tables.choices.smooth_candidate import is_smooth, smooth_changes
from credibly.tables.columns.scaling import InputScaling
from credibly.tables.recipe import PREDICTED, Recipe
from credibly.tables.targets.scale import candidate_transforms

Change = Callable[[Recipe], Iterable[tuple[str, Recipe]]]

# Rows from which tables have one held-out part instead of folds, and longer training.
MANY = 10_000
SCALES = (0.5, 1.0, 2.0, 4.0)
# Inputs that an encoding may add to a table for HMC, and to others.
SMALL_ADDED, LARGE_ADDED = 50, 200
# Patience that disables early stopping.
UNSTOPPED = 10_000
# Noise floors to try after the first.
FLOORS = (0.03, 0.01)


def changes_of(recipe: Recipe, data: Rowset, fixed: Sequence[str]) -> list[Change]:
    """Return the changes to try in turn.

    Args:
        recipe: the default, from which the search starts.
        data: the rows.
        fixed: fields of the recipe that must not change.
    """
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
    found.append(lambda best: few_parameters(best, data, fixed))
    if data.rows.times is not None and free("inputs"):
        found.append(_clipped)
    noises: list[Change] = []
    if real and small and free("noise") and recipe.noise_floor:
        noises.append(_floors)
    if real and free("noise"):
        noises.append(_other_noise)
    if real and not small and free("noise"):
        noises.append(_of_wide(_heavy_tails))
    if recipe.task == "counts" and free("noise"):
        noises.append(lambda best: [("noise poisson", dataclasses.replace(best, noise="poisson"))])
    transforms: list[Change] = []
    if real and free("transform"):
        kinds = [kind for kind in candidate_transforms(data.y) if kind != recipe.transform]
        transforms.append(lambda best: [(f"target {k}", dataclasses.replace(best, transform=k)) for k in kinds])
    # A skewed target would need a wide prior and a low floor, which slow HMC down, so that its transform comes first.
    found += transforms + noises if small else noises + transforms
    if free("prior_scale"):
        found += [_of_chains(_scales), _of_chains(_scales)]
    if free("inputs") and data.numeric:
        encodings = [k for k in ("quantile", "categories") if _useful(k, data, SMALL_ADDED if small else LARGE_ADDED)]
        later = data.rows.times is not None

        def encoded(best: Recipe) -> Iterator[tuple[str, Recipe]]:
            # A line in the ranks of a column does not continue its trend.
            kinds = [kind for kind in encodings if kind != "quantile" or best.hidden or not later]
            yield from ((f"inputs {kind}", dataclasses.replace(best, inputs=kind)) for kind in kinds)

        found.append(_unless_smooth(encoded))
    if not small and data.rows.count > MANY and recipe.settings.get("schedule") == "constant":
        found.append(_of_wide(lambda best: [("falling learning rate", _decayed(best))]))
    if not small and free("embedding", "hidden") and data.numeric:
        plain: dict[str, Any] = {"embedding": False, "activation": "silu"}
        found.append(_of_wide(lambda best: [("no embedding", dataclasses.replace(best, **plain))]))
    return found


def _unless_smooth(change: Change) -> Change:
    """Return a change that small smooth networks do not have."""
    return lambda best: () if is_smooth(best) else change(best)


def _of_wide(change: Change) -> Change:
    """Return a change of wide networks."""
    return lambda best: () if is_smooth(best) or best.method == "hmc" else change(best)


def _of_chains(change: Change) -> Change:
    """Return a change of recipes that are sampled."""
    return lambda best: change(best) if best.method == "hmc" else ()


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


def _clipped(best: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield a recipe whose predictions stay where they were at the end of the training rows, as those of trees do."""
    yield "inputs clipped", dataclasses.replace(best, inputs="clipped")


def _floors(best: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield smaller noise floors."""
    if best.noise == "heteroscedastic":
        yield from ((f"noise floor {floor:g}", dataclasses.replace(best, noise_floor=floor)) for floor in FLOORS)


def _other_noise(best: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield one scale for all rows if the best recipe predicts it, and the other way around."""
    other = "learned" if best.noise in PREDICTED else "heteroscedastic"
    yield f"noise {other}", dataclasses.replace(best, noise=other)


def _heavy_tails(best: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield heteroscedastic noise with heavy tails."""
    if best.noise == "heteroscedastic":
        yield "noise heteroscedastic-student", dataclasses.replace(best, noise="heteroscedastic-student")


def _decayed(best: Recipe) -> Recipe:
    """Return a recipe whose learning rate falls to zero over all epochs; nothing stops training before that."""
    settings = {**best.settings, "schedule": "cosine", "patience": UNSTOPPED}
    return dataclasses.replace(best, settings=settings)
