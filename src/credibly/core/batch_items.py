"""Items of data sets and loaders (pairs, tuples, dicts, dataclasses, named tuples) as inputs and target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from credibly.errors import InputError

# Names of the target in a batch with names, in this order.
TARGETS = ("labels", "label", "y", "targets", "target")


GRAPHS = (
    "For nodes of one graph, credibly.data.Nodes(graph, rows=...); for one graph per row, pad them: "
    "x = (nodes, adjacency) by to_dense_batch and to_dense_adj of torch_geometric.utils, with layers for dense graphs"
)


def is_graph(item: Any) -> bool:
    """Return whether this is a graph, or a batch of graphs, of torch-geometric."""
    return hasattr(item, "edge_index") and not isinstance(item, Mapping)


def split_item(item: Any, target: str | None = None) -> tuple[Any, Any]:
    """Return (x, y) of one batch or row.

    In a tuple or list the target is the last entry. In a mapping, a dataclass or a named tuple it is the entry
    `target`, or the one named "labels", "label", "y", "targets" or "target". One other entry is the network's argument;
    several are its keyword arguments, or its arguments in order for a named tuple.
    """
    if is_graph(item):
        raise InputError("data", f"its items are graphs ({type(item).__name__})", GRAPHS)
    named = names_of(item)
    if named is not None:
        name = target_name(named, target)
        if name is not None:
            rest = {str(key): value for key, value in named.items() if key != name}
            if not rest:
                raise InputError("data", f"its items hold only {name!r}", "Each item must hold inputs and a target")
            if len(rest) == 1:
                return next(iter(rest.values())), named[name]
            return (tuple(rest.values()) if isinstance(item, tuple) else rest), named[name]
        if not isinstance(item, tuple):
            names = ", ".join(repr(str(key)) for key in named) or "no names"
            wanted = repr(target) if target is not None else "none of " + ", ".join(repr(t) for t in TARGETS)
            found = f"its items have {names}, and {'no ' if target is not None else ''}{wanted}"
            raise InputError("data", found, 'Name the target: credibly.data.Stream(loader, target="...")')
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise InputError("data", "its items are not pairs", "Each item must hold inputs and a target: (x, y)")
    *xs, y = item
    return (_one_or_several(xs[0], y) if len(xs) == 1 else tuple(xs)), y


def _one_or_several(x: Any, y: Any) -> Any:
    """Return x, as a tuple if it is a list of several inputs: torch's collation makes lists of tuples."""
    if not isinstance(x, list) or not hasattr(y, "__len__"):
        return x
    several = all(isinstance(part, Tensor) and part.ndim > 0 and len(part) == len(y) for part in x)
    return tuple(x) if several else x


def inputs_of(item: Any, row: Mapping[str, Any], target: str | None = None) -> Any:
    """Return x of one batch for prediction, with or without a target in it.

    `row` describes the rows that the network takes, see `credibly.core.inputs.describe`.
    """
    form, parts = row["form"], row["parts"]
    named = names_of(item)
    if form == "dict" and named is not None and all(part["name"] in named for part in parts):
        return {part["name"]: named[part["name"]] for part in parts}
    if named is not None and not isinstance(item, tuple):
        rest = [value for key, value in named.items() if key != target_name(named, target)]
        return rest[0] if len(rest) == 1 else tuple(rest)
    if isinstance(item, (tuple, list)):
        if form == "tuple" and isinstance(item[0], (tuple, list)) and len(item[0]) == len(parts):
            # ((x1, x2), y), or ((x1, x2),) without a target.
            return tuple(item[0])
        if form == "tuple" and len(item) == len(parts):
            return tuple(item)
        return item[0] if len(item) == 1 else split_item(item, target)[0]
    return item


def collate_rows(rows: Sequence[Any]) -> Any:
    """Stack rows into one batch: torch's rule, for dataclasses and lists of numbers too. Raise if shapes differ.

    torch's rule for lists, one tensor per position, would give a batch with its rows on the second axis.
    """
    try:
        return default_collate([_with_tensors(row) for row in rows])
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise InputError(
            "data",
            f"its rows differ in shape ({str(error).splitlines()[0]})",
            "Pad them: DataLoader(dataset, collate_fn=credibly.data.Pad())",
        ) from error


def _with_tensors(row: Any) -> Any:
    """Return a row with its lists of numbers as tensors, and a dataclass as a dict."""
    if isinstance(row, Mapping) or _is_dataclass(row):
        named = names_of(row)
        assert named is not None
        if named is row and not any(isinstance(value, list) for value in named.values()):
            return row
        return {key: _to_array(value) for key, value in named.items()}
    if not isinstance(row, (tuple, list)) or not any(isinstance(value, list) for value in row):
        return row
    values = [_to_array(value) for value in row]
    return type(row)(*values) if hasattr(row, "_fields") else values


def _to_array(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        # Text, or lists of different lengths: the conversion of the batch reports it.
        return value


def names_of(item: Any) -> Mapping[str, Any] | None:
    """Return the entries of a mapping, a dataclass or a named tuple by name; None for others."""
    if isinstance(item, Mapping):
        return item
    if _is_dataclass(item):
        return {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    fields = getattr(item, "_fields", None)
    return dict(zip(fields, item)) if isinstance(item, tuple) and fields else None


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, (type, Mapping))


def target_name(named: Mapping[str, Any], target: str | None = None) -> str | None:
    """Return the name of the target, None if there is none."""
    names = (target,) if target is not None else TARGETS
    return next((name for name in names if name in named), None)
