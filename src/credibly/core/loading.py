"""Read data into memory: pairs, data sets, loaders, and lists of rows."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from credibly.core.batch_items import GRAPHS, collate_rows, is_graph, names_of, split_item, target_name
from credibly.core.inputs import to_values
from credibly.core.row_order import READ_ROWS, in_order
from credibly.errors import InputError

# Rows per batch of a data set that is streamed without the user's own loader.
STREAM_ROWS = 128
# Number of rows after which data of unknown length count as endless.
MOST_COUNTED = 1_000_000
# Fraction of the memory that the data of a problem may take.
MEMORY_FRACTION = 0.25


def unpack_data(data: Any, target: str | None = None) -> tuple[Any, Any]:
    """Return (x, y) from a pair, a Dataset, a DataLoader or rows; all but a pair are read once, in order."""
    if isinstance(data, TensorDataset):
        return split_item(list(data.tensors), target)
    loader = as_loader(data)
    if loader is not None:
        return _from_loader(loader, target)
    if is_graph(data) or (isinstance(data, (tuple, list)) and data and is_graph(data[0])):
        raise InputError("data", f"is a graph, or a list of graphs, got {type(data).__name__}", GRAPHS)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return data[0], data[1]
    raise InputError("data", f"must be a pair (x, y), a torch Dataset or a DataLoader, got {type(data).__name__}")


def as_loader(data: Any, *, pairs: bool = True) -> DataLoader[Any] | None:
    """Return loaders, data sets and rows with names (see `is_rows`) as a loader that stacks rows; None for others."""
    if isinstance(data, DataLoader):
        if data.collate_fn is not default_collate:
            return data
        loader = copy.copy(data)
        loader.collate_fn = collate_rows
        return loader
    if isinstance(data, Dataset) or is_rows(data, pairs=pairs):
        return DataLoader(data, batch_size=READ_ROWS, collate_fn=collate_rows)
    return None


def in_memory(data: Any, *, target: str | None = None) -> tuple[Any, Any]:
    """Read a loader or data set once and return (x, y), for methods that need all rows at each gradient.

    The rows are those that the loader's sampler names, in a fixed order. A random augmentation is drawn once per row,
    and is then part of the data.

    Args:
        data: a DataLoader, a Dataset or a list of rows.
        target: name of the target in batches that have names, see `Stream`.
    """
    return unpack_data(getattr(data, "loader", data), target or getattr(data, "target", None))


def is_rows(data: Any, *, pairs: bool = True) -> bool:
    """Return whether this is a sequence of rows: with names, such as a Hugging Face data set, or a list of pairs.

    Args:
        data: any data.
        pairs: whether the data hold targets, so that two entries may be a pair (x, y) in which x has names.
    """
    # Arrays and tables have rows on an axis instead.
    array = isinstance(data, (Tensor, Mapping, str)) or hasattr(data, "ndim") or hasattr(data, "to_numpy")
    if array or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return False
    try:
        first = data[0] if len(data) else None
    except (KeyError, IndexError, TypeError):
        return False
    named = names_of(first)
    if named is None and pairs:
        # Two entries are x and y.
        if not isinstance(data, list) or len(data) == 2 or not isinstance(first, tuple):
            return False
        return len(data) > 2 and all(type(row) is tuple and len(row) == len(first) for row in data)
    if named is None or (isinstance(first, tuple) and not pairs and target_name(named) is None):
        return False
    return not (pairs and isinstance(data, (tuple, list)) and len(data) == 2) or _has_target(first)


def _has_target(row: Any) -> bool:
    # (x, y) with a dict of tensors as x is a pair, not two rows.
    try:
        split_item(row)
    except InputError:
        return False
    return True


def _from_loader(loader: DataLoader[Any], target: str | None) -> tuple[Any, Any]:
    # Without shuffling and drop_last, which are for training loops: every row is needed exactly once, or N is wrong.
    if not isinstance(loader.dataset, IterableDataset):
        loader = in_order(loader)
    return join_batches(_bounded(loader, target))


def _bounded(loader: Iterable[Any], target: str | None) -> list[tuple[Any, Any]]:
    """Return all batches. Raise once they no longer fit into memory: a stream may be endless."""
    most, size, rows = MEMORY_FRACTION * host_memory(), 0, 0
    known = hasattr(getattr(loader, "dataset", None), "__len__")
    batches = []
    for batch in loader:
        pair = split_item(batch, target)
        batches.append(pair)
        size, rows = size + size_of(pair), rows + rows_of(pair)
        if size > most or (rows > MOST_COUNTED and not known):
            raise InputError(
                "data",
                f"did not end within {rows:,} rows, {size / 2**30:,.1f} GiB: it is large or endless",
                "Stream it: credibly.data.Stream(loader, n=...), with n the number of distinct rows",
            )
    return batches


def join_batches(batches: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the rows of all batches as one (x, y)."""
    if not batches:
        raise InputError("data", "has no rows", "Pass at least one row")
    x0 = batches[0][0]
    x: Any
    if isinstance(x0, Mapping):
        x = {k: _cat([b[0][k] for b in batches], f"x[{k!r}]") for k in x0}
    elif isinstance(x0, (tuple, list)):
        x = tuple(_cat([b[0][i] for b in batches], f"x[{i}]") for i in range(len(x0)))
    else:
        x = _cat([b[0] for b in batches], "x")
    y0 = batches[0][1]
    if isinstance(y0, Mapping):
        return x, {k: _cat([b[1][k] for b in batches], f"y[{k!r}]") for k in y0}
    return x, _cat([b[1] for b in batches], "y")


def _cat(parts: list[Any], name: str) -> Tensor:
    tensors = [to_values(part, name) for part in parts]
    shapes = sorted({tuple(t.shape[1:]) for t in tensors})
    if len(shapes) > 1:
        raise InputError(
            name,
            f"its rows have shape {shapes[0]} in one batch and {shapes[-1]} in another",
            "Pad all rows to one length, e.g. by credibly.data.Pad(length=...), or stream the batches as they are: "
            "credibly.data.Stream(loader)",
        )
    return torch.cat(tensors)


def rows_of(pair: tuple[Any, Any]) -> int:
    """Return the number of rows of a batch (x, y), given by its targets: those of the first head if y is a mapping."""
    y = next(iter(pair[1].values()), ()) if isinstance(pair[1], Mapping) else pair[1]
    try:
        return len(y)
    except TypeError as error:
        found = "its items are rows, and the loader makes no batches of them: their targets have no axis"
        raise InputError(
            "data", found, "Set the number of rows per batch: DataLoader(dataset, batch_size=...)"
        ) from error


def size_of(values: Any) -> int:
    """Return the bytes of all arrays in a batch."""
    named = names_of(values)
    if named is not None:
        return sum(size_of(v) for v in named.values())
    if isinstance(values, (tuple, list)):
        return sum(size_of(v) for v in values)
    return int(getattr(values, "nbytes", 8))


def host_memory() -> float:
    """Return the bytes of memory of this machine."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 2.0**34
