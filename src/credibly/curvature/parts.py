"""A network split for curvature: layers whose gradients are sums of outer products, and the rest.

For one row, the gradient of an output in the weight of a Linear layer or a convolution is sum_t g_t a_t', with a the
layer's inputs, g the gradients in its outputs and t the positions it is applied at (pixels, tokens; one for a table). A
bias is one more input that is always 1. Both come out of plain forward and backward passes over a block of rows. All
other parameters (gains, embeddings, tied weights, layers that the forward pass also differentiates) are the rest: each
row gets its own copy, so one backward pass gives per-row gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, call, map_inputs
from credibly.curvature.layers import LayerPart, complete, gradients, layer_gradients, layer_inputs, recording
from credibly.errors import InputError
from credibly.forward import Forward
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout

LAST = "last layer"


@dataclass(frozen=True)
class Parts:
    """The selected parameters: layers, other parameters by name, and the indices of the latter in the flat vector."""

    layers: tuple[LayerPart, ...]
    rest: tuple[str, ...]
    rest_indices: Tensor

    @property
    def indices(self) -> Tensor:
        """Indices of all selected parameters, layers first."""
        return torch.cat([*(layer.indices.flatten() for layer in self.layers), self.rest_indices])


def choose_names(layout: Layout, random: str | tuple[str, ...] | None, row: Inputs) -> tuple[str, ...]:
    """Return the names of the random parameters to cover: all, the last layer's, or those matching a pattern."""
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
                f'The names are {", ".join(names[:8])}; "{LAST}" selects the last layer',
            )
    return tuple(n for n in names if any(fnmatchcase(a, p) for p in patterns for a in _aliases(layout, n)))


def find_parts(layout: Layout, names: tuple[str, ...], row: Inputs) -> Parts:
    """Split the named parameters into layers and the rest, by forward passes of one row and of two."""
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
    for weight, (prefix, part) in usable.items():
        # Skip layers that are never called, called twice, or called with another leading axis than the rows.
        if any([seen for name, seen in calls[rows] if name == prefix] != [rows] for rows in calls):
            continue
        name = f"{prefix}.bias" if prefix else "bias"
        bias = part.bias is not None and name in single
        indices = coordinates[weight].flatten(1)
        indices = torch.cat([indices, coordinates[name].unsqueeze(1)], 1) if bias else indices
        layers.append(LayerPart(prefix, indices, bias, isinstance(part, nn.Conv2d)))
    whole = complete(layout, tuple(layers), row)
    covered = {f"{layer.name}.{kind}".lstrip(".") for layer in whole for kind in ("weight", "bias")[: 1 + layer.bias]}
    rest = [n for n in names if n not in covered]
    empty = torch.empty(0, dtype=torch.int64, device=layout.device)
    return Parts(whole, tuple(rest), torch.cat([empty, *(coordinates[n].flatten() for n in rest)]))


