"""Outputs of small networks for many parameter vectors, in compiled code: what prediction spends its time on."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from credibly.backends.cpp.stack import Stack, checked, padded_columns, pointer
from credibly.core.autodiff import transformed

FEWEST = 2**14  # rows times parameter vectors, below which the call itself takes as long
FEWEST_MASKED = 2**12  # rows times passes with dropout, for which the plain path has more to do


def worth_it(theta: Tensor, x: Tensor) -> bool:
    """Whether outputs for theta (C, D) and x (N, ...) are enough work, and no derivative is wanted of them."""
    if x.ndim != 2 or x.device.type != "cpu" or len(theta) * len(x) < FEWEST or x.dtype != theta.dtype:
        return False
    wanted = torch.is_grad_enabled() and (theta.requires_grad or x.requires_grad)
    return not (wanted or torch.compiler.is_compiling() or transformed())


def native_outputs(stack: Stack, theta: Tensor, x: Tensor) -> Tensor:
    """(C, N, K) for theta (C, D) and rows x (N, inputs)."""
    theta, columns = theta.detach().contiguous(), padded_columns(x.detach())
    out = torch.empty(len(theta), len(x), stack.outputs, dtype=stack.dtype)
    checked(
        stack.function("outputs")(
            ctypes.byref(stack.struct), pointer(columns), ctypes.c_int64(len(x)), ctypes.c_int64(columns.shape[1]),
            ctypes.c_int64(len(theta)), ctypes.c_int64(torch.get_num_threads()), pointer(theta), ctypes.c_int64(stack.dim),
            pointer(out),
        )
    )  # fmt: skip
    return out


def native_passes(stack: Stack, theta: Tensor, x: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """(P, N, K) for theta (D,) and masks (P, 1, inputs) of the layers, parts of one tensor (P, 1, all of them); None for no mask."""
    first = next(mask for mask in masks if mask is not None)
    assert all(mask is None or (mask.stride(0), mask.stride(2)) == (first.stride(0), 1) for mask in masks)
    places = (ctypes.c_void_p * len(masks))(*(None if mask is None else mask.data_ptr() for mask in masks))
    theta, columns = theta.detach().contiguous(), padded_columns(x.detach())
    out = torch.empty(len(first), len(x), stack.outputs, dtype=stack.dtype)
    threads = 1 if len(first) * len(x) < FEWEST else torch.get_num_threads()
    checked(
        stack.function("passes")(
            ctypes.byref(stack.struct), pointer(columns), ctypes.c_int64(len(x)), ctypes.c_int64(columns.shape[1]),
            ctypes.c_int64(len(first)), ctypes.c_int64(threads), pointer(theta), places, ctypes.c_int64(first.stride(0)),
            pointer(out),
        )
    )  # fmt: skip
    return out
