"""Jackknife+ from one fit: the fits without a row are the draws of the fit with all rows, reweighted.

The posterior without row i has the importance weights w_si ~ 1 / p(y_i | x_i, w_s), smoothed as in PSIS-LOO
(`credibly.diagnostics.pareto`), and its predictive is the mixture of the same draws with these weights,

    F_-i(y | x) = sum_s w_si F(y | x, w_s).

Row i has the score r_i of y_i under F_-i at x_i, and at a new x its interval ends where F_-i has the index -r_i and
r_i. Jackknife+ (Barber, Candes, Ramdas and Tibshirani 2021) returns order statistics of the ends, as CV+ does, with one
fold per row. With exact leave-one-out fits the coverage is at least 2 level - 1, and close to the level in practice.
The weights are estimates: with Pareto k above the limit (0.7 for 2,000 draws or more) those of a row are unreliable,
and so is the guarantee if that holds for many rows. No row is lost and nothing is fitted again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credibly.conformal.bands import NODES, Bands
from credibly.conformal.calibration import Settings, has_labels, label_indices
from credibly.conformal.labels import label_scores, uniforms, with_most_probable
from credibly.conformal.predictive import GuaranteedPredictive
from credibly.conformal.ranks import rank
from credibly.core.checks import check_integer, check_probability
from credibly.core.inputs import tensors_of
from credibly.core.rng import stream
from credibly.errors import InputError
from credibly.predictive.base import Predictive

# Values of the tensor (calibration rows, new rows, nodes) held at a time: 32 MiB.
BLOCK_VALUES = 2**22
# The ends of all intervals are kept up to this many values, 128 MiB each, for further levels.
CACHE_VALUES = 2**24
# Leaving out one row moves the index of a quantile by at most this much; more is an unreliable weight.
MOST_SHIFT = 3.0


@dataclass(frozen=True, eq=False)
class LooCalibration:
    """Leave-one-out weights and scores of m training rows.

    Attributes:
        settings: how rows are scored: "pit" for real targets, "aps" or "raps" for labels.
        scores: (m, ...), one per target.
        weights: importance weights of the draws without each row, (draws, m).
        pareto_k: (m,), the shape of the tail of each row's weights.
        k_limit: Pareto k above which the weights of a row are unreliable.
    """

    settings: Settings
    scores: Tensor
    weights: Tensor
    pareto_k: Tensor
    k_limit: float

    @property
    def rows(self) -> int:
        """Number of rows with a score, m."""
        return len(self.scores)

    @property
    def bad_k(self) -> int:
        """Number of rows with a Pareto k above the limit. The guarantee is approximate for more than a few."""
        return int((self.pareto_k > self.k_limit).sum())

    def arrays(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name."""
        return {"scores": self.scores, "weights": self.weights, "pareto_k": self.pareto_k}

    def facts(self) -> dict[str, Any]:
        """Return everything else as plain JSON values."""
        return {"settings": dataclasses.asdict(self.settings), "k_limit": self.k_limit}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> LooCalibration:
        """Restore a calibration from the union of `facts` and `arrays`."""
        names = ("scores", "weights", "pareto_k")
        arrays = {k: torch.as_tensor(stored[k], dtype=torch.float64, device="cpu") for k in names}
        return cls(Settings(**stored["settings"]), **arrays, k_limit=float(stored["k_limit"]))


