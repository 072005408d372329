"""Images in the order of memory that a processor likes: channels last, and 2 x 2 max-pooling that the compiler can vectorise.

Convolutions of torch take about as long in either order. Pooling does not: torch's own takes channels side by side, and the
compiler's code for it goes through single numbers where they are not. The compiler puts convolutions channels last by itself,
except where there is one input channel, which has no order to see; and its gradient of max-pooling is a scatter of indices.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, arguments, map_inputs, output_tensor, tensors_of


def takes_channels_last(module: nn.Module, trial: Inputs) -> bool:
    """Whether a network has 2-D convolutions, and runs on images that lie channels last in memory.

    It is tried, since `x.view(len(x), -1)` after a convolution raises there, where flatten and reshape do not.
    """
    if not any(isinstance(m, nn.Conv2d) for m in module.modules()) or all(t.ndim != 4 for _, t in tensors_of(trial)):
        return False
    try:
        with torch.no_grad():
            args, kwargs = arguments(map_inputs(lambda t: channels_last(torch.cat([t, t])), trial))
            output_tensor(module(*args, **kwargs))
    except Exception:  # whatever it is, the network runs without this
        return False
    return True


def channels_last(x: Tensor) -> Tensor:
    """Rows (N, C, H, W) with the channels side by side in memory; anything else as it is."""
    if x.ndim != 4:
        return x
    if x.shape[1] > 1 or x.device.type != "cpu":
        return x.contiguous(memory_format=torch.channels_last)
    n, _, height, width = x.shape
    # One channel lies like that in any order; only the strides tell the layers after it what is meant.
    return x.contiguous().as_strided((n, 1, height, width), (height * width, 1, width, 1))


def with_paired_pools(module: nn.Module) -> nn.Module:
    """The network with its 2 x 2 max-pooling as `PairedMaxPool2d`: a copy that shares all tensors, or itself without any."""
    memo: dict[int, Any] = {id(m): PairedMaxPool2d() for m in module.modules() if _halves(m)}
    if not memo:
        return module
    memo |= {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)  # which looks every object up there first


def _halves(module: nn.Module) -> bool:
    if type(module) is not nn.MaxPool2d or module._forward_hooks or module._forward_pre_hooks:
        return False
    sides = [(v, v) if isinstance(v, int) else tuple(v) for v in (module.kernel_size, module.stride)]
    plain = module.padding in (0, (0, 0)) and module.dilation in (1, (1, 1))
    return sides == [(2, 2), (2, 2)] and plain and not module.ceil_mode and not module.return_indices


class PairedMaxPool2d(nn.MaxPool2d):
    """Max-pooling of 2 x 2 without overlap. In compiled code it is written as larger of two, along each side in turn."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """(..., H, W) -> (..., H // 2, W // 2): the same numbers and gradients as nn.MaxPool2d(2), bit for bit."""
        if not torch.compiler.is_compiling():
            pooled: Tensor = super().forward(x)
            return pooled
        for axis in (x.ndim - 1, x.ndim - 2):
            half, odd = divmod(x.shape[axis], 2)
            pairs = x.narrow(axis, 0, 2 * half) if odd else x
            first, second = pairs.unflatten(axis, (half, 2)).unbind(axis + 1)
            # Of equal numbers the first has the gradient, and what is not a number stays, as torch has it. (The compiler
            # vectorises a comparison with itself, and not isnan.)
            x = torch.where((second > first) | (second != second), second, first)
        return x
