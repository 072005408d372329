"""CalibratedPredictive: predictions whose intervals and prediction sets carry a coverage guarantee.

For a new row that is exchangeable with the n calibration rows,

    split conformal       level <= P(y in interval(level)) < level + 1 / (n + 1), the upper bound without ties in scores
    CV+ with K folds      P(y in interval(level)) >= 2 level - 1 - min(2 (1 - 1/K) / (n/K + 1), (1 - K/n) / (K + 1)),
                          and close to level or above it in practice.

The probability is over calibration rows and the new row together: marginal, not given x. It holds however wrong the
model is. With groups it holds within each group.

Several targets have an interval each, with the guarantee for each of them alone. `joint_interval` promises that all of
them lie inside together: its score is the largest of a row over its targets, on the common scale of the bands.

Times may be censored: what is observed is min(T, C) of a time T and a censoring time C. `lower_bound` is valid for
min(T, C) of exchangeable rows, and therefore for T, which is never smaller. The only assumption about C is that new
rows are censored in the same way. No upper bound exists without further assumptions: after the last C anything may
happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from credibly.conformal.bands import OVERFLOW, Bands
from credibly.conformal.calibration import (
    Calibration,
    all_label_scores,
    half_width,
    has_labels,
    label_indices,
)
from credibly.conformal.cross import cross_counts, cross_interval, cross_lower, cross_shifted
from credibly.conformal.labels import with_most_probable
from credibly.conformal.ranks import plain_groups, rank, threshold
from credibly.core.checks import check_probability
from credibly.core.inputs import row_count, tensors_of
from credibly.errors import InputError
from credibly.likelihoods import Likelihood
from credibly.predictive.base import Predictive

T = TypeVar("T")

# Standard deviations from the centre beyond which no target lies.
FARTHEST = 1e12


class GuaranteedPredictive(Predictive):
    """Predictions with another way to intervals and sets; the outputs of the network are shared with `bayesian`.

    Attributes:
        bayesian: the predictions without calibration, with the credible intervals and sets of the posterior.
    """

    def __init__(self, predictive: Predictive) -> None:
        super().__init__(predictive.source, predictive.x)
        # Joined predictions have neither one source nor one x.
        self.rows, self.draws = predictive.rows, predictive.draws
        self.bayesian = predictive

    @property
    def mean(self) -> Tensor:
        """E[y | x, D], as in `Predictive`."""
        return self.bayesian.mean

    @property
    def variance(self) -> Tensor:
        """Var[y | x, D]."""
        return self.bayesian.variance

    @property
    def std(self) -> Tensor:
        """Standard deviation of y."""
        return self.bayesian.std

    @property
    def total(self) -> Tensor:
        """Total uncertainty."""
        return self.bayesian.total

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not remove."""
        return self.bayesian.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty about the model."""
        return self.bayesian.epistemic

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities (N, ..., K)."""
        return self.bayesian.probabilities

    def log_prob(self, y: object) -> Tensor:
        """Return the log predictive density of each row."""
        return self.bayesian.log_prob(y)

    def cdf(self, y: object) -> Tensor:
        """Return P(Y <= y | x, D)."""
        return self.bayesian.cdf(y)

    def quantile(self, level: float | Sequence[float]) -> Tensor:
        """Return quantiles of the mixture, in the shape of the mean; (levels, N, ...) for several levels."""
        return self.bayesian.quantile(level)

    def sample(self, count: int = 1, *, seed: int = 0) -> Tensor:
        """Draw samples of y, (count, N, ...)."""
        return self.bayesian.sample(count, seed=seed)

    def prepared(self, y: object) -> Tensor:
        """Return observed y in the layout and dtype of the likelihood."""
        return self.bayesian.prepared(y)

    def map_blocks(self, function: Callable[[Tensor, dict[str, Tensor], int], T]) -> Iterator[T]:
        """Call `function` on consecutive blocks of rows, as in `Predictive.map_blocks`."""
        return self.bayesian.map_blocks(function)

    def _as_bounds(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounds in the dtype and on the device of the predictions: integers for counts, never crossing."""
        if self.likelihood.support == "count":
            inner = torch.ceil(lower - 1e-9), torch.floor(upper + 1e-9)
            empty = inner[0] > inner[1]
            lower = torch.where(empty, torch.floor(lower), inner[0]).clamp_min(0)
            upper = torch.where(empty, torch.ceil(upper), inner[1]).clamp_min(0)
        # Interpolated between a finite quantile and one that overflowed.
        lower, upper = (torch.where(b.abs() > OVERFLOW**0.5, b * torch.inf, b) for b in (lower, upper))
        least, most = _range_of(self.likelihood)
        # A line beyond the nodes may leave the range with both bounds.
        lower, upper = (torch.minimum(torch.maximum(bound, least), most) for bound in (lower, upper))
        crossed, middle = lower > upper, 0.5 * (lower + upper)
        device = tensors_of(self.x)[0][1].device
        dtype = self.bayesian.subset(torch.zeros(1, dtype=torch.int64)).quantile(0.5).dtype
        found = (torch.where(crossed, middle, bound).to(device, dtype) for bound in (lower, upper))
        return next(found), next(found)


class CalibratedPredictive(GuaranteedPredictive):
    """Predictions whose `interval` and `prediction_set` carry a guarantee; `bayesian` has the posterior's own.

    Moments, densities, quantiles and samples are those of the Bayesian model average. Recalibrated class probabilities,
    if requested, replace `probabilities`, `mean` and `log_prob` of labels; the uncertainties (total, aleatoric,
    epistemic) and the prediction sets are still computed from the model's own.

    Args:
        predictive: the Bayesian predictions at new rows.
        calibration: from `calibrate` or `cross_calibrate`.
        groups: one label per row, for a calibration with groups; None for the guarantee over all groups together.
        folds: predictions at the same rows by the fit of each fold, for a calibration from folds.
    """

    def __init__(
        self, predictive: Predictive, calibration: Calibration, *, groups: Any = None, folds: Sequence[Predictive] = ()
    ) -> None:
        super().__init__(predictive)
        self.calibration = calibration
        self.groups = None if groups is None else plain_groups(groups, predictive.rows)
        self.folds = tuple(folds)
        if groups is not None and calibration.group is None:
            raise InputError("groups", "must be None: the calibration has no groups", "Pass groups to calibrate too")
        if len(self.folds) != calibration.folds or any(f.rows != predictive.rows for f in self.folds):
            found = f"must be predictions of {predictive.rows} rows by {calibration.folds} fits"
            raise InputError("folds", f"{found}, got {[f.rows for f in self.folds]}")
        if has_labels(predictive) != (calibration.settings.score in ("aps", "raps")):
            kind = type(predictive.likelihood).__name__
            raise InputError("calibration", f"has {calibration.settings.score!r} scores, the likelihood is {kind}")

    # -- the guarantee -----------------------------------------------------------------------------------------------
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return bounds (lower, upper) that contain y with a probability of at least `level`.

        For calibrations from folds that is the coverage in practice; the guarantee is weaker (see the module).
        """
        check_probability("level", level)
        if has_labels(self):
            return self.bayesian.interval(level)  # raises
        if self.calibration.settings.score == "lower":
            lower = self.lower_bound(level)
            return lower, torch.full_like(lower, torch.inf)
        return self._interval(level, self.calibration.scores_at(level))

    def joint_interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return bounds that jointly contain all targets of a row with probability at least `level`."""
        check_probability("level", level)
        if self.calibration.settings.score != "pit":
            found = f"are made from 'pit' scores, got {self.calibration.settings.score!r}"
            raise InputError("score", f"joint intervals {found}", "Calibrate with score='pit'")
        scores = self.calibration.scores
        return self._interval(level, joint_scores(scores).reshape(-1, *[1] * (scores.ndim - 1)).expand_as(scores))

    def lower_bound(self, level: float = 0.9) -> Tensor:
        """Return a bound that a time exceeds with a probability of at least `level`, whether or not it is censored."""
        check_probability("level", level)
        if self.calibration.settings.score != "lower":
            raise InputError("predictive", "a lower bound is for times that may be censored", "Use interval")
        bound = torch.empty_like(self._bands[0].values[0])
        for rows, chosen in self._parts(level):
            bands, scores = [b.rows(rows) for b in self._bands], self.calibration.scores[chosen]
            if self.folds:
                parts = self._by_fold(scores, chosen)
                used = [k for k, part in enumerate(parts) if len(part)]
                count = len(chosen) + 1 - rank(len(chosen), level)
                found = cross_lower([bands[k].flat() for k in used], [parts[k] for k in used], count)
                bound[rows] = found.reshape(bands[0].values.shape[1:])
            else:
                bound[rows] = bands[0].at(-threshold(scores, level))
        return self._as_bounds(bound, torch.full_like(bound, torch.inf))[0]

    def _interval(self, level: float, scores: Tensor) -> tuple[Tensor, Tensor]:
        some = self._bands[0].values[0]
        lower, upper = torch.empty_like(some), torch.empty_like(some)
        for rows, chosen in self._parts(level):
            bands = [b.rows(rows) for b in self._bands]
            find = self._from_folds if self.folds else self._from_split
            lower[rows], upper[rows] = find(bands, scores, chosen, level)
        return self._as_bounds(lower, upper)

    def prediction_set(self, level: float = 0.9, *, allow_empty: bool | None = None) -> Tensor:
        """Return a set of classes that contains y with a probability of at least `level`, as booleans (N, ..., K).

        Sets are randomised by the inputs of the row, so a row always has the same set. `allow_empty` is that of
        `Settings` if None.
        """
        check_probability("level", level)
        if not has_labels(self):
            return self.bayesian.prediction_set(level)  # raises
        p = self.bayesian.probabilities.cpu()
        settings = self.calibration.settings
        # A new row has the same random number under all folds, also if each encodes its inputs in its own way:
        # otherwise the randomisation would average out over the folds.
        shared = self.bayesian.x if row_count(self.bayesian.x) == self.rows else None
        own = [all_label_scores(predictive, settings, shared) for predictive in self.folds or (self.bayesian,)]
        result = torch.zeros(p.shape, dtype=torch.bool)
        for rows, chosen in self._parts(level):
            scores = self.calibration.scores[chosen]
            if not self.folds:
                result[rows] = own[0][rows] <= threshold(scores, level).unsqueeze(-1)
                continue
            flat = [o[rows].reshape(len(rows), -1, p.shape[-1]) for o in own]
            counts = cross_counts(self._by_fold(scores, chosen), flat)
            result[rows] = (counts < rank(len(chosen), level)).reshape(len(rows), *p.shape[1:])
        empty = settings.allow_empty if allow_empty is None else allow_empty
        result = result if empty else with_most_probable(result, p)
        return result.to(tensors_of(self.x)[0][1].device)

    # -- recalibrated probabilities ----------------------------------------------------------------------------------
    @property
    def probabilities(self) -> Tensor:
        """Class probabilities (N, ..., K), recalibrated if the calibration includes that."""
        mapped = self.calibration.probability_map
        return self.bayesian.probabilities if mapped is None else mapped(self.bayesian.probabilities)

    @property
    def mean(self) -> Tensor:
        """E[y | x, D]; for classes the probabilities (N, ..., K), recalibrated if the calibration includes that."""
        if self.calibration.probability_map is None:
            return self.bayesian.mean
        p = self.probabilities
        return p[..., 1] if self.likelihood.support == "binary" else self.likelihood.restore(p)

    def log_prob(self, y: object) -> Tensor:
        """Return the log predictive density of each row; for labels by the recalibrated probabilities, if any."""
        if self.calibration.probability_map is None:
            return self.bayesian.log_prob(y)
        p = self.probabilities
        label = label_indices(self, self.prepared(y)).to(p.device)
        found = p.gather(-1, label.unsqueeze(-1)).squeeze(-1).log()
        several = self.likelihood.support == "binary" and not self.likelihood.squeeze
        return found.sum(self.likelihood.axis) if several else found

    def subset(self, rows: Tensor) -> CalibratedPredictive:
        """Return the predictions at the given rows (indices or a boolean mask)."""
        kept = torch.arange(self.rows)[rows.cpu()].tolist()
        groups = None if self.groups is None else [self.groups[row] for row in kept]
        folds = [fold.subset(rows) for fold in self.folds]
        return CalibratedPredictive(self.bayesian.subset(rows), self.calibration, groups=groups, folds=folds)

    def __repr__(self) -> str:
        return f"CalibratedPredictive({self.rows} rows, {self.draws} draws, {self.calibration.rows} calibration rows)"

    # -- steps -------------------------------------------------------------------------------------------------------
    @cached_property
    def _bands(self) -> list[Bands]:
        return [Bands.of(predictive) for predictive in self.folds or (self.bayesian,)]

    def _parts(self, level: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the new rows of each group and the calibration rows to use for them."""
        if self.groups is None:
            yield torch.arange(self.rows), self.calibration.rows_for(None, level)
            return
        members: dict[Any, list[int]] = {}
        for row, label in enumerate(self.groups):
            members.setdefault(label, []).append(row)
        # All groups are checked before anything is computed.
        chosen = {label: self.calibration.rows_for(label, level) for label in members}
        for label, rows in members.items():
            yield torch.tensor(rows), chosen[label]

    def _from_split(self, bands: list[Bands], scores: Tensor, chosen: Tensor, level: float) -> tuple[Tensor, Tensor]:
        limit = threshold(scores[chosen], level)
        if self.calibration.settings.score == "pit":
            return bands[0].at(-limit), bands[0].at(limit)
        z = half_width(level)
        return bands[0].at(-z) - limit, bands[0].at(z) + limit

    def _from_folds(self, bands: list[Bands], scores: Tensor, chosen: Tensor, level: float) -> tuple[Tensor, Tensor]:
        count = len(chosen) + 1 - rank(len(chosen), level)
        parts = self._by_fold(scores[chosen], chosen)
        used = [k for k, part in enumerate(parts) if len(part)]
        flat, mine = [bands[k].flat() for k in used], [parts[k] for k in used]
        if self.calibration.settings.score == "pit":
            found = cross_interval(flat, mine, count)
        else:
            z = half_width(level)
            found = cross_shifted([(b.at(-z), b.at(z)) for b in flat], mine, count)
        shape = bands[0].values.shape[1:]
        return found[0].reshape(shape), found[1].reshape(shape)

    def _by_fold(self, scores: Tensor, chosen: Tensor) -> list[Tensor]:
        """Return the scores of chosen calibration rows by fold, (n_k, targets) each."""
        assert self.calibration.fold is not None
        fold = self.calibration.fold[chosen]
        flat = scores.unsqueeze(1) if scores.ndim == 1 else scores.flatten(1)
        return [flat[fold == k] for k in range(self.calibration.folds)]


def joint_scores(scores: Tensor) -> Tensor:
    """Return the largest score of each row over its targets, (n,), from scores (n, ...)."""
    return scores.flatten(1).amax(1) if scores.ndim > 1 else scores


def _range_of(likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Return the ends of the range of y in the caller's layout: those of the likelihood, or of y as a function of z."""
    found = likelihood.increasing()
    ends = torch.tensor([[-FARTHEST], [FARTHEST]], dtype=torch.float64)
    if found is None or likelihood.axis != -1:
        least, most = torch.tensor(likelihood.limits, dtype=torch.float64)
        return least, most
    low, high = found[1](ends).cpu().unbind(0)
    return likelihood.restore(low.nan_to_num(-torch.inf)), likelihood.restore(high.nan_to_num(torch.inf))
