"""Calibration: scores of held-out rows and how to use them, as plain arrays and numbers.

`calibrate` scores the rows of one predictive (split conformal), `cross_calibrate` those of every fold of a
cross-validation under the fit that did not see it. `CalibratedPredictive` applies a calibration to predictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credibly.conformal.bands import NODES, Bands
from credibly.conformal.labels import label_scores, uniforms
from credibly.conformal.probabilities import MAPS, ProbabilityMap, fit_probabilities
from credibly.conformal.ranks import encode_groups, plain_groups, rank, rows_needed
from credibly.core.checks import check_choice, check_integer, is_real
from credibly.core.inputs import Inputs
from credibly.core.rng import check_seed
from credibly.errors import InputError
from credibly.predictive.base import Predictive

REAL_SCORES = ("pit", "cqr")
LABEL_SCORES = ("aps", "raps")
TIME_SCORES = ("lower",)
SUPPORTS = ("real", "count", "time", "binary", "class")
FALLBACKS = ("raise", "pooled")


@dataclass(frozen=True)
class Settings:
    """How rows are scored and sets are formed.

    Attributes:
        score: for real targets and counts "pit" (intervals stretched in proportion to the predictive's width) or "cqr"
            (widened by a constant); for labels "aps" or "raps"; for times that may be censored "lower" (a lower bound).
            "auto" is the first of these.
        probabilities: "temperature" or "isotonic" to recalibrate class probabilities too; None leaves them.
        fallback: for a group that is unknown or has too few calibration rows: "raise", or "pooled" to use the rows of
            all groups, without a guarantee for that group.
        allow_empty: whether a prediction set may be empty. Randomised sets have the promised coverage exactly only
            if it may; by default the most probable label is added to an empty set, which covers more.
        penalty: of RAPS, per label from `penalty_from` on.
        penalty_from: number of labels that RAPS does not penalise.
        seed: of the randomisation of prediction sets.
    """

    score: str = "auto"
    probabilities: str | None = None
    fallback: str = "raise"
    allow_empty: bool = False
    penalty: float = 0.1
    penalty_from: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("score", self.score, ("auto", *REAL_SCORES, *LABEL_SCORES, *TIME_SCORES))
        if self.probabilities is not None:
            check_choice("probabilities", self.probabilities, MAPS, "None leaves them as they are")
        check_choice("fallback", self.fallback, FALLBACKS)
        if not is_real(self.penalty) or self.penalty < 0:
            raise InputError("penalty", f"must be a non-negative number, got {self.penalty!r}")
        check_integer("penalty_from", self.penalty_from, least=0)
        check_seed(self.seed)

    def for_predictive(self, predictive: Predictive) -> Settings:
        """Return the settings with "auto" resolved for this kind of target. Raise if the score is for another kind."""
        support = predictive.likelihood.support
        if support not in SUPPORTS:
            advice = f"Coverage is defined for targets of kind {', '.join(SUPPORTS)}"
            if support == "heads":
                advice = (
                    'Calibrate each head: c = conformal.calibrate(posterior.predict(x)["name"], y["name"]), then '
                    'conformal.CalibratedPredictive(posterior.predict(new)["name"], c)'
                )
            raise InputError("predictive", f"has targets of kind {support!r}", advice)
        labels = has_labels(predictive)
        known = LABEL_SCORES if labels else TIME_SCORES if support == "time" else REAL_SCORES
        kind = "labels" if labels else "times" if support == "time" else "real targets and counts"
        if self.score != "auto" and self.score not in known:
            wanted = " or ".join(repr(s) for s in known)
            raise InputError("score", f"must be {wanted} for {kind}, got {self.score!r}")
        if self.probabilities is not None and not labels:
            found = f"must be None for {kind}, got {self.probabilities!r}"
            raise InputError("probabilities", found, "Only labels have class probabilities")
        return dataclasses.replace(self, score=known[0]) if self.score == "auto" else self


@dataclass(frozen=True, eq=False)
class Calibration:
    """Scores of n calibration rows.

    Attributes:
        settings: how they were scored.
        scores: (n, ...), one per target; for "cqr" the predictive's quantiles minus y at the nodes, (n, ..., nodes),
            from which the score of every level follows.
        fold: (n,), the fold of each row; None for split conformal.
        group: (n,), index into `groups`; None without groups.
        groups: labels of the groups.
        probability_map: the map of class probabilities; None leaves them.
    """

    settings: Settings
    scores: Tensor
    fold: Tensor | None = None
    group: Tensor | None = None
    groups: tuple[Any, ...] = ()
    probability_map: ProbabilityMap | None = None

    @property
    def rows(self) -> int:
        """Number of calibration rows."""
        return len(self.scores)

    @property
    def folds(self) -> int:
        """Number of folds, 0 for split conformal."""
        return 0 if self.fold is None else int(self.fold.max()) + 1

    def highest_level(self) -> float:
        """Return the highest level that the number of rows can promise, n / (n + 1)."""
        return self.rows / (self.rows + 1)

    def scores_at(self, level: float) -> Tensor:
        """Return the scores for a level, (n, ...). Only those of "cqr" depend on it."""
        if self.settings.score != "cqr":
            return self.scores
        bands = Bands(torch.tensor(NODES, dtype=torch.float64), self.scores.movedim(-1, 0))
        z = half_width(level)
        return torch.maximum(bands.at(-z), -bands.at(z))

    def rows_for(self, label: Any, level: float) -> Tensor:
        """Return the indices of the calibration rows of a group; all rows for None.

        A group that is unknown or has too few rows for the level raises, or has all rows with fallback="pooled".
        """
        everything = torch.arange(self.rows)
        if label is None or self.group is None:
            rank(self.rows, level)
            return everything
        own = everything[self.group == self.groups.index(label)] if label in self.groups else everything[:0]
        if len(own) >= rows_needed(level):
            return own
        if self.settings.fallback == "pooled":
            rank(self.rows, level)
            return everything
        advice = 'Pass fallback="pooled" when calibrating to use the rows of all groups, without a guarantee per group'
        if not len(own):
            known = ", ".join(repr(g) for g in self.groups[:8]) + (", ..." if len(self.groups) > 8 else "")
            raise InputError("groups", f"{label!r} has no calibration rows; known groups are {known}", advice)
        found = f"{label!r} has {len(own)} calibration rows, a level of {level:g} needs {rows_needed(level)}"
        raise InputError("groups", found, advice)

    # -- storage -----------------------------------------------------------------------------------------------------
    def arrays(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name."""
        found = {"scores": self.scores, "fold": self.fold, "group": self.group}
        return {name: value for name, value in found.items() if value is not None}

    def facts(self) -> dict[str, Any]:
        """Return everything else as plain JSON values."""
        mapped = None if self.probability_map is None else self.probability_map.to_dict()
        return {"settings": dataclasses.asdict(self.settings), "groups": list(self.groups), "probability_map": mapped}

    def to_dict(self) -> dict[str, Any]:
        """Return the calibration as plain JSON values."""
        return {**self.facts(), **{name: value.tolist() for name, value in self.arrays().items()}}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Calibration:
        """Restore a calibration from `to_dict`, or from the union of `facts` and `arrays`."""
        kinds = {"scores": torch.float64, "fold": torch.int64, "group": torch.int64}
        arrays = {k: torch.as_tensor(stored[k], dtype=d, device="cpu") for k, d in kinds.items() if k in stored}
        mapped = stored["probability_map"]
        return cls(
            Settings(**stored["settings"]),
            **arrays,
            groups=tuple(stored["groups"]),
            probability_map=None if mapped is None else ProbabilityMap.from_dict(mapped),
        )


def calibrate(predictive: Predictive, y: Any, *, groups: Any = None, settings: Settings | None = None) -> Calibration:
    """Score the rows of a predictive, which the fit must not have seen.

    Args:
        predictive: predictions of the calibration rows.
        y: their targets or labels, in the shape of the predictions.
        groups: one label per row, for a guarantee within each group; None for none.
        settings: how to score.
    """
    chosen = (settings or Settings()).for_predictive(predictive)
    labels, group = ((), None) if groups is None else encode_groups(groups, predictive.rows)
    target = predictive.prepared(y)
    if not has_labels(predictive):
        own = predictive.likelihood.restore(target).double().cpu()
        bands = Bands.of(predictive)
        if chosen.score == "lower":
            # Of a censored row this is the time until which it was observed.
            return Calibration(chosen, -bands.lower_index(own.abs()), group=group, groups=labels)
        scores = bands.score(own) if chosen.score == "pit" else (bands.values - own).movedim(0, -1)
        return Calibration(chosen, scores, group=group, groups=labels)
    own = label_indices(predictive, target)
    p = predictive.probabilities.cpu()
    scores = all_label_scores(predictive, chosen).gather(-1, own.unsqueeze(-1)).squeeze(-1)
    mapped = None if chosen.probabilities is None else fit_probabilities(chosen.probabilities, p, own)
    return Calibration(chosen, scores, group=group, groups=labels, probability_map=mapped)


def cross_calibrate(
    folds: Sequence[tuple[Predictive, Any]], *, groups: Sequence[Any] | None = None, settings: Settings | None = None
) -> Calibration:
    """Score the rows of every fold under the fit that did not see them.

    Args:
        folds: for each fold, the predictions of its rows by the fit to the other folds, and the targets of its rows.
        groups: for each fold, one label per row; None for none.
        settings: how to score.
    """
    if len(folds) < 2:
        raise InputError("folds", f"must be at least 2, got {len(folds)}")
    if groups is not None and len(groups) != len(folds):
        raise InputError("groups", f"must have an entry per fold, got {len(groups)} for {len(folds)} folds")
    plain = dataclasses.replace(settings or Settings(), probabilities=None)
    parts = [calibrate(predictive, y, settings=plain) for predictive, y in folds]
    chosen = dataclasses.replace(parts[0].settings, probabilities=(settings or Settings()).probabilities)
    chosen = chosen.for_predictive(folds[0][0])
    labels, group = (), None
    if groups is not None:
        rows = [value for part, own in zip(parts, groups) for value in plain_groups(own, part.rows)]
        labels, group = encode_groups(rows, len(rows))
    mapped = None
    if chosen.probabilities is not None:
        p = torch.cat([predictive.probabilities.cpu() for predictive, _ in folds])
        own = torch.cat([label_indices(predictive, predictive.prepared(y)) for predictive, y in folds])
        mapped = fit_probabilities(chosen.probabilities, p, own)
    fold = torch.cat([torch.full((part.rows,), k) for k, part in enumerate(parts)])
    return Calibration(chosen, torch.cat([part.scores for part in parts]), fold, group, labels, mapped)


def has_labels(predictive: Predictive) -> bool:
    """Return whether the outcomes are labels, which have prediction sets and no intervals."""
    return predictive.likelihood.support in ("class", "binary")


def half_width(level: float) -> float:
    """Return t with P(-t <= Z <= t) = level for a standard normal Z."""
    return float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))


def label_indices(predictive: Predictive, target: Tensor) -> Tensor:
    """Return prepared labels as indices of the last axis of the probabilities, on the CPU."""
    kept = predictive.likelihood.counted(target)
    if kept is not None and not bool(kept.all()):
        raise InputError("y", "has labels that do not count, ignore_index", "Calibrate on rows that have all labels")
    own = target if predictive.likelihood.support == "class" else predictive.likelihood.restore(target)
    return own.long().cpu()


def all_label_scores(predictive: Predictive, settings: Settings, x: Inputs | None = None) -> Tensor:
    """Return the score of every label at the rows of a predictive, (N, ..., K), from the model's own probabilities.

    They are randomised by the inputs of the predictive, or by x.
    """
    p = predictive.probabilities.cpu()
    u = uniforms(predictive.x if x is None else x, settings.seed, tuple(p.shape[1:-1]))
    return label_scores(p, u, settings.penalty if settings.score == "raps" else 0.0, settings.penalty_from)
