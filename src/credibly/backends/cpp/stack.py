"""Networks that the C++ backend supports: stacks of small Linear layers with common activations, all of them random."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credibly.backends.cpp import api
from credibly.backends.cpp.in_use import library
from credibly.networks.layout import Layout

MAX_WIDTH = 256  # units of a layer, beyond which a BLAS is faster
ROW_MULTIPLE = 32  # rows are padded to a multiple of this, as in layout.h
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.ReLU: 1, nn.Tanh: 2, nn.SiLU: 3, nn.Sigmoid: 4}
INACTIVE = (nn.Dropout, nn.AlphaDropout)  # the identity in a density


class Stack:
    """Layers of a network in the form that the C++ backend takes.

    Args:
        layers: (inputs, outputs, offset of weight in a parameter vector, offset of bias or -1, activation) per layer.
        layout: layout of the parameter vectors.
    """

    def __init__(self, layers: Sequence[Sequence[int]], layout: Layout) -> None:
        self.layers, self.layout = layers, layout
        self.dtype, self.dim = layout.dtype, layout.dim
        self.inputs, self.outputs = layers[0][0], layers[-1][1]
        columns = [(ctypes.c_int64 * len(layers))(*column) for column in zip(*layers)]
        self.struct = api.Network(len(layers), *columns, layout.dim)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stack, (self.layers, self.layout)  # the struct holds addresses of this process

    @staticmethod
    def of(module: nn.Module, layout: Layout, max_width: float = MAX_WIDTH) -> Stack | None:
        """Return the stack of a module, None if it is not one, has fixed parameters or layers above `max_width`."""
        if layout.dtype not in api.SUFFIX:
            return None
        offsets = {e.name: e.start for e in layout.entries if e.name not in layout.extra}
        layers: list[list[int]] = []
        names: list[str] = []
        if not _collect(module, "", offsets, layers, names) or not layers:
            return None
        everything = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        if sorted(names) != sorted(everything) or len(set(names)) != len(names) or set(names) != set(offsets):
            return None
        if any(max(layer[:2]) > max_width for layer in layers):
            return None
        return Stack(layers, layout)

    def compiled(self) -> bool:
        """Return whether the C++ backend is available on the network's device."""
        return self.layout.device.type == "cpu" and library() is not None


def _collect(
    module: nn.Module, prefix: str, offsets: Mapping[str, int], layers: list[list[int]], names: list[str]
) -> bool:
    """Append the layers of a module to `layers`. Return whether all of it is supported.

    Types have to match exactly: a subclass may compute something else.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module) is nn.Sequential:
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        return all(_collect(child, f"{prefix}{name}.", offsets, layers, names) for name, child in children)
    if type(module) is nn.Linear:
        weight, bias = f"{prefix}weight", f"{prefix}bias"
        if weight not in offsets or (module.bias is not None and bias not in offsets):
            return False
        names += [weight] if module.bias is None else [weight, bias]
        bias_offset = -1 if module.bias is None else offsets[bias]
        layers.append([module.in_features, module.out_features, offsets[weight], bias_offset, 0])
        return True
    if type(module) in ACTIVATIONS:
        kind = ACTIVATIONS[type(module)]
        if kind and (not layers or layers[-1][4]):  # before the first layer, or two in a row
            return False
        if kind:
            layers[-1][4] = kind
        return True
    return type(module) in INACTIVE


def padded_rows(rows: int) -> int:
    """Return the number of rows with padding."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def padded_columns(rows: Tensor) -> Tensor:
    """Return the transpose (K, padded N) of rows (N, K), padded with zeros."""
    columns = torch.empty(rows.shape[1], padded_rows(len(rows)), dtype=rows.dtype)
    # With numpy, which has no threads: torch's keep spinning after a copy, on the cores that the next call needs.
    view = columns.numpy()
    view[:, : len(rows)] = rows.detach().numpy().T
    view[:, len(rows) :] = 0
    return columns