class Captured:
    """A block of rows after its forward pass: arranged outputs (N, ..., W), layer inputs (N, T, in), and its graph."""

    def __init__(
        self,
        layers: tuple[LayerPart, ...],
        output: Tensor,
        inputs: list[Tensor],
        layer_outputs: list[Tensor],
        copies: tuple[Tensor, list[Tensor]] | None,
    ) -> None:
        self.layers, self.inputs, self.output = layers, inputs, output.detach()
        self._graph, self._layer_outputs, self._copies = output, layer_outputs, copies

    def pull_back(self, vector: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return each layer's g (N, T, out) and per-row gradients (N, P) in the rest, for a vector (N, ..., W)."""
        of_layers = [
            layer_gradients(layer, g).to(self.output.dtype)
            for layer, g in zip(self.layers, gradients(self._graph, self._layer_outputs, vector))
        ]
        if self._copies is None:
            return of_layers, None
        output, leaves = self._copies
        rows = gradients(output, leaves, vector.reshape(output.shape))
        return of_layers, torch.cat([g.reshape(len(g), -1).to(self.output.dtype) for g in rows], 1)


class RowPass:
    """Forward passes of blocks of rows at one point theta (D,)."""

    def __init__(self, layout: Layout, likelihood: Likelihood, forward: Forward, theta: Tensor, parts: Parts) -> None:
        self.layout, self.likelihood, self.forward, self.parts = layout, likelihood, forward, parts
        self.theta = theta.detach()
        self.module = layout.write(self.theta, fast=False).requires_grad_(False)

    def __call__(self, x: Inputs) -> Captured:
        """Run one block of rows."""
        with torch.enable_grad():
            seen: dict[str, tuple[Tensor, Tensor]] = {}
            with recording(self.module, self.parts.layers, seen):
                raw = self.layout.output(call(self.module, x))
            _check_rows(self.parts.layers, seen, len(raw))
            inputs = [
                layer_inputs(layer, self.module.get_submodule(layer.name), seen[layer.name][0]).to(raw.dtype)
                for layer in self.parts.layers
            ]
            copies = self._copies(x, len(raw)) if self.parts.rest else None
            outputs = [seen[layer.name][1] for layer in self.parts.layers]
            return Captured(self.parts.layers, self.likelihood.arrange(raw), inputs, outputs, copies)

    def _copies(self, x: Inputs, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return outputs (N, 1, ...) from a copy of the rest's parameters per row, and those copies."""
        parameters = self.layout.split(self.theta)[0]
        wide = {n: p.expand(rows, *p.shape) for n, p in parameters.items()}
        for name in self.parts.rest:
            wide[name] = wide[name].clone().requires_grad_()
        output = self.forward.apply(wide, map_inputs(lambda t: t.unsqueeze(1), x), shared=False)
        return self.likelihood.arrange(output, 1), [wide[n] for n in self.parts.rest]


def _check_rows(layers: tuple[LayerPart, ...], seen: dict[str, tuple[Tensor, Tensor]], rows: int) -> None:
    for layer in layers:
        found = len(seen[layer.name][0]) if layer.name in seen else 0
        if found != rows:
            raise InputError(
                "net",
                f"its layer {layer.name!r} sees {found} of {rows} rows: which ones depends on the data",
                "Laplace needs layers that act on every row. Cover other parameters by random=, or weight the outputs "
                "of all experts",
            )


def _calls(layout: Layout, parts: dict[str, nn.Module], x: Inputs) -> list[tuple[str, int]]:
    """Return the calls of these modules in a forward pass, in order of completion: name, rows of the first argument."""
    seen: list[tuple[str, int]] = []
    handles = []
    for name, part in parts.items():

        def record(_part: nn.Module, args: tuple[Any, ...], _out: object, name: str = name) -> None:
            seen.append((name, len(args[0]) if args and isinstance(args[0], Tensor) else -1))

        handles.append(part.register_forward_hook(record))
    try:
        with torch.no_grad():
            call(layout.module, x)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _last_owner(layout: Layout, names: list[str], row: Inputs) -> str:
    """Return the last module with random parameters in a forward pass, not counting containers of such modules."""
    owners = {alias.rpartition(".")[0] for n in names for alias in _aliases(layout, n)}
    inner = {o for o in owners if not any(p != o and (not o or p.startswith(f"{o}.")) for p in owners)}
    called = [name for name, _ in _calls(layout, {p: layout.module.get_submodule(p) for p in inner}, row)]
    if not called:
        raise InputError(
            "random", "the last layer of this network cannot be identified", "Name its parameters by a pattern"
        )
    return called[-1]


def _aliases(layout: Layout, name: str) -> list[str]:
    return [alias for alias, first in layout.aliases.items() if first == name]


def _repeated(row: Inputs, rows: int) -> Inputs:
    return map_inputs(lambda t: t[:1].expand(rows, *t.shape[1:]), row)
