"""Images in the memory layout that CPUs prefer: channels last, and 2 x 2 max-pooling that the compiler can vectorise.

torch's convolutions take about as long in either layout. Pooling does not: torch's kernel vectorises over adjacent
channels, and the compiler's code is scalar otherwise. The compiler itself puts convolutions channels last, except those
of one input channel, where the layout is ambiguous; and its gradient of max-pooling scatters by index.

Networks with group normalisation stay in torch's default layout: group normalisation is slower channels last, and its
gradient crashes the process there if the weights need one and the images do not.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from credibly.core.inputs import Inputs, arguments, map_inputs, output_tensor, row_count, tensors_of
from credibly.networks.copying import copy_module


class Arrangement(NamedTuple):
    """The arrangement of a network's inputs, found by one forward pass of a few rows.

    Attributes:
        group_norm: whether it normalises groups of channels, by a layer or by a call in its forward; False on a GPU,
            where that makes no difference.
        channels_last: whether it runs on images in channels-last layout, and should.
        row_width: number of activations in a forward pass of one row, a measure of its memory.
    """

    group_norm: bool
    channels_last: bool
    row_width: int


def find_arrangement(module: nn.Module, trial: Inputs, device: torch.device, dtype: torch.dtype) -> Arrangement:
    """Return the arrangement of the network's inputs.

    Channels last is tested, since `x.view(len(x), -1)` after a convolution raises there, unlike flatten and reshape.
    """
    on_cpu = device.type == "cpu"
    dimensions = {t.ndim for _, t in tensors_of(trial)}
    has_images = 4 in dimensions and any(isinstance(m, nn.Conv2d) for m in module.modules())
    look = on_cpu and not dimensions.isdisjoint((4, 5))
    if has_images and (not on_cpu or dtype == torch.float32):
        # The layout of a single row is ambiguous.
        rows = map_inputs(lambda t: channels_last(t if len(t) > 1 else torch.cat([t, t])), trial)
        try:
            width, group_norm, output = _measured(module, rows, look)
            output_tensor(output)
        except Exception:  # whatever the reason, the network runs in the default layout
            pass
        else:
            return Arrangement(group_norm, not group_norm, width)
    width, group_norm, _ = _measured(module, trial, look)
    return Arrangement(group_norm, False, width)


def _measured(module: nn.Module, rows: Inputs, look: bool) -> tuple[int, bool, Any]:
    """Return activations per row, whether groups of channels are normalised (False unless `look`), and the output."""
    sizes: list[int] = [t[0].numel() for _, t in tensors_of(rows)]
    count = row_count(rows)

    def record(_module: nn.Module, _args: object, output: object) -> None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        sizes.extend(o.numel() // count for o in outputs if isinstance(o, Tensor))

    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    handles = [m.register_forward_hook(record) for m in leaves]
    args, kwargs = arguments(rows)
    seen = _GroupNorms()
    try:
        with torch.no_grad(), seen if look else nullcontext():
            output = module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return max(1, sum(sizes)), seen.found, output


class _GroupNorms(TorchFunctionMode):
    """Record whether any function called within the context is a group normalisation.

    A mode of dispatched operations would see the same, but its first use imports torch's compiler: 77 MB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found = self.found or "group_norm" in str(getattr(function, "__name__", function))
        return function(*args, **(kwargs or {}))


def default_layout(x: Tensor) -> Tensor:
    """Return images (N, C, H, W) or (N, C, D, H, W) in torch's default layout, and any other tensor unchanged."""
    return x.contiguous() if x.ndim in (4, 5) else x


def channels_last(x: Tensor) -> Tensor:
    """Return images (N, C, H, W) with adjacent channels in memory, and any other tensor unchanged."""
    if x.ndim != 4:
        return x
    if x.shape[1] > 1 or x.device.type != "cpu":
        return x.contiguous(memory_format=torch.channels_last)
    n, _, height, width = x.shape
    # With one channel both layouts are the same; only the strides show the following layers which is meant.
    return x.contiguous().as_strided((n, 1, height, width), (height * width, 1, width, 1))


def with_paired_pools(module: nn.Module) -> nn.Module:
    """Return the network with 2 x 2 max-pooling as `PairedMaxPool2d`: a copy that shares all tensors, or itself."""
    memo: dict[int, Any] = {id(m): PairedMaxPool2d() for m in module.modules() if _is_2x2_pool(m)}
    if not memo:
        return module
    memo |= {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy_module(module, memo)  # deepcopy looks every object up in the memo first


def _is_2x2_pool(module: nn.Module) -> bool:
    if type(module) is not nn.MaxPool2d or module._forward_hooks or module._forward_pre_hooks:
        return False
    sides = [(v, v) if isinstance(v, int) else tuple(v) for v in (module.kernel_size, module.stride)]
    plain = module.padding in (0, (0, 0)) and module.dilation in (1, (1, 1))
    return sides == [(2, 2), (2, 2)] and plain and not module.ceil_mode and not module.return_indices


class PairedMaxPool2d(nn.MaxPool2d):
    """2 x 2 max-pooling without overlap. Compiled code takes the larger of two values, along each axis in turn."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., H, W) to (..., H // 2, W // 2). Values and gradients are bit-for-bit those of nn.MaxPool2d(2)."""
        if not torch.compiler.is_compiling():
            pooled: Tensor = super().forward(x)
            return pooled
        for axis in (x.ndim - 1, x.ndim - 2):
            half, odd = divmod(x.shape[axis], 2)
            pairs = x.narrow(axis, 0, 2 * half) if odd else x
            first, second = pairs.unflatten(axis, (half, 2)).unbind(axis + 1)
            # As in torch, the first of equal values gets the gradient, and NaN propagates. (The compiler vectorises
            # a comparison with itself, but not isnan.)
            x = torch.where((second > first) | (second != second), second, first)
        return x