def loo_calibrate(
    predictive: Predictive,
    y: Any,
    *,
    weight: Tensor | None = None,
    rows: int = 1000,
    efficiency: float = 1.0,
    settings: Settings | None = None,
) -> LooCalibration:
    """Score training rows under the posterior without them.

    Args:
        predictive: predictions of the training rows by draws of the posterior.
        y: their targets.
        weight: weights of the rows in the posterior, (N,); None for ones.
        rows: at most this many rows are scored, chosen at random by the seed; work and memory are proportional to it.
        efficiency: ESS per draw of the sampler; correlated draws need a longer tail.
        settings: how to score.
    """
    from credibly.diagnostics.pareto import MIN_DRAWS, checked, limit, psis, tail_length

    chosen = (settings or Settings()).for_predictive(predictive)
    if predictive.likelihood.support == "count":
        raise InputError("problem", "has counts, which leave-one-out does not support", "Use calibrate(x, y)")
    if chosen.score == "cqr":
        raise InputError("score", "must be 'pit' for leave-one-out, got 'cqr'")
    if chosen.probabilities is not None:
        raise InputError("probabilities", f"must be None for leave-one-out, got {chosen.probabilities!r}")
    check_integer("rows", rows)
    target = predictive.prepared(y)
    if predictive.rows > rows:
        kept = torch.randperm(predictive.rows, generator=stream(chosen.seed, "leave-one-out rows"))[:rows].sort().values
        predictive = predictive.subset(kept)
        target = target[kept.to(target.device)]
        weight = None if weight is None else weight[kept.to(weight.device)]
    caller_y = target if predictive.likelihood.support == "class" else predictive.likelihood.restore(target)
    values = checked(torch.cat(list(predictive.log_likelihoods(caller_y)), 1).cpu(), MIN_DRAWS)
    ratios = -values if weight is None else -values * weight.cpu().double()
    parts = [psis(part, tail_length(len(values), efficiency)) for part in ratios.split(256, 1)]
    weights, k = torch.cat([w for w, _ in parts], 1).exp(), torch.cat([k for _, k in parts])
    scores = torch.cat(list(_own_scores(predictive, caller_y, weights, chosen)))
    return LooCalibration(chosen, scores, weights, k, limit(len(values)))


