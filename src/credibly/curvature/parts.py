"""A network taken apart for curvature: layers whose gradients are products of two vectors, and the rest.

The gradient of an output in the weight of a Linear layer or a convolution is, for one row, sum_t g_t a_t': a are the layer's
inputs, g the gradients in its outputs, t the places that it is used at (pixels, tokens; one for a table). A bias joins the
weight as one more input that is always 1. All of it comes out of plain passes over a block of rows. Parameters of other kinds
(gains, embeddings, tied weights) are the rest: each row gets a copy of them, so that one backward pass gives every row's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.core.inputs import Inputs, call, map_inputs
from credibly.errors import InputError
from credibly.forward import Forward
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout

LAST = "last layer"


@dataclass(frozen=True)
class LayerPart:
    """A layer: its name, and the coordinates (out, in) of its weight; with a bias the last column is that."""

    name: str
    places: Tensor
    bias: bool
    convolution: bool


@dataclass(frozen=True)
class Parts:
    """What of the flat vector is looked at: layers, other parameters by name, and the coordinates of those."""

    layers: tuple[LayerPart, ...]
    rest: tuple[str, ...]
    rest_places: Tensor

    @property
    def places(self) -> Tensor:
        """Coordinates of all of it, layers first."""
        return torch.cat([*(layer.places.flatten() for layer in self.layers), self.rest_places])


def choose_names(layout: Layout, random: str | tuple[str, ...] | None, row: Inputs) -> tuple[str, ...]:
    """Names of the network's random parameters that a pattern takes: all, those of the last layer, or those that match."""
    names = [e.name for e in layout.entries if e.name not in layout.extra]
    if random is None:
        return tuple(names)
    if random == LAST:
        last = _last_owner(layout, names, row)
        return tuple(n for n in names if any(a.rpartition(".")[0] == last for a in _aliases(layout, n)))
    patterns = (random,) if isinstance(random, str) else tuple(random)
    for pattern in patterns:
        if not any(fnmatchcase(a, pattern) for n in names for a in _aliases(layout, n)):
            raise InputError(
                "random",
                f"pattern {pattern!r} matches no random parameter",
                f'The names are {", ".join(names[:8])}; "{LAST}" takes the last layer',
            )
    return tuple(n for n in names if any(fnmatchcase(a, p) for p in patterns for a in _aliases(layout, n)))


def find_parts(layout: Layout, names: tuple[str, ...], row: Inputs) -> Parts:
    """The layers among these parameters that can be taken as products, found by a pass of one row and of two."""
    entries = {e.name: e for e in layout.entries}
    coordinates = {
        n: torch.arange(entries[n].start, entries[n].stop, device=layout.device).reshape(entries[n].shape)
        for n in names
    }
    single = {n for n in names if len(_aliases(layout, n)) == 1}
    candidates = {
        f"{prefix}.weight" if prefix else "weight": (prefix, part)
        for prefix, part in layout.module.named_modules()
        if type(part) is nn.Linear or (type(part) is nn.Conv2d and part.groups == 1)
    }
    usable = {w: c for w, c in candidates.items() if w in single}
    calls = {rows: _calls(layout, dict(usable.values()), _repeated(row, rows)) for rows in (1, 2)}
    layers: list[LayerPart] = []
    taken: set[str] = set()
    for weight, (prefix, part) in usable.items():
        if any([seen for name, seen in calls[rows] if name == prefix] != [rows] for rows in calls):
            continue  # used never, twice, or with another axis first than the rows
        name = f"{prefix}.bias" if prefix else "bias"
        bias = part.bias is not None and name in single
        places = coordinates[weight].flatten(1)
        places = torch.cat([places, coordinates[name].unsqueeze(1)], 1) if bias else places
        layers.append(LayerPart(prefix, places, bias, isinstance(part, nn.Conv2d)))
        taken |= {weight, *((name,) if bias else ())}
    rest = [n for n in names if n not in taken]
    empty = torch.empty(0, dtype=torch.int64, device=layout.device)
    return Parts(tuple(layers), tuple(rest), torch.cat([empty, *(coordinates[n].flatten() for n in rest)]))


