"""Which networks the compiled code can take: stacks of small Linear layers with common activations, all of them random."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credibly.backends.cpp.library import library
from credibly.networks.layout import Layout

WIDEST = 256  # units of a layer, beyond which a matrix library is ahead of plain loops
GRAIN = 32  # rows are padded to a multiple of this, as in mlp.cpp
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.ReLU: 1, nn.Tanh: 2, nn.SiLU: 3, nn.Sigmoid: 4}
SUFFIX = {torch.float32: "f32", torch.float64: "f64"}
SILENT = (nn.Dropout, nn.AlphaDropout)  # switched off in a density

_Numbers = ctypes.POINTER(ctypes.c_int64)


class _Network(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.c_int64), ("inputs", _Numbers), ("outputs", _Numbers), ("weight", _Numbers), ("bias", _Numbers),
        ("activation", _Numbers), ("dim", ctypes.c_int64),
    ]  # fmt: skip


class Stack:
    """Layers of a network as the compiled code takes them, for parameter vectors of a layout.

    Args:
        layers: of each (inputs, outputs, place of its weight in a parameter vector, place of its bias or -1, activation).
        layout: of the parameter vectors.
    """

    def __init__(self, layers: Sequence[Sequence[int]], layout: Layout) -> None:
        self.layers, self.layout = layers, layout
        self.dtype, self.dim = layout.dtype, layout.dim
        self.inputs, self.outputs = layers[0][0], layers[-1][1]
        columns = [(ctypes.c_int64 * len(layers))(*column) for column in zip(*layers)]
        self.struct = _Network(len(layers), *columns, layout.dim)
        self._kept = columns  # the structure only points at them

    def __reduce__(self) -> tuple[Any, ...]:
        return Stack, (self.layers, self.layout)  # places in memory are no use in a copy

    @staticmethod
    def of(module: nn.Module, layout: Layout, widest: float = WIDEST) -> Stack | None:
        """None where the network is more than such a stack, or has a layer wider than that, or not all of it is random."""
        if layout.dtype not in SUFFIX:
            return None
        places = {e.name: e.start for e in layout.entries if e.name not in layout.extra}
        layers: list[list[int]] = []
        names: list[str] = []
        if not _walk(module, "", places, layers, names) or not layers:
            return None
        everything = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        if sorted(names) != sorted(everything) or len(set(names)) != len(names) or set(names) != set(places):
            return None
        if any(max(layer[:2]) > widest for layer in layers):
            return None
        return Stack(layers, layout)

    def compiled(self) -> bool:
        """Whether there is compiled code for it on a processor. Asking may compile that, once on a machine."""
        return self.layout.device.type == "cpu" and library() is not None

    def function(self, name: str) -> Any:
        """A function of the library for this network's type of number."""
        found = getattr(library(), f"{name}_{SUFFIX[self.dtype]}")
        found.restype = ctypes.c_int64
        return found


def _walk(module: nn.Module, prefix: str, places: Mapping[str, int], layers: list[list[int]], names: list[str]) -> bool:
    """Appends the layers of a module to `layers`; whether all of it is known. Exact types only: a subclass may do more."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module) is nn.Sequential:
        parts = [(name, child) for name, child in module._modules.items() if child is not None]
        return all(_walk(child, f"{prefix}{name}.", places, layers, names) for name, child in parts)
    if type(module) is nn.Linear:
        weight, bias = f"{prefix}weight", f"{prefix}bias"
        if weight not in places or (module.bias is not None and bias not in places):
            return False
        names += [weight] if module.bias is None else [weight, bias]
        held = -1 if module.bias is None else places[bias]
        layers.append([module.in_features, module.out_features, places[weight], held, 0])
        return True
    if type(module) in ACTIVATIONS:
        kind = ACTIVATIONS[type(module)]
        if kind and (not layers or layers[-1][4]):  # before the first layer, or two in a row
            return False
        if kind:
            layers[-1][4] = kind
        return True
    return type(module) in SILENT


def padded_rows(rows: int) -> int:
    """As many as there is room for."""
    return -(-rows // GRAIN) * GRAIN


def padded_columns(rows: Tensor) -> Tensor:
    """(N, K) as (K, N and zeros): a column for every lane of a vector of the processor."""
    columns = torch.empty(rows.shape[1], padded_rows(len(rows)), dtype=rows.dtype)
    # By numpy, which has no threads: torch's go on spinning for a while after a copy, on the cores that the next call wants.
    places = columns.numpy()
    places[:, : len(rows)] = rows.detach().numpy().T
    places[:, len(rows) :] = 0
    return columns


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a contiguous tensor lies."""
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def checked(failed: int) -> None:
    """Raises what the library could not."""
    if failed:
        raise MemoryError("the working memory of a small network could not be had")
