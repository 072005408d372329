"""How far reduced precision may move a gradient: the same network in float64 with the operands of its products cut.

A tensor core multiplies operands of 10 (tf32) or 7 (bf16) mantissa bits and adds in float32. What that does to a
gradient depends on the network, its depth and its parameters, so a fixed tolerance is either loose or, at another
point, too tight. Here the operands of every convolution and linear layer are cut in the forward and the backward pass,
and everything else is exact: the resulting error is that of the format itself, for this network at this point.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BITS = {"tf32": 10, "bf16": 7}
PRODUCTS = (nn.Conv2d, nn.Linear)
# Implementations round or truncate, sum in another order, and bf16 also stores activations. A wrong gradient errs by
# about 1; that of ResNet-20-FRN in tf32 by 0.016 to 0.019 in this emulation, most of it from activations that fall on
# the other side of their threshold, and by 0.031 on an H200.
MARGIN = 3.0


def truncated(values: Tensor, bits: int) -> Tensor:
    """Return float64 values with the mantissa cut to this number of bits."""
    mask = -1 << (52 - bits)
    return (values.contiguous().view(torch.int64) & mask).view(torch.float64)


class _CutForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: int) -> Tensor:
        return truncated(values, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _CutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return truncated(gradients[0], ctx.bits), None


def gradient_of_products(net: nn.Module, data: tuple[Tensor, Tensor], bits: int | None = None) -> Tensor:
    """Return the gradient of the summed cross-entropy of a float64 network with operands cut to `bits`, flat."""
    handles = []
    saved = {name: value.detach().clone() for name, value in net.named_parameters()}
    try:
        for module in net.modules() if bits is not None else ():
            if isinstance(module, PRODUCTS):
                module.weight.data = truncated(module.weight.data, bits)
                handles.append(module.register_forward_pre_hook(lambda _, x: (_CutForward.apply(x[0], bits),)))
                handles.append(module.register_forward_hook(lambda _, x, out: _CutBackward.apply(out, bits)))
        loss = nn.functional.cross_entropy(net(data[0]), data[1], reduction="sum")
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, value in net.named_parameters():
                value.copy_(saved[name])


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return |found - exact| / |exact|."""
    return float((found - exact).norm() / exact.norm())


def tolerance(net: nn.Module, data: tuple[Tensor, Tensor], precision: str) -> tuple[Tensor, float]:
    """Return the gradient of the log likelihood in float64, and the relative error that the precision may have."""
    exact = -gradient_of_products(net, data)
    return exact, MARGIN * relative_error(-gradient_of_products(net, data, BITS[precision]), exact)
