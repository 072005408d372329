"""BatchNorm of a trained network: statistics that stay as they are, and statistics folded into weights."""

from __future__ import annotations

import torch
from torch import nn

from credibly.errors import InputError
from credibly.networks.normalisation import (
    FrozenBatchNorm,
    find_running_statistics,
    refuse_batchnorm,
    replace_batchnorm,
)

ADVICE = (
    'Laplace(start="network") and from_trained take a trained network as it is. To train or sample its weights, use '
    'credibly.replace_batchnorm(net, "frozen") to keep the statistics, or "group" or "frn" for a network to be trained'
)


def with_fixed_statistics(module: nn.Module, *, trained: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the network with the statistics of its BatchNorm layers fixed, and the names of those layers.

    Args:
        module: the network; it is returned itself if it has no such layer.
        trained: whether the statistics are final. If not, layers in training mode are rejected.
    """
    names = find_running_statistics(module)
    if not names:
        return module, ()
    if not trained and any(module.get_submodule(name).training for name in names):
        refuse_batchnorm(module)
    return replace_batchnorm(module, "frozen"), tuple(names)


def refuse_moving(names: tuple[str, ...]) -> None:
    """Raise for BatchNorm layers whose inputs depend on random parameters."""
    if names:
        listed = ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        what = "1 layer keeps" if len(names) == 1 else f"{len(names)} layers keep"
        found = f"{what} batch statistics that would change with the random parameters: {listed}"
        raise InputError("net", found, ADVICE)


def folded(module: nn.Module) -> nn.Module:
    """Return a network in which the statistics of every BatchNorm layer are part of its weight and bias.

    (x - m) / sqrt(v + eps) * w + b = x * w' + b' with w' = w / sqrt(v + eps) and b' = b - m w': the same function of
    parameters alone, up to rounding, so networks with different statistics have one layout.
    """
    if not find_running_statistics(module):
        return module
    module = replace_batchnorm(module, "frozen")
    for layer in module.modules():
        if isinstance(layer, FrozenBatchNorm):
            with torch.no_grad():
                scale = torch.rsqrt(layer.running_var + layer.eps)
                weight = scale if layer.weight is None else scale * layer.weight
                bias = -layer.running_mean * weight
                bias = bias if layer.bias is None else bias + layer.bias
                trainable = layer.weight is None or layer.weight.requires_grad
                layer.weight, layer.bias = (nn.Parameter(t.clone(), trainable) for t in (weight, bias))
                layer.running_mean.zero_()
                layer.running_var.fill_(1.0)
                layer.eps = 0.0
    return module
