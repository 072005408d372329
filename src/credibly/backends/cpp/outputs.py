"""Outputs of small networks for many parameter vectors or dropout masks: most of the time of a prediction."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from credibly.backends.cpp import api
from credibly.backends.cpp.stack import Stack, padded_columns
from credibly.core.autodiff import transformed

MIN_OUTPUTS = 2**14  # rows times parameter vectors, below which the overhead of the call dominates
MIN_MASKED_OUTPUTS = 2**12  # rows times passes with dropout: lower, since the PyTorch path has more overhead there


def use_cpp_outputs(theta: Tensor, x: Tensor) -> bool:
    """Return whether the outputs for theta (C, D) and x (N, ...) are enough work and need no derivatives."""
    if x.ndim != 2 or x.device.type != "cpu" or len(theta) * len(x) < MIN_OUTPUTS or x.dtype != theta.dtype:
        return False
    needs_grad = torch.is_grad_enabled() and (theta.requires_grad or x.requires_grad)
    return not (needs_grad or torch.compiler.is_compiling() or transformed())


def cpp_outputs(stack: Stack, theta: Tensor, x: Tensor) -> Tensor:
    """Return the outputs (C, N, K) for theta (C, D) and rows x (N, inputs)."""
    theta, columns = theta.detach().contiguous(), padded_columns(x.detach())
    out = torch.empty(len(theta), len(x), stack.outputs, dtype=stack.dtype)
    arguments = api.Outputs(
        network=stack.struct,
        rows=len(x),
        padded=columns.shape[1],
        x=api.address(columns),
        chains=len(theta),
        threads=torch.get_num_threads(),
        theta=api.address(theta),
        out=api.address(out),
    )
    api.function("outputs", stack.dtype)(arguments)
    return out


def cpp_passes(stack: Stack, theta: Tensor, x: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Return the outputs (P, N, K) for theta (D,) under dropout masks.

    Args:
        stack: the network.
        theta: one parameter vector.
        x: rows (N, inputs).
        masks: per layer (P, 1, inputs), slices of one tensor (P, 1, total), or None for a layer without dropout.
    """
    first = next(mask for mask in masks if mask is not None)
    assert all(mask is None or (mask.stride(0), mask.stride(2)) == (first.stride(0), 1) for mask in masks)
    theta, columns = theta.detach().contiguous(), padded_columns(x.detach())
    out = torch.empty(len(first), len(x), stack.outputs, dtype=stack.dtype)
    arguments = api.Passes(
        network=stack.struct,
        rows=len(x),
        padded=columns.shape[1],
        x=api.address(columns),
        passes=len(first),
        threads=1 if len(first) * len(x) < MIN_OUTPUTS else torch.get_num_threads(),
        theta=api.address(theta),
        masks=(ctypes.c_void_p * len(masks))(*(None if mask is None else mask.data_ptr() for mask in masks)),
        mask_pitch=first.stride(0),
        out=api.address(out),
    )
    api.function("passes", stack.dtype)(arguments)
    return out
