"""Normalisations that apply further layers to their result, such as the activation inside timm's `BatchNormAct2d`.

These layers are children of the normalisation, and stay so in its replacement, so that all names remain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from credibly.networks.copying import copy_module

# Rounding of one normalisation and its activation, relative to their largest output.
TOLERANCE = 1e-3


class Followed(nn.Module):
    """A normalisation, the next class in the order of inheritance, and the module's children after it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then apply the children in order."""
        x = super().forward(x)
        for child in self.children():
            x = child(x)
        return x


def is_followed(layer: Any, axes: int) -> bool:
    """Return whether a BatchNorm layer with its own forward normalises and then applies its children in order.

    Its output in evaluation mode is compared for random inputs.

    Args:
        layer: the layer.
        axes: number of axes after the channels.
    """
    layer = copy_module(layer).eval()
    mean, var = layer.running_mean, layer.running_var
    if (mean is None) != (var is None):
        return False
    noise = torch.randn(4, layer.num_features, *[3] * axes, generator=torch.Generator().manual_seed(0))
    like = mean if mean is not None else layer.weight
    x = noise if like is None else noise.to(like)
    if mean is not None:
        shape = (-1, *[1] * axes)
        x = mean.view(shape) + 2 * var.sqrt().view(shape) * x
    with torch.no_grad():
        try:
            found = layer(x.clone())
            wanted = nn.functional.batch_norm(x, mean, var, layer.weight, layer.bias, mean is None, 0.0, layer.eps)
            for child in layer.children():
                wanted = child(wanted)
        except Exception:
            return False
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return False
    return float((found - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())
