"""A direct batched forward for plain stacks of layers: what vmap would compute, with less dispatch.

`nn.Sequential` of Linear layers and elementwise activations is by far the commonest network in this field. For those the
batch of C parameter vectors goes through `baddbmm` layer by layer; every other network takes the general path (vmap).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.masks import MaskedDropout, MaskedInput

Parameters = Mapping[str, Tensor]
Stage = Callable[
    [Parameters, Tensor, bool], tuple[Tensor, bool]
]  # (parameters, values, batched?) -> (values, batched?)

_ELEMENTWISE = (
    nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.SELU, nn.CELU, nn.Mish, nn.ReLU6,
    nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.Identity, nn.Dropout, nn.AlphaDropout,
)  # fmt: skip

LARGE_WEIGHT = 2**10  # values of a weight whose gradient's layout matters


def stacked_forward(
    module: nn.Module, aliases: Mapping[str, str]
) -> Callable[[Parameters, Tensor, bool], Tensor] | None:
    """The forward of a stack for parameters (C, *shape), or None where the module is more than a stack.

    The returned function takes (parameters, x, batched): x is (N, ...) for all, or (C, N, ...) with batched=True, and gives
    (C, N, K). `aliases` maps every parameter name to the one it goes by in `parameters`.
    """
    stages = _stages(module, "", aliases)
    if not stages:
        return None

    def forward(parameters: Parameters, x: Tensor, batched: bool) -> Tensor:
        for stage in stages:
            x, batched = stage(parameters, x, batched)
        count = next(iter(parameters.values())).shape[0]
        return x if batched else x.expand(count, *x.shape)

    return forward


def _stages(module: nn.Module, prefix: str, aliases: Mapping[str, str]) -> list[Stage] | None:
    # Exact types only: a subclass, a hook or a parametrisation may compute something else.
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.Sequential:
        found: list[Stage] = []
        for name, child in module.named_children():
            inner = _stages(child, f"{prefix}{name}.", aliases)
            if inner is None:
                return None
            found += inner
        return found
    if isinstance(module, MaskedDropout):
        return [_dropout(module, f"{prefix}mask")]
    if type(module) is nn.Linear or (isinstance(module, nn.Linear) and isinstance(module, MaskedInput)):
        weight = aliases[f"{prefix}weight"]
        bias = aliases[f"{prefix}bias"] if module.bias is not None else None
        mask = [_mask(f"{prefix}mask")] if isinstance(module, MaskedInput) else []
        return [*mask, _linear(module, weight, bias)]
    if type(module) in _ELEMENTWISE:
        return [lambda _, h, batched: (module(h), batched)]
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return [lambda _, h, batched: (h.flatten(2 if batched else 1), batched)]
    return None


def _mask(name: str) -> Stage:
    def stage(parameters: Parameters, h: Tensor, batched: bool) -> tuple[Tensor, bool]:
        mask = parameters.get(name)
        return (h, batched) if mask is None else (h * mask, True)

    return stage


def _dropout(layer: MaskedDropout, name: str) -> Stage:
    def stage(parameters: Parameters, h: Tensor, batched: bool) -> tuple[Tensor, bool]:
        mask = parameters.get(name)
        return (h, batched) if mask is None else (layer.apply_mask(h, mask), True)

    return stage


def _linear(layer: nn.Linear, weight_name: str, bias_name: str | None) -> Stage:
    def stage(parameters: Parameters, h: Tensor, batched: bool) -> tuple[Tensor, bool]:
        weight = parameters.get(weight_name)
        bias = parameters.get(bias_name) if bias_name is not None else None
        if weight is None:  # this layer's weight is fixed: one product for all
            h = F.linear(h, layer.weight, layer.bias if bias is None else None)
            return (h, batched) if bias is None else (h + _between(bias, h, batched), True)
        h = h if batched else h.expand(weight.shape[0], *h.shape)
        shape = h.shape
        h = h.flatten(1, -2) if h.ndim > 3 else h
        held: Tensor | None = layer.bias if bias is None else bias
        if layer.in_features > h.shape[1] and layer.weight.numel() >= LARGE_WEIGHT:
            # W h' in place of h W': its gradient of W lies as W does in the flat vector, and is not copied over transposed.
            # It is worth it where W is larger than the layer's outputs, which then lie transposed.
            h = h.mT
            h = torch.bmm(weight, h) if held is None else torch.baddbmm(held.unsqueeze(-1), weight, h)
            h = h.mT
        elif held is None:
            h = torch.bmm(h, weight.mT)
        else:
            h = torch.baddbmm(held.unsqueeze(-2), h, weight.mT)
        return h if len(shape) == 3 else h.reshape(*shape[:-1], h.shape[-1]), True

    return stage


def _between(bias: Tensor, h: Tensor, batched: bool) -> Tensor:
    """bias (C, K) with axes put in to broadcast against h (..., K), whose first axis is C if batched."""
    return bias.reshape(bias.shape[0], *(1,) * (h.ndim - (2 if batched else 1)), bias.shape[-1])
