"""The interface between posteriors and predictions."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from credibly.core.inputs import Inputs
from credibly.likelihoods import Likelihood


class DrawSource(Protocol):
    """The interface that a `Predictive` needs from a posterior: network outputs for a range of draws.

    A source may also have `cpp_width()`, the values per row that the C++ backend keeps (None if it cannot be used),
    and `outputs_per_row`, the number of outputs per row and draw, which saves a trial pass.
    """

    likelihood: Likelihood
    count: int

    def outputs(self, x: Inputs, start: int, stop: int, first_row: int = 0) -> Tensor:
        """Return the outputs (stop - start, rows, ..., K) of draws start to stop; `first_row` is the index of x[0]."""

    def extra(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in those draws."""

    def row_width(self) -> int:
        """Return the number of activations in a forward pass of one row under one draw."""
