"""Networks whose parameters have several dtypes, such as a head in float32 on a body in bfloat16.

Training loops run them under autocast. Here every layer that multiplies by its weights casts its inputs to their dtype,
so the head computes in float32 without autocast around the network. A mix of float32 and float64 is an oversight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from credibly.networks.fans import is_transposed_linear

# Layers that raise if inputs and weights differ in dtype; others, such as normalisation, take both.
_EXACT = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)


def align_dtypes(module: nn.Module) -> None:
    """Let the layers of a network, in place, cast their floating inputs to the dtype of their weights."""
    for part in module.modules():
        exact = isinstance(part, _EXACT) or is_transposed_linear(part)
        if exact and cast_inputs not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def cast_inputs(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a layer in the dtype of its weights."""
    dtypes = {p.dtype for p in layer.parameters(recurse=False) if p.is_floating_point()}
    if len(dtypes) != 1 or torch.is_autocast_enabled(next(layer.parameters()).device.type):
        return args, kwargs
    (dtype,) = dtypes
    return _cast(args, dtype), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return tuple(_cast(part, dtype) for part in value) if type(value) is tuple else value
