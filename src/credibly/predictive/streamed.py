"""Predictions of rows that are read batch by batch: only results are kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, row_count
from credibly.errors import InputError
from credibly.predictive.base import Predictive
from credibly.predictive.source import DrawSource

T = TypeVar("T")


class RowReader(Protocol):
    """Rows that can be read as often as needed, in the same order.

    Attributes:
        count: number of rows.
        head: some rows, for trial passes.
    """

    count: int
    head: Inputs

    def blocks(self) -> Iterator[Inputs]:
        """Yield the inputs in blocks of rows, on the network's device."""

    def targets(self) -> Tensor:
        """Return the targets of all rows, or raise if there are none."""


class StreamedPredictive(Predictive):
    """Predictions of the rows of a loader, in the order of its data set.

    Moments take one pass over the loader and are kept; every other question (intervals, densities, samples) takes a
    pass of its own. `targets` are those of the loader, if its batches have any.
    """

    def __init__(self, source: DrawSource, reader: RowReader) -> None:
        super().__init__(source, reader.head)
        self.reader = reader
        self.rows = reader.count

    @cached_property
    def targets(self) -> Tensor:
        """The targets of the loader's rows, in the order of the predictions."""
        return self.reader.targets()

    @property
    def x(self) -> Inputs:
        """Raise: the inputs are not in memory."""
        raise InputError("x", "is read from a loader, and not kept in memory", "Iterate over the loader")

    def subset(self, rows: Tensor) -> Predictive:
        """Raise: the inputs are not in memory."""
        raise InputError("rows", "cannot be chosen: inputs are read from a loader", "Predict a Subset of the data set")

    def map_blocks(self, function: Callable[[Tensor, dict[str, Tensor], int], T]) -> Iterator[T]:
        """Call `function(outputs, extra, start)` on the batches of the loader, in one pass, and yield what it returns.

        Args:
            function: receives the outputs of the batch under every draw, (S, rows, ..., K); the likelihood's own
                parameters, each (S, ...); and the index of the batch's first row.
        """
        extra, start = self._source.extra(0, self.draws), 0
        with torch.no_grad():
            for block in self.reader.blocks():
                yield function(self._outputs(block, start), extra, start)
                start += row_count(block)

    def _fits(self) -> bool:
        return False
