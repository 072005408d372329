"""The rows that a loader reads, in an order that no shuffle changes, whatever its sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from credibly.core.stream_pass import Pass, sampler_of
from credibly.errors import InputError

# Rows per batch while a data set is read.
READ_ROWS = 256
# Number of indices after which a sampler counts as endless, if it exceeds ten passes over the data set.
MOST_INDICES = 1_000_000


def in_order(loader: DataLoader[Any], argument: str = "data", *, pin_memory: bool = False) -> DataLoader[Any]:
    """Return a loader of the rows that the sampler names, in the same order in every pass, without drop_last.

    Loaders that shuffle have the order of the data set, or that of the indices of a `SubsetRandomSampler`. Any other
    sampler is read twice: its own order is kept if it is the same both times, else the rows are sorted. Raise if the
    rows differ, since N is then undefined. The random states of the process do not change.
    """
    # Without batches of its own, the loader passes each item of the data set on as a batch.
    ready = loader.batch_sampler is None
    sampler: Any = loader.sampler if ready else loader.batch_sampler
    rows = _named_rows(sampler, loader, argument)
    size = getattr(sampler, "batch_size", None) or READ_ROWS
    batched: Any = BatchSampler(rows, size, drop_last=False) if ready and isinstance(sampler, BatchSampler) else rows
    return DataLoader(
        loader.dataset,
        batch_size=None if ready else size,
        sampler=batched,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=pin_memory,
    )


def _named_rows(sampler: Any, loader: DataLoader[Any], argument: str) -> Sequence[Any]:
    """Return the indices that a sampler, or a sampler of batches, names in every pass."""
    # Subclasses may iterate in another way: only these exact classes are known.
    if type(sampler) is BatchSampler:
        return _named_rows(sampler.sampler, loader, argument)
    kind = type(sampler).__name__
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        found = f"has a {kind}, which gives each of {sampler.num_replicas} processes other rows"
        advice = "Pass a loader without it in every process: credibly distributes the work itself"
        raise InputError(argument, found, advice)
    if getattr(sampler, "replacement", False):
        raise _undefined(argument, f"has a {kind} that draws rows with replacement")
    if type(sampler) in (SequentialSampler, RandomSampler):
        return range(len(sampler.data_source))
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices)
    # The epoch of the second pass, zero, is that of a new sampler.
    first, second = (_read_indices(sampler, loader, argument, epoch) for epoch in (1, 0))
    if first == second:
        return second
    if Counter(first) != Counter(second):
        raise _undefined(argument, f"has a {kind} that names different rows in every pass")
    return sorted(second)


def _read_indices(sampler: Any, loader: DataLoader[Any], argument: str, epoch: int) -> list[Any]:
    """Return the indices of one pass, from a fixed seed, and restore the generators of the loader and its sampler."""
    batches = sampler is loader.batch_sampler
    options = {"batch_sampler": sampler} if batches else {"sampler": sampler, "batch_size": None}
    indices: DataLoader[Any] = DataLoader(_Indices(), collate_fn=_unchanged, **options)
    generator = getattr(sampler_of(indices), "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    state = None if generator is None else generator.get_state()
    most = max(MOST_INDICES, 10 * len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0)
    found: list[Any] = []
    items: Iterable[Any] = Pass(indices, 0, "row order", epoch)
    for index in chain.from_iterable(items) if batches or isinstance(sampler, BatchSampler) else items:
        found.append(_hashable(index))
        if len(found) > most:
            raise _undefined(argument, f"has a {type(sampler).__name__} that does not end")
    if generator is not None and state is not None:
        generator.set_state(state)
    return found


class _Indices(Dataset[Any]):
    """A data set whose items are their own indices."""

    def __getitem__(self, index: Any) -> Any:
        return index


def _unchanged(items: Any) -> Any:
    return items


def _hashable(index: Any) -> Any:
    index = index.tolist() if isinstance(index, torch.Tensor) else index
    return tuple(index) if isinstance(index, list) else index


def _undefined(argument: str, found: str) -> InputError:
    if argument == "x":
        return InputError(argument, f"{found}, so predictions match no rows", "Pass a loader without it")
    advice = "Stream it, with a pass as N: credibly.data.Stream(loader); or pass a loader without it"
    return InputError(argument, f"{found}, so the number of rows is not defined", advice)
