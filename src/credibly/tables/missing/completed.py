"""Predictions of rows with missing cells: mixtures over posterior draws and completions of the row.

Draw s of the weights predicts from completion c(s), so the mixture

    p(y | x_o, D) ~ (1/S) sum_s p(y | x_o, x_m^c(s), w_s)

has as many terms as that of a complete row, and costs as much. The variance of E(y | x_o, x_m, w) over completions is
part of the epistemic uncertainty: knowing the missing value would remove it, so it is not noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from credibly.core.inputs import Inputs
from credibly.predictive.base import Predictive
from credibly.predictive.source import DrawSource
from credibly.tables.columns.scaling import STANDARD, InputScaling
from credibly.tables.missing.imputation import Array, Donors

# Consecutive draws share a completion, so that they are evaluated together: at most this many groups, enough that every
# chain uses every completion.
RUNS = 240
# A posterior of fewer draws, such as a point estimate, repeats them, to average over this many completions.
LEAST_DRAWS = 10


class Gapped(NamedTuple):
    """Inputs of rows with gaps.

    Attributes:
        values: encoded inputs, (N, P), NaN in the gaps.
        donors: donors of each row, (N, M).
    """

    values: Tensor
    donors: Tensor

    @property
    def row_key(self) -> Tensor:
        """Values that identify each row (see `core.inputs`): for complete rows, those of a block without gaps."""
        return self.values


def predict_gaps(
    predict: Callable[[Array], Predictive], x: Array, donors: Donors, scaling: InputScaling = STANDARD
) -> Predictive:
    """Return the predictive at inputs with NaN for missing values, averaged over their completions.

    Rows without gaps are predicted as by `predict`: bit-for-bit, unless the posterior has fewer than `LEAST_DRAWS`
    draws, where sums are rounded differently.

    Args:
        predict: prediction at complete inputs.
        x: standardised inputs, (N, P).
        donors: training rows that completions come from.
        scaling: further encoding of the inputs that `predict` applies.
    """
    missing = np.isnan(x)
    if not missing.any():
        return predict(x)
    complete = predict(np.where(missing, donors.mean, x).astype(x.dtype))
    values = complete.x
    assert isinstance(values, Tensor)
    nearest = torch.from_numpy(donors.nearest(x)).to(values.device)
    encoded = missing[:, scaling.origins(x.shape[1])]
    gapped = Gapped(values.masked_fill(torch.from_numpy(encoded).to(values.device), torch.nan), nearest)
    table = torch.from_numpy(scaling(donors.rows)).to(values)
    source = complete.source
    if source.count < LEAST_DRAWS:
        source = _Repeated(source, -(-LEAST_DRAWS // source.count))
    return Predictive(CompletedDraws(source, table), gapped)


class CompletedDraws:
    """A source whose draws predict rows with gaps from different completions; x is `Gapped`."""

    def __init__(self, inner: DrawSource, donors: Tensor) -> None:
        self.inner = inner
        self.donors = donors
        self.likelihood = inner.likelihood
        self.count = inner.count
        self.run = max(1, inner.count // RUNS)

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the outputs of draws start to stop, (stop - start, rows, ..., K)."""
        assert isinstance(x, Gapped)
        values, donors = x
        missing = values.isnan()
        found = self.inner.outputs(values.masked_fill(missing, 0.0), start, stop, first_row)
        rows = missing.any(1).nonzero()[:, 0]
        if not len(rows):
            return found
        values, missing, donors = values[rows], missing[rows], donors[rows].long()
        for first, last in segments(start, stop, self.run):
            donor = donors[:, first // self.run % donors.shape[1]]
            completed = torch.where(missing, self.donors[donor], values)
            found[first - start : last - start, rows] = self.inner.outputs(completed, first, last, first_row)
        return found

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in those draws."""
        return self.inner.extra(start, stop)

    def row_width(self) -> int:
        """Return the number of activations in a forward pass of one row under one draw."""
        return self.inner.row_width()

    def cpp_width(self) -> int | None:
        """Return how many values one row takes in the C++ backend; None if it is unused."""
        width = getattr(self.inner, "cpp_width", None)
        return width() if width is not None else None


class _Repeated:
    """A source with its draws repeated."""

    def __init__(self, inner: DrawSource, times: int) -> None:
        self.inner = inner
        self.likelihood = inner.likelihood
        self.count = inner.count * times

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        one = self.inner.count
        ranges = [(first % one, first % one + last - first) for first, last in segments(start, stop, one)]
        return torch.cat([self.inner.outputs(x, *span, first_row) for span in ranges])

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        index = torch.arange(start, stop) % self.inner.count
        return {name: value[index.to(value.device)] for name, value in self.inner.extra(0, self.inner.count).items()}

    def row_width(self) -> int:
        return self.inner.row_width()


def segments(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield start to stop cut at the multiples of `length`."""
    while start < stop:
        end = min(stop, (start // length + 1) * length)
        yield start, end
        start = end
