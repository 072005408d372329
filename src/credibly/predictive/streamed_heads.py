"""Predictions of several heads at rows that are read batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from credibly.core.inputs import Inputs
from credibly.errors import InputError
from credibly.likelihoods import Heads
from credibly.predictive.heads import HeadsPredictive, OneHead
from credibly.predictive.source import DrawSource
from credibly.predictive.streamed import RowReader, StreamedPredictive


class StreamedHeadsPredictive(HeadsPredictive, StreamedPredictive):
    """Predictions of several heads at the rows of a loader: `predictive["name"]` is the `StreamedPredictive` of one.

    Every query of a head takes a pass over the loader. `targets` are dicts by head.
    """

    def subset(self, rows: Tensor) -> HeadsPredictive:
        """Read the given rows (indices or a boolean mask) into memory and return their predictions."""
        return HeadsPredictive(self._source, self.read(rows))

    def _predictive_of(self, name: str, source: OneHead) -> StreamedPredictive:
        return StreamedPredictive(source, _HeadReader(self.reader, name))


class _HeadReader:
    """The rows of a loader, with the targets of one head."""

    def __init__(self, inner: RowReader, name: str) -> None:
        self.inner, self.name = inner, name
        self.count, self.head = inner.count, inner.head

    def blocks(self) -> Iterator[Inputs]:
        return self.inner.blocks()

    def targets(self) -> Tensor:
        found = self.inner.targets()
        if isinstance(found, Tensor):
            raise InputError("targets", "are not by head", "The targets in the loader must be a dict")
        return found[self.name]


def streamed_predictive_of(source: DrawSource, reader: RowReader) -> StreamedPredictive:
    """Return the predictive of a source at the rows of a reader: with one likelihood, or with several heads."""
    return (StreamedHeadsPredictive if isinstance(source.likelihood, Heads) else StreamedPredictive)(source, reader)