class LooPredictive(GuaranteedPredictive):
    """Predictions whose `interval` and `prediction_set` are those of jackknife+; `bayesian` has the posterior's own.

    Args:
        predictive: the Bayesian predictions at new rows, by the draws that the calibration has weights of.
        calibration: from `loo_calibrate`.
    """

    def __init__(self, predictive: Predictive, calibration: LooCalibration) -> None:
        super().__init__(predictive)
        self.calibration = calibration
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        if predictive.draws != len(calibration.weights):
            found = f"has {predictive.draws} draws, the calibration weights of {len(calibration.weights)}"
            raise InputError("predictive", found, "Predict with the draws of the calibration")

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return bounds (lower, upper) that contain y with a probability of about `level`, at least 2 level - 1."""
        check_probability("level", level)
        if has_labels(self):
            return self.bayesian.interval(level)  # raises
        upper_rank = rank(self.calibration.rows, level)
        lower_rank = self.calibration.rows + 1 - upper_rank
        if self._kept is None and self.calibration.scores.numel() * self.rows <= CACHE_VALUES:
            self._kept = list(self._ends())
        found = [
            (lower.kthvalue(lower_rank, 0).values, upper.kthvalue(upper_rank, 0).values)
            for lower, upper in self._kept or self._ends()
        ]
        return self._as_bounds(*(torch.cat(bound) for bound in zip(*found)))

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Return a set of classes that contains y with a probability of about `level`, as booleans (N, ..., K)."""
        check_probability("level", level)
        if not has_labels(self):
            return self.bayesian.prediction_set(level)  # raises
        most = rank(self.calibration.rows, level)
        p = self.bayesian.probabilities.cpu()
        found = []
        for part in self._blocks(p.shape[-1]):
            own = torch.einsum("sm,sn...->mn...", self.calibration.weights, _per_draw(part))
            scores = _scores_of(own, part, self.calibration.settings)
            below = self.calibration.scores.unsqueeze(1).unsqueeze(-1) < scores
            found.append(below.sum(0) < most)
        result = torch.cat(found)
        result = result if self.calibration.settings.allow_empty else with_most_probable(result, p)
        return result.to(tensors_of(self.x)[0][1].device)

    def subset(self, rows: Tensor) -> LooPredictive:
        """Return the predictions at the given rows (indices or a boolean mask)."""
        return LooPredictive(self.bayesian.subset(rows), self.calibration)

    def __repr__(self) -> str:
        return f"LooPredictive({self.rows} rows, {self.draws} draws, {self.calibration.rows} calibration rows)"

    def _ends(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the ends of the interval of every calibration row at blocks of new rows, (m, rows, ...) each."""
        for part in self._blocks(len(NODES)):
            values, cdf = _at_nodes(part)
            nodes = _shifted(torch.einsum("sm,sgn...->gmn...", self.calibration.weights, cdf))
            bands = Bands(nodes, values.unsqueeze(1).expand_as(nodes))
            scores = self.calibration.scores.unsqueeze(1).expand(nodes.shape[1:])
            yield bands.at(-scores), bands.at(scores)

    def _blocks(self, per_element: int) -> Iterator[Predictive]:
        width = self.calibration.scores.numel() * per_element
        yield from _split(self.bayesian, max(1, BLOCK_VALUES // width))


def _split(predictive: Predictive, size: int) -> Iterator[Predictive]:
    for some in torch.arange(predictive.rows).split(size):
        yield predictive.subset(some)


def _own_scores(predictive: Predictive, y: Tensor, weights: Tensor, settings: Settings) -> Iterator[Tensor]:
    """Yield the scores of rows under their own leave-one-out predictive, block by block."""
    size = max(1, BLOCK_VALUES // (predictive.draws * len(NODES)))
    start = 0
    for part in _split(predictive, size):
        rows = slice(start, start + part.rows)
        start += part.rows
        own = part.prepared(y[rows])
        if not has_labels(part):
            values, cdf = _at_nodes(part)
            nodes = _shifted(torch.einsum("sn,sgn...->gn...", weights[:, rows], cdf))
            yield Bands(nodes, values).score(part.likelihood.restore(own).double().cpu())
            continue
        p = torch.einsum("sn,sn...->n...", weights[:, rows], _per_draw(part))
        yield _scores_of(p, part, settings).gather(-1, label_indices(part, own).unsqueeze(-1)).squeeze(-1)


def _at_nodes(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Return the quantiles of the mixture at the nodes, (G, N, ...), and each draw's CDF there, (S, G, N, ...)."""
    values = Bands.of(predictive).values
    found = []
    for node in values:
        target = predictive.prepared(node)

        def block(output: Tensor, extra: dict[str, Tensor], start: int, target: Tensor = target) -> Tensor:
            return predictive.likelihood.cdf(output, target[start : start + output.shape[1]], extra).double().cpu()

        found.append(predictive.likelihood.restore(torch.cat(list(predictive.map_blocks(block)), 1), 1))
    return values, torch.stack(found, 1)


def _shifted(cdf: Tensor) -> Tensor:
    """Return the index of each node under leave-one-out probabilities (G, ...)."""
    nominal = torch.tensor(NODES, dtype=torch.float64).reshape(-1, *[1] * (cdf.ndim - 1))
    found = torch.special.ndtri(cdf.clamp(0, 1))
    return torch.minimum(torch.maximum(found, nominal - MOST_SHIFT), nominal + MOST_SHIFT).cummax(0).values


def _per_draw(predictive: Predictive) -> Tensor:
    """Return the class probabilities of each draw, (S, N, ..., K)."""
    likelihood = predictive.likelihood

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> Tensor:
        return likelihood.moments(output, extra)[0].double().cpu()

    p = torch.cat(list(predictive.map_blocks(block)), 1)
    if likelihood.support == "class":
        return p
    p = likelihood.restore(p, 1)
    return torch.stack([1 - p, p], -1)


def _scores_of(p: Tensor, predictive: Predictive, settings: Settings) -> Tensor:
    """Return the score of every label at the rows of a predictive, from probabilities (..., N, ..., K)."""
    u = uniforms(predictive.x, settings.seed, tuple(predictive.probabilities.shape[1:-1]))
    return label_scores(p, u, settings.penalty if settings.score == "raps" else 0.0, settings.penalty_from)
