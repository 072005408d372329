"""Prediction at the rows of a loader: `posterior.predict(loader)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from credibly.core.batch_items import inputs_of, split_item
from credibly.core.inputs import Inputs, map_inputs, row_count, to_inputs
from credibly.core.loading import MOST_COUNTED, as_loader
from credibly.core.row_order import in_order
from credibly.core.stream import Stream
from credibly.core.stream_pass import Pass
from credibly.errors import InputError
from credibly.posterior.base import Posterior
from credibly.posterior.model import Model
from credibly.predictive.base import Predictive
from credibly.predictive.streamed import uneven
from credibly.predictive.streamed_heads import streamed_predictive_of

P = ParamSpec("P")
Own = TypeVar("Own", bound=Posterior)


class LoaderRows:
    """The rows of a loader for one model, in the order of `in_order` at every pass."""

    def __init__(self, loader: DataLoader[Any], model: Model, target: str | None = None) -> None:
        self.model, self.target = model, target
        if not isinstance(loader.dataset, IterableDataset):
            # Without shuffling and without drop_last, so that every row is predicted, in order.
            loader = in_order(loader, "x", pin_memory=loader.pin_memory)
        self.loader = loader
        first = next(iter(self._given()), None)
        if first is None:
            raise InputError("x", "is a loader without rows", "Pass at least one row")
        self.first, self.head = first, model.inputs(first)
        self.count = self._count()

    def _count(self) -> int:
        dataset = self.loader.dataset
        if hasattr(dataset, "__len__") and self.loader.batch_size is not None:
            return len(dataset if isinstance(dataset, IterableDataset) else self.loader.sampler)  # type: ignore[arg-type]
        rows = 0
        for block in self._given():
            rows += row_count(block)
            if rows > MOST_COUNTED:
                raise InputError(
                    "x",
                    f"did not end within {MOST_COUNTED:,} rows",
                    "Predict batch by batch: [posterior.predict(x) for x, _ in islice(loader, batches)]",
                )
        return rows

    def blocks(self) -> Iterator[Inputs]:
        """Yield what the model takes of every batch: its inputs, or the activations of a frozen body."""
        frozen = self.model.frozen
        for x in self._given():
            yield x if frozen is None else frozen.features(x)

    def _given(self) -> Iterator[Inputs]:
        """Yield the inputs of every batch, on the network's device."""
        host, device = torch.device("cpu"), self.model.layout.device
        for item in Pass(self.loader, 0, "prediction", 0):
            x = to_inputs(
                inputs_of(item, self.model.row, self.target), host, self.model.layout.input_dtype, convert=True
            )
            yield map_inputs(lambda t: t.to(device, non_blocking=True), self.model.as_fitted(x))

    def targets(self) -> Tensor | dict[str, Tensor]:
        """Return the targets of all rows, by name for several heads."""
        batches = [split_item(item, self.target)[1] for item in Pass(self.loader, 0, "prediction", 0)]
        if not isinstance(batches[0], Mapping):
            return _joined([torch.as_tensor(y) for y in batches], "targets")
        return {name: _joined([torch.as_tensor(y[name]) for y in batches], f"targets[{name!r}]") for name in batches[0]}


def _joined(parts: list[Tensor], name: str) -> Tensor:
    for part in parts:
        if part.shape[1:] != parts[0].shape[1:]:
            raise uneven(name, "targets", parts[0].shape[1:], part.shape[1:])
    return torch.cat(parts)


def reads_loaders(
    predict: Callable[Concatenate[Own, Any, P], Predictive],
) -> Callable[Concatenate[Own, Any, P], Predictive]:
    """Let a posterior's `predict` take a DataLoader, a Dataset, a `Stream` or rows, which are read batch by batch."""

    @functools.wraps(predict)
    def wrapped(self: Own, x: Any, /, *args: P.args, **options: P.kwargs) -> Predictive:
        given = x.loader if isinstance(x, Stream) else as_loader(x, pairs=False)
        if given is None:
            return predict(self, x, *args, **options)
        rows = LoaderRows(given, self.model, x.target if isinstance(x, Stream) else None)
        return streamed_predictive_of(predict(self, rows.first, *args, **options).source, rows)

    return wrapped
