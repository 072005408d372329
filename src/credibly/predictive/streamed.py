"""Predictions of rows that are read batch by batch: only results are kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, map_inputs, row_count, tensors_of
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

    def targets(self) -> Tensor | dict[str, Tensor]:
        """Return the targets of all rows, by name for several heads, or raise if there are none."""


def uneven(name: str, what: str, first: Sequence[int], other: Sequence[int]) -> InputError:
    """Return the error for rows whose results have another shape than those of earlier batches."""
    found = f"its rows have {what} of shape {tuple(first)} in one batch and {tuple(other)} in another"
    advice = "Pad all rows to one length, e.g. by credibly.data.Pad(length=...), or predict batch by batch"
    return InputError(name, found, f"{advice}: [posterior.predict(x) for x, _ in loader]")


class StreamedPredictive(Predictive):
    """Predictions of the rows of a loader, in the order of its data set or of the rows that its sampler names.

    Moments take one pass over the loader and are kept; everything else (intervals, densities, samples) takes a separate
    pass. `targets` are those of the loader, if its batches have any.
    """

    def __init__(self, source: DrawSource, reader: RowReader) -> None:
        super().__init__(source, reader.head)
        self.reader = reader
        self.rows = reader.count

    @cached_property
    def targets(self) -> Tensor | dict[str, Tensor]:
        """The targets of the loader's rows, in the order of the predictions, by name for several heads."""
        return self.reader.targets()

    @property
    def x(self) -> Inputs:
        """Inputs without rows: those of the loader are not kept in memory."""
        return map_inputs(lambda t: t[:0], self._x)

    def subset(self, rows: Tensor) -> Predictive:
        """Read the given rows (indices or a boolean mask) into memory and return their predictions."""
        return Predictive(self._source, self.read(rows))

    def read(self, rows: Tensor) -> Inputs:
        """Return the inputs of the given rows (indices or a boolean mask), from one pass over the loader."""
        wanted = torch.arange(self.rows)[rows.cpu()]
        places, kept, start = wanted.argsort(), [], 0
        ordered = wanted[places]
        for block in self.reader.blocks():
            inside = ordered[(ordered >= start) & (ordered < start + row_count(block))] - start
            kept.append(map_inputs(lambda t, i=inside: t[i.to(t.device)], block))  # type: ignore[misc]
            start += row_count(block)
        columns = zip(*([t for _, t in tensors_of(some)] for some in kept), strict=True)
        joined = iter([torch.cat(column)[places.argsort().to(column[0].device)] for column in columns])
        return map_inputs(lambda _: next(joined), self._x)

    def map_blocks(self, function: Callable[[Tensor, dict[str, Tensor], int], T]) -> Iterator[T]:
        """Call `function(outputs, extra, start)` on the batches of the loader, in one pass, and yield what it returns.

        Args:
            function: receives the outputs of the batch under every draw, (S, rows, ..., K); the likelihood's own
                parameters, each (S, ...); and the index of the batch's first row.
        """
        extra, start = self._source.extra(0, self.draws), 0
        shape: torch.Size | None = None
        with torch.no_grad():
            for block in self.reader.blocks():
                outputs = self._outputs(block, start)
                shape = outputs.shape[2:] if shape is None else shape
                if outputs.shape[2:] != shape:
                    raise uneven("x", "outputs", shape, outputs.shape[2:])
                yield function(outputs, extra, start)
                start += row_count(block)

    def _fits(self) -> bool:
        return False
