"""Predictions of rows by several fits, such as those of a cross-validation, as one `Predictive`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from credibly.core.inputs import map_inputs, to_values
from credibly.errors import InputError
from credibly.predictive.base import Predictive

T = TypeVar("T")


class JoinedPredictive(Predictive):
    """Predictions of different rows by different fits with the same likelihood, in the given order.

    Methods that need one set of draws for all rows (`functions`, `map_blocks`) are not available. `places` is the given
    order.

    Args:
        parts: predictions by each fit.
        order: for each row of the parts in turn, its position in the result; a permutation.
    """

    def __init__(self, parts: Sequence[Predictive], order: Tensor) -> None:
        self.parts = tuple(parts)
        rows = sum(len(part) for part in self.parts)
        if order.shape != (rows,) or not torch.equal(order.sort().values, torch.arange(rows)):
            raise InputError("order", f"must be a permutation of {rows} rows, got shape {tuple(order.shape)}")
        self.places = order
        self._order = order.argsort()
        super().__init__(self.parts[0].source, map_inputs(lambda t: t[:0], self.parts[0].x))
        self.rows = rows
        self.draws = max(part.draws for part in self.parts)

    # -- moments and the decomposition -------------------------------------------------------------------------------
    @property
    def mean(self) -> Tensor:
        """E[y | x, D], as in `Predictive`."""
        return self._joined(lambda part, _: part.mean)

    @property
    def variance(self) -> Tensor:
        """Var[y | x, D]."""
        return self._joined(lambda part, _: part.variance)

    @property
    def std(self) -> Tensor:
        """Standard deviation of y."""
        return self.variance.sqrt()

    @property
    def total(self) -> Tensor:
        """Total uncertainty."""
        return self._joined(lambda part, _: part.total)

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not remove."""
        return self._joined(lambda part, _: part.aleatoric)

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty about the model."""
        return self._joined(lambda part, _: part.epistemic)

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities (N, ..., K)."""
        return self._joined(lambda part, _: part.probabilities)

    # -- densities, quantiles, samples -------------------------------------------------------------------------------
    def log_prob(self, y: object) -> Tensor:
        """Return the log predictive density of each row."""
        target = self._rows_of(y)
        return self._joined(lambda part, rows: part.log_prob(target[rows]))

    def cdf(self, y: object) -> Tensor:
        """Return P(Y <= y | x, D)."""
        target = self._rows_of(y)
        return self._joined(lambda part, rows: part.cdf(target[rows]))

    def quantile(self, level: float | Sequence[float]) -> Tensor:
        """Return quantiles, in the shape of the mean; (levels, N, ...) for several levels."""
        axis = 0 if isinstance(level, (int, float)) else 1
        return self._joined(lambda part, _: part.quantile(level), axis)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the intervals of the parts, (lower, upper)."""
        both = [part.interval(level) for part in self.parts]
        lower, upper = (torch.cat([pair[i] for pair in both])[self._order] for i in (0, 1))
        return lower, upper

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Return the prediction sets of the parts."""
        return self._joined(lambda part, _: part.prediction_set(level))

    def sample(self, count: int = 1, *, seed: int = 0) -> Tensor:
        """Draw samples of y, (count, N, ...)."""
        return self._joined(lambda part, _: part.sample(count, seed=seed), 1)

    def prepared(self, y: object) -> Tensor:
        """Return observed y in the layout and dtype of the likelihood."""
        target = self._rows_of(y)
        return self._joined(lambda part, rows: part.prepared(target[rows]))

    def subset(self, rows: Tensor) -> Predictive:
        """Return the predictions at the given rows (indices or a boolean mask)."""
        wanted = torch.arange(self.rows)[rows.cpu()]
        kept, places, start = [], [], 0
        for part in self.parts:
            # The position of each wanted row within the part, if it is there.
            local = self._order[wanted] - start
            inside = (local >= 0) & (local < len(part))
            if bool(inside.any()):
                kept.append(part.subset(local[inside]))
                places.append(torch.nonzero(inside).flatten())
            start += len(part)
        if not kept:
            return self.parts[0].subset(torch.zeros(0, dtype=torch.int64))
        if len(kept) == 1:
            return kept[0]
        return JoinedPredictive(kept, torch.cat(places))

    def functions(self, count: int | None = None) -> Tensor:
        """Raise: the parts have different draws."""
        raise self._unavailable("functions")

    def map_blocks(self, function: Callable[[Tensor, dict[str, Tensor], int], T]) -> Iterator[T]:
        """Raise: the parts have different draws."""
        raise self._unavailable("map_blocks")

    def _joined(self, function: Callable[[Predictive, Tensor], Tensor], axis: int = 0) -> Tensor:
        """Return the results of all parts in the order of the rows; `function` gets a part and its rows."""
        found, start = [], 0
        for part in self.parts:
            found.append(function(part, self.places[start : start + len(part)]))
            start += len(part)
        return torch.cat(found, axis).index_select(axis, self._order)

    def _rows_of(self, y: object) -> Tensor:
        value = to_values(y, "y")
        if len(value) != self.rows:
            raise InputError("y", f"has {len(value)} rows, these predictions have {self.rows}")
        return value

    def _unavailable(self, name: str) -> InputError:
        return InputError(name, "needs the draws of one fit, but these are from several", "Use one of `parts`")
