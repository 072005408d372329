"""Replacements for batch normalisation.

A BatchNorm layer mixes the rows of a batch and keeps running statistics that are not part of the weights. A network
with one has no log p(y | x, w) per row, hence no density of w. The layers here act on each row separately and have no
state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from credibly.core.checks import check_choice, check_integer
from credibly.errors import InputError
from credibly.networks.copying import copy_module
from credibly.networks.followed_norms import Followed, is_followed

Replacement = Literal["frozen", "group", "frn"]


class FrozenBatchNorm(nn.Module):
    """BatchNorm with fixed statistics: (x - running_mean) / sqrt(running_var + eps) * weight + bias.

    Equal to BatchNorm in eval mode, whichever mode it is in. The statistics are buffers; weight and bias are
    parameters.

    Args:
        num_features: the number of channels C.
        eps: added to the variance.
        affine: whether there are a weight (C,) and a bias (C,).
        channel_axis: the axis of the input that holds the channels.

    Shapes: (N, C) or (N, C, ...) in, the same out.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        channel_axis: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.channel_axis = _check_features(num_features), _check_eps(eps), channel_axis
        self.register_buffer("running_mean", torch.zeros(num_features, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(num_features, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.ones(num_features, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype)) if affine else None

    def reset_parameters(self) -> None:
        """Reset weight to 1 and bias to 0; the statistics stay."""
        _set_constants((self.weight, 1.0), (self.bias, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, ...) to (N, C, ...)."""
        _check_channels(x, self.channel_axis, self.num_features)
        # Elementwise operations instead of F.batch_norm, for which vmap lacks a rule in some settings and then loops
        # with a warning. Centred first, since x * scale + shift loses digits if the mean is large relative to the std.
        shape = [1] * x.dim()
        shape[self.channel_axis] = self.num_features
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        y = (x - self.running_mean.view(shape)) * scale.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(x.dtype)  # half-precision inputs stay so with float32 statistics, as under autocast

    def extra_repr(self) -> str:
        """Return the arguments, for print(net)."""
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"


class FilterResponseNorm(nn.Module):
    """Filter response normalisation (Singh & Krishnan 2020): x / sqrt(nu2 + |eps|) * weight + bias, nu2 = mean of x^2.

    The mean is over the spatial axes of one row and one channel, so rows do not interact.

    Args:
        num_features: the number of channels C.
        eps: keeps the quotient finite if a channel is all zero.
        affine: whether there are a weight gamma (C,) and a bias beta (C,).
        threshold: whether max(y, tau) follows with a learned tau (C,), the paper's thresholded linear unit. Off by
            default: it has a kink, and a smooth activation after the layer suits HMC better.

    Shapes: (N, C, L), (N, C, H, W) or (N, C, D, H, W) in, the same out.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-6,
        affine: bool = True,
        threshold: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps = _check_features(num_features), _check_eps(abs(eps))
        self.weight = nn.Parameter(torch.ones(num_features, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype)) if affine else None
        self.tau = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype)) if threshold else None

    def reset_parameters(self) -> None:
        """Reset weight to 1, bias and tau to 0."""
        _set_constants((self.weight, 1.0), (self.bias, 0.0), (self.tau, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, ...) to (N, C, ...), with at least one axis after the channels."""
        if x.dim() < 3:
            raise InputError(
                "x",
                f"FilterResponseNorm got shape {tuple(x.shape)}, which has no spatial axis",
                "The norm of a single value is its sign. For inputs of shape (N, C) use "
                'credibly.replace_batchnorm(net, "group") or "frozen"',
            )
        _check_channels(x, 1, self.num_features)
        shape = [self.num_features] + [1] * (x.dim() - 2)
        y = x * torch.rsqrt(x.square().mean(dim=tuple(range(2, x.dim())), keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        if self.tau is not None:
            y = torch.maximum(y, self.tau.view(shape))
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the arguments, for print(net)."""
        return (
            f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}, threshold={self.tau is not None}"
        )


class FollowedFrozenBatchNorm(Followed, FrozenBatchNorm):
    """`FrozenBatchNorm` and further layers, such as an activation."""


class FollowedFilterResponseNorm(Followed, FilterResponseNorm):
    """`FilterResponseNorm` and further layers, such as an activation."""


class FollowedGroupNorm(Followed, nn.GroupNorm):
    """`GroupNorm` and further layers, such as an activation."""


def _set_constants(*pairs: tuple[Tensor | None, float]) -> None:
    for parameter, value in pairs:
        if parameter is not None:
            nn.init.constant_(parameter, value)


def find_running_statistics(module: nn.Module) -> list[str]:
    """Return the names of submodules that keep running statistics or mix rows, in the order of named_modules().

    These are all BatchNorm layers (without running statistics they use those of the batch) and InstanceNorm layers with
    track_running_stats=True, including lazy ones. The module itself is named "". A layer used twice is listed once.
    """
    return [name for name, layer in _check_module(module).named_modules() if _is_stateful(layer)]


def refuse_batchnorm(module: nn.Module) -> None:
    """Raise an InputError that names the layers of find_running_statistics, if there are any."""
    names = find_running_statistics(module)
    if names:
        listed = ", ".join(_described(module, name) for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = "1 layer keeps" if len(names) == 1 else f"{len(names)} layers keep"
        raise InputError(
            "net",
            f"{what} batch statistics: {listed}{more}",
            "With these the network defines no density of its weights: a row's output depends on the other rows of its "
            'batch and on hidden state that changes between calls. Use credibly.replace_batchnorm(net, "frozen") '
            'to keep the outputs of a trained network, or "group" or "frn" for one to be trained',
        )


def replace_batchnorm(module: nn.Module, by: Replacement, *, groups: int = 8) -> nn.Module:
    """Return a deep copy of the module in which every layer of find_running_statistics is replaced.

    Weights and biases keep their names, values, dtype, device and requires_grad. A layer used twice is replaced by one.
    Layers inside the replaced ones, such as the activation of timm's BatchNormAct2d, follow the new normalisation.
    Hooks on the replaced layers are dropped.

    Args:
        module: the network; it may be a BatchNorm layer itself.
        by: "frozen", a FrozenBatchNorm: the outputs of eval mode (of a network never trained: mean 0, variance 1);
            "group", GroupNorm with the largest number of groups up to `groups` that divides the channels;
            "frn", a FilterResponseNorm, which needs spatial axes and refuses (N, C) inputs when it is called.
        groups: the maximal number of groups for "group". A layer that may get (N, C) inputs has fewer if needed for
            four channels per group: two values normalised together keep only their order, and a single one nothing.
    """
    check_choice("by", by, get_args(Replacement))
    check_integer("groups", groups)
    layers = {name: module.get_submodule(name) for name in find_running_statistics(module)}
    for name, layer in layers.items():
        _check_replaceable(layer, by, _described(module, name))
    # deepcopy looks every object up in its memo first. With the replacements already there it puts them wherever the
    # old layers were referenced: containers, attributes, plain lists, or the module itself.
    memo: dict[int, Any] = {}
    make: dict[str, Callable[[Any], nn.Module]] = {
        "frozen": _frozen,
        "frn": _filter_response,
        "group": lambda layer: _group(layer, groups),
    }
    for layer in layers.values():
        new = make[by](layer)
        for attribute in ("weight", "bias"):
            setattr(new, attribute, copy.deepcopy(getattr(layer, attribute), memo))
        for name, child in layer.named_children() if isinstance(new, Followed) else ():
            new.add_module(name, copy.deepcopy(child, memo))
        memo[id(layer)] = new.train(layer.training)
    return copy_module(module, memo)


def _frozen(layer: Any) -> FrozenBatchNorm:
    # InstanceNorm also takes a single row without the batch axis, so its channel axis is counted from the end.
    axis = -1 - _spatial_axes(layer) if isinstance(layer, _InstanceNorm) else 1
    kind = FollowedFrozenBatchNorm if _has_more(layer) else FrozenBatchNorm
    new = kind(layer.num_features, eps=layer.eps, affine=False, channel_axis=axis)
    new.running_mean, new.running_var = layer.running_mean.detach().clone(), layer.running_var.detach().clone()
    return new


def _filter_response(layer: Any) -> FilterResponseNorm:
    kind = FollowedFilterResponseNorm if _has_more(layer) else FilterResponseNorm
    return kind(layer.num_features, affine=False)


def _group(layer: Any, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    limit = min(groups, channels) if _spatial_axes(layer) else min(groups, max(channels // 4, 1))
    count = next(g for g in range(limit, 0, -1) if channels % g == 0)
    kind = FollowedGroupNorm if _has_more(layer) else nn.GroupNorm
    new = kind(count, channels, eps=layer.eps, affine=False)
    new.affine = layer.affine
    return new


def _is_plain(layer: nn.Module) -> bool:
    return type(layer).forward.__module__.startswith("torch.nn.modules.")


def _has_more(layer: nn.Module) -> bool:
    """Return whether the layer applies its children after the normalisation; `is_followed` has checked it."""
    return not _is_plain(layer) and any(True for _ in layer.children())


def _spatial_axes(layer: nn.Module) -> int:
    """Return how many axes after the channels every input has; 0 if (N, C) is possible."""
    kinds = (
        (nn.BatchNorm2d, 2),
        (nn.BatchNorm3d, 3),
        (nn.InstanceNorm1d, 1),
        (nn.InstanceNorm2d, 2),
        (nn.InstanceNorm3d, 3),
    )
    return next((axes for kind, axes in kinds if isinstance(layer, kind)), 0)


def _is_stateful(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (
        isinstance(layer, _NormBase) and (layer.track_running_stats or layer.running_mean is not None)
    )


def _check_replaceable(layer: Any, by: Replacement, described: str) -> None:
    def refuse(why: str, advice: str) -> None:
        raise InputError("net", f"{described} {why}", advice)

    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
        refuse("does not know its number of channels yet", "Call the network on one batch first")
    if is_parametrized(layer):
        refuse("is parametrized", "Call torch.nn.utils.parametrize.remove_parametrizations on it first")
    if not _is_plain(layer) and not is_followed(layer, _spatial_axes(layer)):
        refuse("overrides forward, which does more than normalise and apply its own layers", "Replace it by hand")
    if by == "frozen" and (layer.running_mean is None or layer.running_var is None):
        refuse("has no running statistics to freeze (track_running_stats=False)", 'Use "group" or "frn" instead')
    if by == "group" and layer.num_features == 1 and not _spatial_axes(layer):
        refuse("has one channel, and the group norm of (N, 1) inputs is constant", 'Use "frozen" instead')


def _described(module: nn.Module, name: str) -> str:
    kind = type(module.get_submodule(name)).__name__
    return f"{name!r} ({kind})" if name else f"the module itself ({kind})"


def _check_module(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise InputError("net", f"must be a torch.nn.Module, got {type(module).__name__}")
    return module


def _check_features(count: int) -> int:
    check_integer("num_features", count)
    return count


def _check_eps(eps: float) -> float:
    if not (math.isfinite(eps) and eps >= 0):
        raise InputError("eps", f"must be a non-negative number, got {eps!r}", "A usual value is 1e-6")
    return float(eps)


def _check_channels(x: Tensor, axis: int, channels: int) -> None:
    # Without this a layer for one channel would silently broadcast over any number of them.
    if not -x.dim() <= axis < x.dim() or x.shape[axis] != channels:
        found = f"must have {channels} channels on axis {axis}, got shape {tuple(x.shape)}"
        raise InputError("x", found, "Pass inputs of shape (N, C, ...)")