class Captured:
    """A block of rows after its pass: arranged outputs (N, ..., W), each layer's inputs (N, T, in), and gradients on request."""

    def __init__(
        self, layers: tuple[LayerPart, ...], output: Tensor, inputs: list[Tensor], layer_outputs: list[Tensor],
        own: tuple[Tensor, list[Tensor]] | None,
    ) -> None:  # fmt: skip
        self.layers, self.inputs, self.output = layers, inputs, output.detach()
        self._graph, self._layer_outputs, self._own = output, layer_outputs, own

    def pull(self, vector: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """For a vector (N, ..., W) on the outputs: each layer's g (N, T, out), and the rows' gradients (N, P) in the rest."""
        found = [
            g.flatten(2).mT if layer.convolution else g.reshape(len(g), -1, g.shape[-1])
            for layer, g in zip(self.layers, _gradients(self._graph, self._layer_outputs, vector))
        ]
        if self._own is None:
            return found, None
        output, leaves = self._own
        rows = _gradients(output, leaves, vector.reshape(output.shape))
        return found, torch.cat([g.flatten(1) for g in rows], 1)


class RowPass:
    """Passes of blocks of rows at one point theta (D,)."""

    def __init__(self, layout: Layout, likelihood: Likelihood, forward: Forward, theta: Tensor, parts: Parts) -> None:
        self.layout, self.likelihood, self.forward, self.parts = layout, likelihood, forward, parts
        self.theta = theta.detach()
        self.module = layout.write(self.theta).requires_grad_(False)

    def __call__(self, x: Inputs) -> Captured:
        """The pass of one block of rows."""
        with torch.enable_grad():
            kept: dict[str, tuple[Tensor, Tensor]] = {}
            with _hooked(self.module, self.parts.layers, kept):
                raw = call(self.module, x)
            inputs = [self._inputs(layer, kept[layer.name][0]) for layer in self.parts.layers]
            own = self._copies(x, len(raw)) if self.parts.rest else None
            outputs = [kept[layer.name][1] for layer in self.parts.layers]
            return Captured(self.parts.layers, self.likelihood.arrange(raw), inputs, outputs, own)

    def _inputs(self, layer: LayerPart, value: Tensor) -> Tensor:
        part = self.module.get_submodule(layer.name)
        value = value.detach()
        if isinstance(part, nn.Conv2d):
            mode = "constant" if part.padding_mode == "zeros" else part.padding_mode
            value = F.pad(value, part._reversed_padding_repeated_twice, mode)
            value = F.unfold(value, part.kernel_size, part.dilation, 0, part.stride).mT
        else:
            value = value.reshape(len(value), -1, value.shape[-1])
        return F.pad(value, (0, 1), value=1.0) if layer.bias else value

    def _copies(self, x: Inputs, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Outputs (N, 1, ...) from a copy of the rest's parameters for each row, and those copies."""
        parameters = self.layout.split(self.theta)[0]
        wide = {n: p.expand(rows, *p.shape) for n, p in parameters.items()}
        for name in self.parts.rest:
            wide[name] = wide[name].clone().requires_grad_()
        output = self.forward.apply(wide, map_inputs(lambda t: t.unsqueeze(1), x), shared=False)
        return self.likelihood.arrange(output, 1), [wide[n] for n in self.parts.rest]


def _gradients(output: Tensor, leaves: list[Tensor], vector: Tensor) -> list[Tensor]:
    if not leaves or not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(output, leaves, vector, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves)]


@contextmanager
def _hooked(module: nn.Module, layers: tuple[LayerPart, ...], kept: dict[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within the block, every pass notes the layers' inputs and outputs, and gradients reach the outputs."""
    handles = []
    for layer in layers:

        def note(_part: nn.Module, args: tuple[Any, ...], out: Tensor, name: str = layer.name) -> Tensor:
            out = out if out.requires_grad else out.requires_grad_()
            kept[name] = (args[0], out)
            return out

        handles.append(module.get_submodule(layer.name).register_forward_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _calls(layout: Layout, parts: dict[str, nn.Module], x: Inputs) -> list[tuple[str, int]]:
    """Every call of these modules in a pass, in the order in which they end: name and rows of the first argument."""
    seen: list[tuple[str, int]] = []
    handles = []
    for name, part in parts.items():

        def note(_part: nn.Module, args: tuple[Any, ...], _out: object, name: str = name) -> None:
            seen.append((name, len(args[0]) if args and isinstance(args[0], Tensor) else -1))

        handles.append(part.register_forward_hook(note))
    try:
        with torch.no_grad():
            call(layout.module, x)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _last_owner(layout: Layout, names: list[str], row: Inputs) -> str:
    """The module with random parameters that a pass ends with; one that holds others of them does not count."""
    owners = {alias.rpartition(".")[0] for n in names for alias in _aliases(layout, n)}
    inner = {o for o in owners if not any(p != o and (not o or p.startswith(f"{o}.")) for p in owners)}
    called = [name for name, _ in _calls(layout, {p: layout.module.get_submodule(p) for p in inner}, row)]
    if not called:
        raise InputError("random", "the last layer cannot be told in this network", "Name its parameters by a pattern")
    return called[-1]


def _aliases(layout: Layout, name: str) -> list[str]:
    return [alias for alias, first in layout.aliases.items() if first == name]


def _repeated(row: Inputs, rows: int) -> Inputs:
    return map_inputs(lambda t: t[:1].expand(rows, *t.shape[1:]), row)
