"""Missing cells of training rows, sampled from their distribution given the other cells of the row and its target.

A network that is fitted to rows whose gaps hold a guess treats the error of the guess as noise, and predicts too much
noise for complete rows. Instead, fits alternate with draws of the missing cells (data augmentation, Tanner and Wong
1987):

    x_m ~ p(x_m | x_o, y, D),   proportional to p(x_m | x_o) p(y | x_o, x_m, D),

where p(x_m | x_o) is uniform over the completions of the row from similar rows (see
`credibly.tables.missing.imputation`), and p(y | x, D) the predictive of a short fit to the rows as they were completed
before. The first fit is to the means over the completions. Only rows of the fit itself are used, so rows held out of it
stay unseen.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from credibly.core.checks import is_integer
from credibly.core.threads import torch_threads
from credibly.errors import InputError, TrainingError
from credibly.inference.method import Method
from credibly.methods import HMC, DeepEnsemble
from credibly.posterior.base import Posterior
from credibly.tables.columns.scaling import STANDARD, InputScaling
from credibly.tables.missing.imputation import Donors
from credibly.tables.recipe import HEAVY, Recipe
from credibly.tables.threads import threads_for

Array = npt.NDArray[Any]

# Number of alternations: after one the noise is still too large where important cells are missing; large tables have
# time for one only.
ROUNDS, ROUNDS_OF_MANY, MANY = 3, 1, 3_000
# Weight of rows with gaps in the first short fit, which treats the error of a guess as noise. A part of that error
# survives every further round: about the fraction of the rows that have gaps.
GAPPED = 0.25
# Rows times parameters up to which the short fits are by HMC.
AFFORDABLE = 1_200_000
HMC_PILOT = {"chains": 4, "warmup": 100, "draws": 40, "thin": 1, "max_steps": 48}
ENSEMBLE_PILOT = {"members": 3, "steps": 600}
EPOCHS_PILOT = {"members": 3, "epochs": 30, "patience": 5}
# Completed values scored at a time: 64 MiB.
VALUES = 2**24


@dataclass(frozen=True, eq=False)
class TrainingGaps:
    """The gaps of training rows and the donors of their completions.

    Attributes:
        missing: (N, P), whether a standardised input is missing.
        nearest: (N, M), donors of each row.
        donors: the rows that completions come from.
    """

    missing: Array
    nearest: Array
    donors: Donors

    @classmethod
    def of(cls, x: Array, donors: Donors | None = None) -> TrainingGaps | None:
        """Return the gaps of rows with NaN; None if there are none."""
        missing = np.isnan(x)
        if not missing.any():
            return None
        donors = Donors(x) if donors is None else donors
        return cls(missing, donors.nearest(x), donors)

    def at(self, rows: Array) -> TrainingGaps:
        """Return the gaps of some of the rows."""
        return TrainingGaps(self.missing[rows], self.nearest[rows], self.donors)

    def completions(self, x: Array, rows: Array) -> Array:
        """Return all completions of some rows of x, (rows, M, P); what x holds in the gaps is ignored."""
        return np.where(self.missing[rows][:, None], self.donors.rows[self.nearest[rows]], x[rows][:, None])


def completed_inputs(
    recipe: Recipe,
    x: Array,
    y: Array,
    gaps: TrainingGaps,
    *,
    sample_weight: Array | None = None,
    classes: int | None = None,
    numeric: tuple[int, ...] = (),
    scaling: InputScaling = STANDARD,
    seed: int = 0,
) -> Array:
    """Return training rows with one draw of their missing cells.

    Args:
        recipe: of the fit; the short fits have its network, prior and noise.
        x: standardised inputs, (N, P), with the means over completions in the gaps.
        y: targets on the scale of the fit.
        gaps: of the rows.
        sample_weight, classes, numeric: as in `Recipe.problem`.
        scaling: encoding of the inputs for the network.
        seed: of the draws and of the short fits.
    """
    rows = np.flatnonzero(gaps.missing.any(1))
    if not len(rows):
        return x
    weight = np.ones(len(x)) if sample_weight is None else np.array(sample_weight, dtype=np.float64)
    weight[rows] *= GAPPED
    rng = np.random.default_rng([seed, 0x6A95])
    for k in range(ROUNDS if len(x) <= MANY else ROUNDS_OF_MANY):
        try:
            own = weight if k == 0 else sample_weight
            posterior = _short_fit(recipe, scaling(x), y, own, classes, numeric, seed)
        except (TrainingError, InputError):
            # The full fit reports what is wrong.
            return x
        chosen = _draws(posterior, x, y, gaps, rows, scaling, rng)
        x = x.copy()
        x[rows] = chosen
    return x


def _short_fit(
    recipe: Recipe,
    x: Array,
    y: Array,
    weight: Array | None,
    classes: int | None,
    numeric: tuple[int, ...],
    seed: int,
) -> Posterior:
    problem = recipe.problem(x, y, sample_weight=weight, classes=classes, seed=seed, numeric=numeric)
    method = short_method(recipe, problem.n, problem.layout.dim)
    with torch_threads(threads_for(problem, method)):
        return method.fit(problem, seed=seed, progress=False)


def short_method(recipe: Recipe, rows: int, parameters: int) -> Method:
    """Return a short run of HMC if that is fast, and otherwise of a small ensemble.

    It is no longer than the run of the recipe, and does not depend on which of its settings were given.
    """
    full = recipe.fitter(rows, parameters)
    # The C++ backend supports only the likelihoods of regression and classification.
    fast = recipe.task == "classification" or (recipe.task == "regression" and recipe.noise not in HEAVY)
    if fast and not isinstance(full, DeepEnsemble) and rows * parameters <= AFFORDABLE:
        plain = dataclasses.replace(recipe, method="hmc", settings={}).fitter(rows, parameters)
        return _shortened(full if isinstance(full, HMC) else plain, HMC_PILOT)
    if not isinstance(full, DeepEnsemble):
        steps = getattr(full, "steps", None)
        given = {"steps": steps} if is_integer(steps) else {}
        full = dataclasses.replace(recipe, method="ensemble", settings=given).fitter(rows, parameters)
        assert isinstance(full, DeepEnsemble)
    return _shortened(full, ENSEMBLE_PILOT if full.epochs is None else EPOCHS_PILOT)


def _shortened(method: Method, pilot: dict[str, int]) -> Method:
    given = {name: getattr(method, name) for name in pilot}
    fewer: dict[str, Any] = {
        name: min(given[name], most) if is_integer(given[name]) else most for name, most in pilot.items()
    }
    if isinstance(method, DeepEnsemble):
        return dataclasses.replace(method, **fewer, compile=False)
    assert isinstance(method, HMC)
    return dataclasses.replace(method, **fewer)


def _draws(
    posterior: Posterior,
    x: Array,
    y: Array,
    gaps: TrainingGaps,
    rows: Array,
    scaling: InputScaling,
    rng: np.random.Generator,
) -> Array:
    """Return a completion of each of the rows, drawn in proportion to the predictive density of its target."""
    found = np.empty((len(rows), x.shape[1]), dtype=x.dtype)
    count = gaps.nearest.shape[1]
    step = max(1, VALUES // (count * x.shape[1]))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        every = gaps.completions(x, some).reshape(-1, x.shape[1])
        inputs = torch.from_numpy(np.ascontiguousarray(scaling(every), np.float32))
        targets = torch.from_numpy(np.repeat(y[some], count, axis=0))
        densities = posterior.predict(inputs).log_prob(targets).double().cpu().numpy().reshape(len(some), count)
        # The largest of log densities plus Gumbel noise is a draw in proportion to the densities.
        noisy = np.nan_to_num(densities, nan=-np.inf) + rng.gumbel(size=densities.shape)
        picks = noisy.argmax(1)
        found[start : start + step] = every.reshape(len(some), count, -1)[np.arange(len(some)), picks]
    return found
