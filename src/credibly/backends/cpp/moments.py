"""Mean and variance over draws, as predictions need them."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.backends.cpp import api
from credibly.backends.cpp.in_use import library


def mean_of_draws(values: Tensor) -> Tensor:
    """Return the mean over the first axis in float64. Expanded axes are averaged once."""
    once = tuple(slice(None, 1) if stride == 0 else slice(None) for stride in values.stride())
    return values[once].mean(0, dtype=torch.float64).expand(values.shape[1:])


def moments_of_draws(values: Tensor, use_cpp: bool = False) -> tuple[Tensor, Tensor]:
    """Return mean and variance over the first axis in float64.

    Args:
        values: draws first.
        use_cpp: use the C++ backend if it is available.
    """
    supported = values.is_contiguous() and values.device.type == "cpu" and values.dtype in api.SUFFIX
    if use_cpp and supported and library() is not None:
        return _cpp_moments(values)
    mean = values.mean(0, dtype=torch.float64)
    # Sums in float64 without a float64 copy of all values.
    return mean, torch.square(values - mean.to(values.dtype)).mean(0, dtype=torch.float64)


def _cpp_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = (torch.empty(values.shape[1:], dtype=torch.float64) for _ in range(2))
    arguments = api.Moments(
        values=api.address(values),
        draws=len(values),
        columns=mean.numel(),
        threads=torch.get_num_threads(),
        mean=api.address(mean),
        variance=api.address(variance),
    )
    api.function("moments", values.dtype)(arguments)
    return mean, variance
