"""Layers whose gradient for one row is a sum of outer products, sum_t g_t a_t', and a check that it is complete.

The sum covers the layer's call in the forward pass and nothing else. A forward that uses the weight a second time, such
as `F.linear(h, self.layer.weight)`, or that differentiates the layer (`torch.autograd.grad` or `torch.func.grad` of an
energy) has further terms. `complete` compares the sum with the gradient by autograd, at random weights and inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.core.inputs import Inputs, call, map_inputs
from credibly.core.rng import stream
from credibly.networks.layout import Layout


@dataclass(frozen=True)
class LayerPart:
    """A layer: its name, and the indices (out, in) of its weight in the flat vector; a bias is the last column."""

    name: str
    indices: Tensor
    bias: bool
    convolution: bool


def layer_inputs(layer: LayerPart, part: nn.Module, value: Tensor) -> Tensor:
    """Return a layer's inputs a (N, T, in) at its T positions, with a final 1 for the bias."""
    value = value.detach()
    if isinstance(part, nn.Conv2d):
        mode = "constant" if part.padding_mode == "zeros" else part.padding_mode
        value = F.pad(value, part._reversed_padding_repeated_twice, mode)
        value = F.unfold(value, part.kernel_size, part.dilation, 0, part.stride).mT
    else:
        value = value.reshape(len(value), -1, value.shape[-1])
    return F.pad(value, (0, 1), value=1.0) if layer.bias else value


def layer_gradients(layer: LayerPart, gradient: Tensor) -> Tensor:
    """Return the gradient in a layer's output as g (N, T, out)."""
    if layer.convolution:
        return gradient.flatten(2).mT
    return gradient.reshape(len(gradient), -1, gradient.shape[-1])


def gradients(output: Tensor, leaves: list[Tensor], vector: Tensor) -> list[Tensor]:
    """Return the gradients of <output, vector>, zero for leaves that it does not depend on."""
    if not leaves or not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(output, leaves, vector, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves)]


@contextmanager
def recording(
    module: nn.Module, layers: tuple[LayerPart, ...], seen: dict[str, tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """Record the layers' inputs and outputs in every forward pass within the context; outputs get gradients.

    The forward pass continues with a copy of each output, which it may edit in place.
    """
    handles = []
    for layer in layers:

        def record(_part: nn.Module, args: tuple[Any, ...], out: Tensor, name: str = layer.name) -> Tensor:
            out = out if out.requires_grad else out.requires_grad_()
            seen[name] = (args[0], out)
            return out.clone()

        handles.append(module.get_submodule(layer.name).register_forward_hook(record))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def complete(layout: Layout, layers: tuple[LayerPart, ...], row: Inputs) -> tuple[LayerPart, ...]:
    """Return the layers whose outer products are the full gradient.

    Whether they are depends on the code of the forward pass, not on values, so any generic weights and inputs show it.
    A network that cannot take random ones is tried with the blank row, and with its own weights.
    """
    if not layers:
        return layers
    own = layout.read(layout.module)
    extra = own.new_zeros(layout.dim - layout.network_dim)
    generator = stream(0, "layer check")
    random = torch.randn(len(own), generator=generator, dtype=torch.float64).to(own)
    for entry in layout.entries:
        random[entry.start : min(entry.stop, len(own))] *= entry.fan_in**-0.5
    inputs = map_inputs(lambda t: _random_like(t, generator), row)
    for theta, x in ((random, inputs), (random, row), (own, row)):
        try:
            found = _compare(layout, layers, torch.cat([theta, extra]), x, generator)
        except Exception:  # whatever the reason, the network does not take these values
            continue
        if found is not None:
            return found
    return layers


def _compare(
    layout: Layout, layers: tuple[LayerPart, ...], theta: Tensor, x: Inputs, generator: torch.Generator
) -> tuple[LayerPart, ...] | None:
    """Return the layers whose outer products are the gradient by autograd; None if a value is not finite."""
    module = layout.write(theta, fast=False).requires_grad_(False)
    parts = {layer.name: module.get_submodule(layer.name) for layer in layers}
    tensors: list[Tensor] = []
    for layer in layers:
        part = parts[layer.name]
        assert isinstance(part, (nn.Linear, nn.Conv2d))
        tensors += [part.weight, part.bias] if layer.bias and part.bias is not None else [part.weight]
    for tensor in tensors:
        tensor.requires_grad_(True)
    with torch.enable_grad():
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        with recording(module, layers, seen):
            output = call(module, x)
        vector = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        whole = gradients(output, tensors, vector)
        # A layer that some rows skip, as in a mixture of experts, has no inputs in order of the rows.
        layers = tuple(layer for layer in layers if layer.name in seen and len(seen[layer.name][0]) == len(output))
        by_output = gradients(output, [seen[layer.name][1] for layer in layers], vector)
    if not bool(torch.isfinite(output).all()) or not all(bool(torch.isfinite(g).all()) for g in whole):
        return None
    by_tensor = {id(tensor): gradient for tensor, gradient in zip(tensors, whole)}
    kept = []
    for layer, gradient in zip(layers, by_output):
        a, g = layer_inputs(layer, parts[layer.name], seen[layer.name][0]), layer_gradients(layer, gradient)
        part = parts[layer.name]
        expected = by_tensor[id(part.weight)].flatten(1)
        expected = torch.cat([expected, by_tensor[id(part.bias)].unsqueeze(1)], 1) if layer.bias else expected
        gap = (torch.einsum("nto,nti->oi", g, a) - expected).norm()
        if bool(gap <= _tolerance(expected.dtype) * expected.norm()):
            kept.append(layer)
    return tuple(kept)


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative error that rounding may cause; a missing term is of the order of 1."""
    return float(min(0.3, 30 * torch.finfo(dtype).eps ** 0.5))


def _random_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return two random rows for a row of real numbers, two copies of it for integers."""
    value = value[:1].expand(2, *value.shape[1:])
    if not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
