"""Means over draws, and squares around them: the sums of a prediction."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from credibly.backends.cpp.library import library
from credibly.backends.cpp.stack import SUFFIX, checked, pointer


def mean_of_draws(values: Tensor) -> Tensor:
    """The mean over the first axis in float64, without going through numbers that are the same by construction."""
    once = tuple(slice(None, 1) if stride == 0 else slice(None) for stride in values.stride())
    return values[once].mean(0, dtype=torch.float64).expand(values.shape[1:])


def moments_of_draws(values: Tensor, native: bool = False) -> tuple[Tensor, Tensor]:
    """The mean over the first axis and the mean square around it, in float64; by compiled code where it is there and asked for."""
    if (
        native
        and values.is_contiguous()
        and values.device.type == "cpu"
        and values.dtype in SUFFIX
        and library() is not None
    ):
        return _native(values)
    mean = values.mean(0, dtype=torch.float64)
    # Sums in float64 without a copy of the whole block in it.
    return mean, torch.square(values - mean.to(values.dtype)).mean(0, dtype=torch.float64)


def _native(values: Tensor) -> tuple[Tensor, Tensor]:
    mean, square = (torch.empty(values.shape[1:], dtype=torch.float64) for _ in range(2))
    function = getattr(library(), f"moments_{SUFFIX[values.dtype]}")
    function.restype = ctypes.c_int64
    checked(
        function(
            pointer(values), ctypes.c_int64(len(values)), ctypes.c_int64(mean.numel()), ctypes.c_int64(torch.get_num_threads()),
            pointer(mean), pointer(square),
        )
    )  # fmt: skip
    return mean, square
