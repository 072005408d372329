"""Problems on one graph: the network sees the full graph, and the rows of the data are nodes.

The graph is a context that all rows share. The network is called once with all of it, and its outputs are taken at
the rows: nodes of a minibatch, of a subset or of a prediction.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.inputs import output_tensor
from credibly.errors import InputError


class Nodes:
    """Labelled nodes of one graph as the data of a problem: `Problem(net, Nodes(data, rows=data.train_mask), ...)`.

    Args:
        graph: a torch-geometric `Data` object, or the arguments of the network, such as (x, edge_index).
        rows: the labelled nodes, as indices or a boolean mask; None for all of them.
        y: labels of all nodes, or one per row; None takes `graph.y`.
        arguments: names of the attributes of a `Data` object that the network takes, in order. A network whose
            forward takes a single argument gets such an object, with all of its tensors.
    """

    def __init__(
        self, graph: Any, rows: Any = None, y: Any = None, *, arguments: tuple[str, ...] = ("x", "edge_index")
    ) -> None:
        if isinstance(graph, (tuple, list)):
            given = tuple(graph)
        else:
            missing = [name for name in arguments if not isinstance(getattr(graph, name, None), Tensor)]
            if missing:
                found = f"has no tensor {missing[0]!r}"
                raise InputError("graph", found, "Pass a tuple of the network's arguments, or name them by arguments=")
            given = tuple(getattr(graph, name) for name in arguments)
        self.whole = None if isinstance(graph, (tuple, list)) else _tensors_of(graph)
        self.kind = type(graph)
        if not given or not all(isinstance(part, Tensor) for part in given):
            raise InputError("graph", "must be a graph object or a tuple of tensors, such as (x, edge_index)")
        self.graph = given
        self.count = len(given[0])
        self.rows = self._indices(rows)
        labels = getattr(graph, "y", None) if y is None else y
        if labels is None:
            raise InputError("y", "must be given: the graph has no y", "Pass the labels of all nodes, or of the rows")
        values = labels if isinstance(labels, Tensor) else torch.as_tensor(labels)
        if len(values) not in (self.count, len(self.rows)):
            found = f"has {len(values)} entries, the graph {self.count} nodes, {len(self.rows)} of them rows"
            raise InputError("y", found)
        self.y = values[self.rows.to(values.device)] if len(values) == self.count else values

    def _indices(self, rows: Any) -> Tensor:
        if rows is None:
            return torch.arange(self.count)
        values = rows if isinstance(rows, Tensor) else torch.as_tensor(rows)
        if values.dtype == torch.bool:
            if values.shape != (self.count,):
                raise InputError("rows", f"must be a mask of {self.count} nodes, got shape {tuple(values.shape)}")
            values = values.nonzero().squeeze(1)
        if values.ndim != 1 or values.is_floating_point() or not len(values):
            raise InputError("rows", "must be node indices or a boolean mask with at least one node")
        if int(values.min()) < 0 or int(values.max()) >= self.count:
            found = f"must be indices from 0 to {self.count - 1}, got {int(values.min())} to {int(values.max())}"
            raise InputError("rows", found)
        return values.long()

    def network(self, net: nn.Module) -> nn.Module:
        """Return a network that takes node indices: `net` with this graph, under the same parameter names.

        `credibly.load(path, nodes.network(net))` loads a posterior of such a problem.
        """
        if not isinstance(net, nn.Module):
            raise InputError("net", f"must be a torch.nn.Module, got {type(net).__name__}")
        device = next((p.device for p in net.parameters()), torch.device("cpu"))
        bound = copy.deepcopy(net)
        bound.__class__ = _on_graph(type(net))
        as_object = self.whole is not None and _takes_one(net)
        parts = self.whole if self.whole is not None and as_object else dict(enumerate(self.graph))
        for name, part in parts.items():
            # Not persistent: the graph is data, not a part of the network.
            bound.register_buffer(f"graph_{name}", part.detach().to(device), persistent=False)
        bound.graph_parts = tuple(parts)  # type: ignore[assignment]
        bound.graph_kind = self.kind if as_object else None  # type: ignore[assignment]
        bound.graph_nodes = self.count  # type: ignore[assignment]
        return bound

    def __repr__(self) -> str:
        return f"Nodes({len(self.rows)} of {self.count} nodes)"


def attach_graph(net: Any, data: Any) -> tuple[Any, Any, bool]:
    """Return network and data with the graph of `Nodes` inside the network, and whether all rows share one pass."""
    if not isinstance(data, Nodes):
        return net, data, False
    bound = data.network(net)
    device = next(bound.parameters()).device
    return bound, (data.rows.to(device), data.y.to(device)), True


def _tensors_of(graph: Any) -> dict[str, Tensor]:
    values = graph.to_dict() if callable(getattr(graph, "to_dict", None)) else vars(graph)
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _made(kind: type, tensors: dict[str, Tensor]) -> Any:
    """Return a new graph object: the network may change it."""
    graph = kind()
    for name, value in tensors.items():
        setattr(graph, name, value)
    return graph


def _takes_one(net: nn.Module) -> bool:
    """Return whether the forward pass of a network requires exactly one argument, and takes no further one."""
    try:
        parameters = inspect.signature(net.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _on_graph(base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a network's class whose forward pass takes node indices."""
    if base not in _CLASSES:
        _CLASSES[base] = type(f"{base.__name__}OnGraph", (base,), {"forward": _forward, "_of_all_nodes": base.forward})
    return _CLASSES[base]


def _forward(self: Any, nodes: Tensor) -> Tensor:
    """Return the outputs at these nodes."""
    parts = {name: getattr(self, f"graph_{name}") for name in self.graph_parts}
    output = output_tensor(
        self._of_all_nodes(*([_made(self.graph_kind, parts)] if self.graph_kind else parts.values()))
    )
    if output.shape[0] != self.graph_nodes:
        found = f"returned shape {tuple(output.shape)} for {self.graph_nodes} nodes"
        raise InputError("net", found, "The first axis of its output must be the nodes")
    if nodes.dtype != torch.int64:
        raise InputError("x", f"must be node indices (int64), got {nodes.dtype}", "mask.nonzero().squeeze(1)")
    return output[nodes]
