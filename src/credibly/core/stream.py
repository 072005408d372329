"""Data that are read batch by batch: they need not fit into memory, and every pass may see different augmentations.

N is the number of distinct rows. It stays the same however often, and in however many versions, a row is seen: a batch
B of a pass estimates the log likelihood of all rows by (N / |B|) times its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from credibly.core.batch_items import collate_rows, names_of, split_item
from credibly.core.checks import check_integer
from credibly.core.inputs import Inputs, describe, map_inputs, to_inputs, to_tensor
from credibly.core.loading import (
    MEMORY_FRACTION,
    MOST_COUNTED,
    STREAM_ROWS,
    as_loader,
    host_memory,
    join_batches,
    rows_of,
    size_of,
)
from credibly.core.progress import Progress
from credibly.core.rows import Rows
from credibly.core.stream_pass import Pass, sampler_of
from credibly.errors import InputError

# Rows in memory for trial passes and estimates: their number, the minimum number of batches, and the maximum bytes.
SAMPLE_ROWS, SAMPLE_BATCHES, SAMPLE_BYTES = 2048, 8, 2**28


class Stream:
    """A loader that is read batch by batch, pass after pass: `Problem(net, Stream(loader), ...)`.

    Batch size, shuffling, workers and pinned memory are the loader's own. Every pass draws its own shuffle and its own
    augmentations, from the seed of the fit: the random generators of torch (and of the loader and its sampler), numpy
    and Python are set for each pass, and those of the process restored.

    Args:
        loader: a DataLoader, or a Dataset (map-style ones are shuffled, in batches of 128).
        n: number of distinct rows. None uses the length of the data set, or counts the rows of one pass. A stream
            that never ends needs it: n rows are then one pass.
        target: name of the target in batches that are mappings, dataclasses or named tuples; None uses "labels",
            "label", "y", "targets" or "target".
        progress: whether to show a progress bar while rows are counted; None shows it on a terminal.
    """

    def __init__(
        self, loader: Any, n: int | None = None, *, target: str | None = None, progress: bool | None = None
    ) -> None:
        if n is not None:
            check_integer("n", n)
        self.loader, self.target, self.reason = _loader_of(loader), target, "asked for"
        known = _length(self.loader)
        if n is not None and known is not None and n != known:
            raise InputError("n", f"must be the number of rows of the data set, {known:,}, got {n:,}", "Leave it out")
        # The first rows of the first pass, kept in memory, with their raw batches joined.
        self.head: tuple[Any, Any]
        self.batch, counted = self._read_head(count=n is None and known is None, progress=progress)
        self.n = n or known or counted
        # A stream of unknown length may continue after n rows: the next pass then resumes there.
        self.open_ended = known is None and n is not None
        self.drops = bool(self.loader.drop_last or getattr(self.loader.batch_sampler, "drop_last", False))
        self.batches = max(1, self.n // self.batch if self.drops else -(-self.n // self.batch))
        if known is not None and self.loader.batch_size is None:
            self.batches = len(self.loader)

    def _read_head(self, *, count: bool, progress: bool | None) -> tuple[int, int]:
        """Read the first batches, or all of them to count the rows; return the rows of a batch, and of all of them."""
        kept: list[tuple[Any, Any]] = []
        first = rows = size = 0
        wanted = True
        with Progress("counting rows", MOST_COUNTED, progress) as line:
            for item in Pass(self.loader, 0, "head", 0):
                pair = split_item(item, self.target)
                own = rows_of(pair)
                first, rows = first or own, rows + own
                if wanted:
                    kept.append(pair)
                    size += size_of(pair)
                enough = len(kept) >= SAMPLE_BATCHES and sum(rows_of(p) for p in kept) >= SAMPLE_ROWS
                wanted = wanted and not enough and (size < SAMPLE_BYTES or len(kept) < 2)
                if not wanted and not count:
                    break
                if rows > MOST_COUNTED:
                    raise InputError(
                        "n",
                        f"must be given: the stream did not end within {MOST_COUNTED:,} rows",
                        "Pass the number of distinct rows, credibly.data.Stream(loader, n=...); for an endless stream, "
                        "the number of rows that it stands for",
                    )
                line.update(rows)
        self.head = join_batches(_equal_shapes(kept))
        return first, rows

    def describe(self) -> dict[str, Any]:
        """Return the entries that describe the stream in the record of a fit."""
        loader = self.loader
        return {
            "rows": self.n,
            "batch": self.batch,
            "batches": self.batches,
            "reason": self.reason,
            "shuffled": not isinstance(sampler_of(loader), SequentialSampler),
            "workers": loader.num_workers,
            # Workers that survive a pass keep random states that no seed resets.
            "reproducible": not loader.persistent_workers and not self.open_ended,
        }

    def __repr__(self) -> str:
        return f"Stream({self.n:,} rows, {self.batches:,} batches of {self.batch}; {self.reason})"


@dataclass
class BoundStream:
    """A stream as the rows of one problem: in its dtype, on its device, with prepared targets.

    Attributes:
        stream: the stream to read.
        device, dtype: device and dtype of the network's inputs.
        prepare: function that checks targets (a mapping for several heads) and returns the likelihood's layout of them.
    """

    stream: Stream
    device: torch.device
    dtype: torch.dtype
    prepare: Callable[[Any], Tensor]

    @property
    def n(self) -> int:
        """Number of distinct rows."""
        return self.stream.n

    @property
    def batch(self) -> int:
        """Rows per batch; the last of a pass may have fewer."""
        return self.stream.batch

    @property
    def batches(self) -> int:
        """Batches per pass."""
        return self.stream.batches

    def rows(self, item: Any) -> Rows:
        """Return a raw batch on the device; copies from pinned memory do not block."""
        raw_x, raw_y = split_item(item, self.stream.target)
        host = torch.device("cpu")
        # Checked on the host: on a GPU every check would wait for the copy.
        x: Inputs = to_inputs(raw_x, host, self.dtype, convert=True)
        y = self.prepare(raw_y if isinstance(raw_y, Mapping) else to_tensor(raw_y, "y", host, None, convert=True))
        return Rows(map_inputs(self._moved, x), self._moved(y))

    def _moved(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)

    def passes(self, seed: int, purpose: str, skip: int = 0) -> Iterator[Rows]:
        """Yield batches without end, pass after pass, after the first `skip`. Raise if the length of a pass changes."""
        index, offset = divmod(skip, self.batches)
        going: Iterator[Any] | None = None
        while True:
            one = Pass(self.stream.loader, seed, purpose, index, going)
            # Rows that were read before a resume count as read.
            done = sum(rows_of(split_item(item, self.stream.target)) for item in islice(one, offset))
            read, going = offset, None
            for item in one:
                rows = self.rows(item)
                read, done = read + 1, done + len(rows.y)
                if done > self.n and not self.stream.open_ended:
                    raise self._changed(f"more than {self.n:,}")
                yield rows
                if self.stream.open_ended and done >= self.n:
                    more = list(islice(one, 1))
                    going = chain(more, one.items) if more else None
                    break
            complete = done >= self.n or (self.stream.drops and read == self.batches)
            if read == 0 or (not complete and self._sized):
                raise self._changed(f"{done:,}")
            index, offset = index + 1, 0

    @property
    def _sized(self) -> bool:
        sampler = sampler_of(self.stream.loader)
        return isinstance(self.stream.loader.dataset, IterableDataset) or isinstance(
            sampler, (RandomSampler, SequentialSampler)
        )

    def _changed(self, found: str) -> InputError:
        return InputError(
            "data",
            f"its length changes: a pass had {found} rows, N is {self.n:,}",
            "Every pass must have the same rows, in any order and in any version; or pass n= for a stream without end",
        )

    def one_pass(self) -> Iterator[Rows]:
        """Yield the batches of one pass, the same in every call if the loader is reproducible."""
        yield from islice(self.passes(0, "pass"), self.batches)

    def fingerprint(self) -> str:
        """Return a hash of N and the form of a row, but not of values, which differ from pass to pass."""
        form = describe(to_inputs(self.stream.head[0], torch.device("cpu"), self.dtype, convert=True))
        return hashlib.sha256(f"stream {self.n} {form}".encode()).hexdigest()[:32]


def as_stream(data: Any) -> Stream | None:
    """Return a stream if the data are one, do not fit into memory, or change from read to read; None otherwise."""
    if isinstance(data, Stream):
        return data
    if isinstance(data, TensorDataset) or isinstance(getattr(data, "dataset", None), TensorDataset):
        return None
    loader = as_loader(data)
    if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    rows = len(loader.dataset)  # type: ignore[arg-type]
    if not rows:
        return None
    item = loader.dataset[0]
    size, most = size_of(item) * rows, MEMORY_FRACTION * host_memory()
    reason = ""
    if size > most:
        reason = f"about {size / 2**30:,.1f} GiB, more than a quarter of the memory"
    elif not _equal(item, loader.dataset[0]):
        reason = "augmented: reading a row twice gives different values"
    if not reason:
        return None
    found = Stream(data)
    found.reason = reason
    return found


def needs_memory(bound: BoundStream, what: str = "this needs all rows in memory") -> InputError:
    """Return the error for something that cannot work on a stream, with the size of its rows and the way out."""
    head = bound.stream.head
    size = size_of(head) * bound.n / max(1, rows_of(head))
    return InputError(
        "data",
        f"is a stream of {bound.n:,} rows, and {what} (about {_size(size)})",
        "Read it once, with one version of each row: data=credibly.data.in_memory(loader); or use a method that "
        "trains or samples on minibatches",
    )


def _size(count: float) -> str:
    unit = next((u for u in (30, 20, 10) if count >= 2**u), 0)
    return f"{count / 2**unit:,.1f} {({30: 'GiB', 20: 'MiB', 10: 'KiB', 0: 'bytes'})[unit]}"


def _loader_of(data: Any) -> DataLoader[Any]:
    loader = as_loader(data)
    if loader is None:
        raise InputError("loader", f"must be a DataLoader or a Dataset, got {type(data).__name__}")
    if isinstance(data, DataLoader):
        return loader
    shuffled = not isinstance(loader.dataset, IterableDataset)
    return DataLoader(loader.dataset, batch_size=STREAM_ROWS, shuffle=shuffled, collate_fn=collate_rows)


def _length(loader: DataLoader[Any]) -> int | None:
    """Return the number of distinct rows, None if only a pass can determine it."""
    if loader.batch_size is None and not isinstance(loader.batch_sampler, torch.utils.data.BatchSampler):
        return None
    if isinstance(loader.dataset, IterableDataset):
        return len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    sampler = sampler_of(loader)
    if isinstance(sampler, (RandomSampler, SequentialSampler)):
        return len(loader.dataset)  # type: ignore[arg-type]
    return len(sampler) if hasattr(sampler, "__len__") else None


def _equal_shapes(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the batches whose rows have the shapes of the first: padded sequences differ between batches."""

    def shapes(pair: tuple[Any, Any]) -> list[torch.Size]:
        leaves: list[Any] = []
        torch.utils._pytree.tree_map(leaves.append, pair)
        return [torch.as_tensor(leaf).shape[1:] for leaf in leaves]

    return [pair for pair in pairs if shapes(pair) == shapes(pairs[0])]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (Tensor, np.ndarray)):
        first, second = torch.as_tensor(a), torch.as_tensor(b)
        return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())
    named, other = names_of(a), names_of(b)
    if named is not None and other is not None:
        return named.keys() == other.keys() and all(_equal(named[key], other[key]) for key in named)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b))
    return bool(a == b)
