"""A direct batched forward pass for plain stacks of layers: the same as vmap, with less dispatch overhead.

`nn.Sequential` of Linear layers and elementwise activations is by far the commonest network in this field. For these
the C parameter vectors are evaluated with `baddbmm` layer by layer; every other network takes the general path (vmap).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credibly.core.autodiff import transformed
from credibly.networks.dropout_masks import MaskedDropout, MaskedInput
from credibly.networks.tabular import PeriodicEmbedding

Parameters = Mapping[str, Tensor]
# (parameters, values, batched?) -> (values, batched?)
Stage = Callable[[Parameters, Tensor, bool], tuple[Tensor, bool]]

_ELEMENTWISE = (
    nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.SELU, nn.CELU, nn.Mish,
    nn.ReLU6, nn.Hardtanh, nn.LogSigmoid, nn.Softsign, nn.Identity, nn.Dropout, nn.AlphaDropout,
)  # fmt: skip

# The maximum number of values that torch's vectorised loops process at a time on a CPU.
WHOLE_VECTORS = 32
# Number of values of a weight from which the layout of its gradient matters.
LARGE_WEIGHT = 2**10
# Number of rows per output of a layer from which a mask is applied to its weight.
FOLD_RATIO = 4


def stacked_forward(
    module: nn.Module, aliases: Mapping[str, str]
) -> Callable[[Parameters, Tensor, bool], Tensor] | None:
    """Return the forward pass of a stack for parameters (C, *shape), or None if the module is not a plain stack.

    The returned function takes (parameters, x, batched), with x (N, ...) shared by all or (C, N, ...) if batched, and
    returns (C, N, K). `aliases` maps every parameter name to its name in `parameters`.
    """
    stages = _stages(module, "", aliases)
    if not stages:
        return None
    stages = _folded(stages)

    def forward(parameters: Parameters, x: Tensor, batched: bool) -> Tensor:
        for stage in stages:
            x, batched = stage(parameters, x, batched)
        count = next(iter(parameters.values())).shape[0]
        return x if batched else x.expand(count, *x.shape)

    return Stacked(forward, module, aliases)


class Stacked:
    """The forward pass of a stack. It is pickled as the module that it was made from."""

    def __init__(
        self, forward: Callable[[Parameters, Tensor, bool], Tensor], module: nn.Module, aliases: Mapping[str, str]
    ) -> None:
        self._forward, self._module, self._aliases = forward, module, aliases

    def __call__(self, parameters: Parameters, x: Tensor, batched: bool) -> Tensor:
        """Return outputs (C, N, K)."""
        return self._forward(parameters, x, batched)

    def __reduce__(self) -> tuple[Any, ...]:
        return stacked_forward, (self._module, self._aliases)


def _stages(module: nn.Module, prefix: str, aliases: Mapping[str, str]) -> list[Stage] | None:
    # Exact types only: a subclass, a hook or a parametrisation may compute something else.
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.Sequential:
        found: list[Stage] = []
        for name, child in module._modules.items():  # not named_children, which skips a module used twice
            inner = _stages(child, f"{prefix}{name}.", aliases)
            if inner is None:
                return None
            found += inner
        return found
    if isinstance(module, MaskedDropout):
        return [_Mask(f"{prefix}mask", module)]
    if type(module) is nn.Linear or (isinstance(module, nn.Linear) and isinstance(module, MaskedInput)):
        weight = aliases[f"{prefix}weight"]
        bias = aliases[f"{prefix}bias"] if module.bias is not None else None
        mask = [_Mask(f"{prefix}mask", None)] if isinstance(module, MaskedInput) else []
        return [*mask, _Linear(module, weight, bias)]
    if type(module) is PeriodicEmbedding:
        return [_Embedding(module, aliases[f"{prefix}weight"], aliases[f"{prefix}bias"])]
    if type(module) is nn.SiLU:
        return [lambda _, h, batched: (_silu(h), batched)]
    if type(module) in _ELEMENTWISE:
        return [lambda _, h, batched: (module(h), batched)]
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return [lambda _, h, batched: (h.flatten(2 if batched else 1), batched)]
    return None


@dataclass(frozen=True)
class _Mask:
    """Multiplication by a mask, if there is one; by `layer`, if given, which also handles alpha dropout."""

    name: str
    layer: MaskedDropout | None

    def __call__(self, parameters: Parameters, h: Tensor, batched: bool) -> tuple[Tensor, bool]:
        mask = parameters.get(self.name)
        if mask is None:
            return h, batched
        return (h * mask if self.layer is None else self.layer.apply_mask(h, mask)), True


@dataclass(frozen=True)
class _Linear:
    """A Linear layer. Its own weight and bias are used if `parameters` has none."""

    layer: nn.Linear
    weight: str
    bias: str | None

    def __call__(self, parameters: Parameters, h: Tensor, batched: bool) -> tuple[Tensor, bool]:
        layer, weight = self.layer, parameters.get(self.weight)
        bias = parameters.get(self.bias) if self.bias is not None else None
        if weight is None:  # a fixed weight: one product for all
            h = F.linear(h, layer.weight, layer.bias if bias is None else None)
            return (h, batched) if bias is None else (h + _broadcastable(bias, h, batched), True)
        h = h if batched else h.expand(weight.shape[0], *h.shape)
        shape = h.shape
        h = h.flatten(1, -2) if h.ndim > 3 else h
        held: Tensor | None = layer.bias if bias is None else bias
        if layer.in_features > h.shape[1] and layer.weight.numel() >= LARGE_WEIGHT:
            # W h' instead of h W': the gradient of W then has the layout of W in the flat vector and need not be
            # copied. This pays if W is larger than the layer's outputs, which become transposed instead.
            h = h.mT
            h = torch.bmm(weight, h) if held is None else torch.baddbmm(held.unsqueeze(-1), weight, h)
            h = h.mT
        elif layer.out_features == 1 and len(h) == 1 and h.device.type == "cpu" and not torch.compiler.is_compiling():
            # A single chain would use a different routine than several, which rounds differently.
            pair, twice = h.expand(2, -1, -1), weight.mT.expand(2, -1, -1)
            both = None if held is None else held.unsqueeze(-2).expand(2, -1, -1)
            h = (torch.bmm(pair, twice) if both is None else torch.baddbmm(both, pair, twice))[:1]
        elif held is None:
            h = torch.bmm(h, weight.mT)
        else:
            h = torch.baddbmm(held.unsqueeze(-2), h, weight.mT)
        return h if len(shape) == 3 else h.reshape(*shape[:-1], h.shape[-1]), True


@dataclass(frozen=True)
class _Embedding:
    """A periodic embedding: sines and cosines of inputs that are the same for all chains are computed once."""

    layer: PeriodicEmbedding
    weight: str
    bias: str

    def __call__(self, parameters: Parameters, h: Tensor, batched: bool) -> tuple[Tensor, bool]:
        layer, weight, bias = self.layer, parameters.get(self.weight), parameters.get(self.bias)
        if weight is None and bias is None:
            return layer(h), batched
        h = h.clamp(-layer.limit, layer.limit)
        given = layer.weight if weight is None else weight
        parts = given.reshape(*given.shape[:-2], len(layer.columns), layer.width, 2 * layer.frequencies)
        to, of = ("m" if batched else "") + "n", "" if weight is None else "m"
        both = "m" if batched or of else ""
        embedded = torch.einsum(f"{to}ck,{of}cwk->{both}ncw", layer.waves(h), parts).flatten(-2)
        embedded = embedded + (layer.bias if bias is None else bias.unsqueeze(-2))
        h = h if batched else h.expand(len(embedded), *h.shape)
        return torch.cat([h, torch.relu(embedded)], -1), True


@dataclass(frozen=True)
class _MaskedLinear:
    """A mask followed by a Linear layer: (h z) W' = h (z W)', and the latter is less work if W has few rows."""

    mask: _Mask
    linear: _Linear

    def __call__(self, parameters: Parameters, h: Tensor, batched: bool) -> tuple[Tensor, bool]:
        mask, layer = parameters.get(self.mask.name), self.linear.layer
        fixed = self.linear.weight not in parameters and self.linear.bias not in parameters
        plain = h.ndim == 2 + batched and mask is not None and mask.shape[1:] == (1, h.shape[-1])
        if mask is None or not (fixed and plain) or FOLD_RATIO * layer.out_features > h.shape[-2]:
            return self.linear(parameters, *self.mask(parameters, h, batched))
        weight = layer.weight * mask  # (C, out, in)
        if not batched:  # the values before the mask are shared: one product with all weights
            out = F.linear(h, weight.flatten(0, 1)).reshape(len(h), *weight.shape[:2]).transpose(0, 1)
            return out if layer.bias is None else out + layer.bias, True
        return torch.bmm(h, weight.mT) if layer.bias is None else torch.baddbmm(layer.bias, h, weight.mT), True


def _folded(stages: list[Stage]) -> list[Stage]:
    """Return the stages with every mask merged into the Linear layer that follows it."""
    found: list[Stage] = []
    for stage in stages:
        last = found[-1] if found else None
        if isinstance(stage, _Linear) and isinstance(last, _Mask) and not (last.layer is not None and last.layer.alpha):
            found[-1] = _MaskedLinear(last, stage)
        else:
            found.append(stage)
    return found


def _broadcastable(bias: Tensor, h: Tensor, batched: bool) -> Tensor:
    """Return bias (C, K) reshaped to broadcast against h (..., K), whose first axis is C if batched."""
    return bias.reshape(bias.shape[0], *(1,) * (h.ndim - (2 if batched else 1)), bias.shape[-1])


def _silu(h: Tensor) -> Tensor:
    """Return h sigmoid(h), (C, ...), such that a chain's values do not depend on the other chains.

    Compiled code spells it out: the derivative then reuses the sigmoid, where that of silu computes a second exp.
    """
    if torch.compiler.is_compiling():
        return h * torch.sigmoid(h)
    if h.device.type != "cpu" or h.numel() % WHOLE_VECTORS == 0 or transformed():
        return F.silu(h)
    return cast(Tensor, _WholeSilu.apply(h))  # type: ignore[no-untyped-call]


class _WholeSilu(torch.autograd.Function):
    """A silu that rounds all values alike.

    torch's rounds the last values of a tensor differently if they do not fill a SIMD register, so the last chain would
    depend on the number of chains.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        """Return silu(h)."""
        ctx.save_for_backward(h)
        return _in_whole_vectors(F.silu, h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of h."""
        (h,) = ctx.saved_tensors
        if torch.is_grad_enabled() and gradient.requires_grad:  # a derivative of the derivative
            s = torch.sigmoid(h)
            return cast(Tensor, gradient * (s * (1 + h * (1 - s))))
        return _in_whole_vectors(torch.ops.aten.silu_backward, gradient, h)


def _in_whole_vectors(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply an elementwise function, with a tail that does not fill a vector recomputed within a full one."""
    flat = [t.contiguous().view(-1) for t in tensors]
    result = function(*flat)
    count, over = len(result), len(result) % WHOLE_VECTORS
    if count < WHOLE_VECTORS:
        flat = [F.pad(t, (0, WHOLE_VECTORS - count)) for t in flat]
        return function(*flat)[:count].view(tensors[0].shape)
    result[count - over :] = function(*(t[count - WHOLE_VECTORS :].clone() for t in flat))[WHOLE_VECTORS - over :]
    return result.view(tensors[0].shape)
