"""Dropout with explicit masks: a copy of a network whose dropout layers multiply by masks passed to them.

A mask is a tensor like any parameter: (1, features) for one draw of q(w) shared by all rows, (rows, features) for one
draw per row. So a stochastic forward pass is a forward pass of a deterministic network, many passes form one batch, and
everything before the first mask is computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, row_count
from credibly.errors import InputError
from credibly.networks.copying import copy_module
from credibly.networks.fans import is_transposed_linear
from credibly.networks.shared_dropout import SharedDropout, call_with_hooks, shared_names, start_pass

CHANNEL_WISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT = (nn.Dropout, *CHANNEL_WISE, nn.AlphaDropout)
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TAKING = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_INPUT_WEIGHTS = {"weight", "weight_ih", "weight_ih_l0", "weight_ih_l0_reverse"}
_INPUT_WEIGHTS |= {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
# The value that alpha dropout substitutes for a dropped one: -scale * alpha of SELU.
_SELU_FLOOR = -1.7580993408473766


@dataclass(frozen=True)
class Site:
    """A position where dropout acts: a dropout layer, or the input of a layer before which it was inserted.

    Attributes:
        name: the layer that holds the mask.
        rate: the probability that a value is dropped.
        weights: the weights whose inputs are dropped, which carry the site's term of the KL divergence; none at the
            end.
        direct: whether those weights act on the dropped values directly, and on nothing else.
        alpha: whether this is alpha dropout.
        layer: the dropout layer, if several calls share it and this is one of them.
    """

    name: str
    rate: float
    weights: tuple[str, ...]
    direct: bool
    alpha: bool = False
    layer: str | None = None

    @property
    def gain(self) -> float:
        """The factor of a kept value: 1/keep, or 1 for alpha dropout, which rescales by itself."""
        return 1.0 if self.alpha else 1 / (1 - self.rate)

    @property
    def mask(self) -> str:
        """The name of its mask among the network's tensors."""
        return f"{self.name}.mask" if self.name else "mask"

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern selects this site, by its own name or that of the layer that it shares."""
        return any(name is not None and fnmatchcase(name, pattern) for name in (self.name, self.layer))


class MaskedDropout(nn.Module):
    """The replacement of a dropout layer: multiplies by a mask of 0 and 1/keep (0 and 1 for alpha dropout)."""

    mask: Tensor
    keep: float
    alpha: bool
    channel_wise: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the mask applied."""
        return self.apply_mask(x, self.mask)

    def apply_mask(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return x with the given mask applied, which broadcasts against x, in the dtype of x."""
        mask = mask.to(x.dtype)
        if not self.alpha:
            return x * mask
        # Keeps mean and variance of SELU activations: a (x z + floor (1 - z)) + b (Klambauer et al. 2017).
        a = (self.keep + _SELU_FLOOR**2 * self.keep * (1 - self.keep)) ** -0.5
        b = -a * _SELU_FLOOR * (1 - self.keep)
        result: Tensor = a * (x * mask + _SELU_FLOOR * (1 - mask)) + b
        return result


class MaskedInput:
    """Marker of layers before which dropout was inserted; their forward multiplies the input by `mask` first."""


def masked_copy(
    module: nn.Module,
    insert: str | Sequence[str] | None,
    rate: float | None,
    *,
    include: Sequence[str] = (),
    only: Collection[str] | None = None,
    shared: Mapping[str, int] | None = None,
) -> tuple[nn.Module, dict[str, float]]:
    """Return a copy whose dropout acts through masks, and the rate of each site by the name of the layer with the mask.

    Args:
        module: the network, in evaluation mode.
        insert: patterns of the names of Linear and convolution layers before which to insert dropout.
        rate: the rate of all sites; None keeps the layers' own rates, and 0.05 for inserted ones. A layer whose rate
            is 0 is then not a site.
        include: patterns of the names of layers that are sites even if their own rate is 0.
        only: the names of the layers that may be sites; None for all.
        shared: the number of calls per forward pass of dropout layers that are called more than once. The calls are
            sites of their own, named after the layer: "drop.0", "drop.1". By default those in `only`.
    """
    if rate is not None and not 0 < rate < 1:
        raise InputError("rate", f"must be strictly between 0 and 1, got {rate!r}")
    module = copy_module(module)
    rates: dict[str, float] = {}
    shared = shared_names(module, DROPOUT, only or ()) if shared is None else shared
    for name, layer in list(module.named_modules()):
        if type(layer) in DROPOUT and (only is None or name in only or name in shared):
            own = float(layer.p) if rate is None else rate
            if own == 0 and not any(fnmatchcase(name, pattern) for pattern in include):
                continue
            if not 0 <= own < 1:
                found = f"layer {name!r} drops with probability {own}"
                raise InputError("rate", found, "Pass a rate between 0 and 1, or fix the layer")
            attributes: dict[str, Any] = {
                "alpha": type(layer) in ALPHA,
                "channel_wise": type(layer) in CHANNEL_WISE,
                "keep": 1 - own,
            }
            holders = {name: layer}
            if name in shared:
                holders = {f"{name}.{i}".lstrip("."): nn.Module() for i in range(shared[name])}
                layer.__class__, layer.turn = SharedDropout, 0
                for i, holder in enumerate(holders.values()):
                    layer.add_module(str(i), holder)
            for site, holder in holders.items():
                holder.__class__ = MaskedDropout
                vars(holder).update(attributes)
                holder.register_buffer("mask", torch.ones(()), persistent=False)
                rates[site] = own
    patterns = (insert,) if isinstance(insert, str) else tuple(insert or ())
    candidates = {
        name: layer for name, layer in module.named_modules() if type(layer) in WEIGHTED or is_transposed_linear(layer)
    }
    for pattern in patterns:
        chosen = [name for name in candidates if fnmatchcase(name, pattern)]
        if not chosen:
            raise InputError(
                "insert",
                f"pattern {pattern!r} matches no Linear or convolution layer",
                f"These layers are {', '.join(candidates) or 'none'}",
            )
        for name in chosen:
            if name not in rates and (only is None or name in only):
                layer = candidates[name]
                layer.__class__ = _masked_class(type(layer))
                layer.register_buffer("mask", torch.ones(()), persistent=False)
                rates[name] = 0.05 if rate is None else rate
    if any(type(layer) is SharedDropout for layer in module.modules()):
        module.register_forward_pre_hook(start_pass)
    return module, rates


def _called_again(module: nn.Module, name: str) -> InputError:
    owner = name.rpartition(".")[0]
    if isinstance(module.get_submodule(name), MaskedInput):
        found = f"layer {name!r}, before which dropout is inserted, is used more than once in a forward pass"
        return InputError("net", found, "Select other layers by insert=, or use a separate layer for each position")
    shared = module.get_submodule(owner)
    calls = len(shared._modules) if type(shared) is SharedDropout else 1
    found = f"dropout {(owner if calls > 1 else name)!r} is called more often than in the fit ({calls} per pass)"
    return InputError("net", found, "The number of calls must not depend on the inputs")


def find_sites(
    module: nn.Module, rates: dict[str, float], trial: Inputs, rowless: list[str] | None = None
) -> tuple[tuple[Site, ...], dict[str, tuple[int, ...]]]:
    """Return the dropout sites in the order of a trial forward pass, and the shape of each site's mask per row.

    A layer that the pass does not call is not a site. One that acts on a tensor without rows, such as an embedding of
    positions, is added to `rowless`, or rejected without such a list.
    """
    rows = row_count(trial)
    shapes: dict[str, tuple[int, ...]] = {}
    order: list[tuple[str, str]] = []
    outputs: dict[str, Tensor] = {}
    # The layers that take a site's output directly.
    fed: dict[str, list[str]] = {name: [] for name in rates}

    def takes(layer: nn.Module) -> bool:
        return isinstance(layer, _TAKING) or is_transposed_linear(layer)

    def enter(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if name in rates:
            x = args[0]
            if name in shapes:
                raise _called_again(module, name)
            off = x.ndim < 2 or x.shape[0] != rows
            if off and rowless is not None and isinstance(layer, MaskedDropout) and not layer.alpha:
                rowless.append(name)
                return
            if off:
                found = f"dropout {name!r} acts on shape {tuple(x.shape)}"
                raise InputError("net", found, "It needs inputs of shape (rows, features, ...)")
            order.append(("drop", name))
            wide = bool(getattr(layer, "channel_wise", False)) and x.ndim > 2
            shapes[name] = (x.shape[1], *(1,) * (x.ndim - 2)) if wide else tuple(x.shape[1:])
        if takes(layer):
            order.append(("weight", name))
            feeding = [site for site, out in outputs.items() if args[0] is out] if isinstance(layer, WEIGHTED) else []
            for site in (*feeding, *((name,) if isinstance(layer, MaskedInput) else ())):
                fed[site].append(name)

    def leave(name: str, layer: nn.Module, out: Any) -> None:
        if isinstance(layer, MaskedDropout):
            outputs[name] = out

    handles = []
    for name, layer in module.named_modules():
        if name in rates or takes(layer):
            handles.append(layer.register_forward_pre_hook(lambda m, args, name=name: enter(name, m, args)))
            handles.append(layer.register_forward_hook(lambda m, args, out, name=name: leave(name, m, out)))
    call_with_hooks(module, trial, handles)
    sites = []
    for position, (what, name) in enumerate(order):
        if what == "drop":
            after = fed[name] or [n for what, n in order[position:] if what == "weight"][:1]
            weights = tuple(w for n in after for w in _input_weights(n, module.get_submodule(n)))
            once = all(order.count(("weight", n)) == 1 for n in after)
            # The weight of a transposed layer has its inputs on the first axis.
            plain = not any(is_transposed_linear(module.get_submodule(n)) for n in after)
            direct = bool(fed[name]) and once and plain
            alpha = bool(getattr(module.get_submodule(name), "alpha", False))
            layer = name.rpartition(".")[0]
            layer_shared = type(module.get_submodule(layer)) is SharedDropout
            sites.append(Site(name, rates[name], weights, direct, alpha, layer if layer_shared else None))
    return tuple(sites), shapes


def repeated_width(module: nn.Module, first: str, trial: Inputs) -> int:
    """Return the number of values per row from the first mask on: what every forward pass recomputes."""
    sizes: list[int] = []
    rows = row_count(trial)

    def enter(_layer: nn.Module, args: tuple[Any, ...]) -> None:
        sizes.append(args[0].numel() // rows)

    def leave(_layer: nn.Module, _args: object, out: Any) -> None:
        if sizes:
            sizes.extend(
                o.numel() // rows for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor)
            )

    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    handles = [m.register_forward_hook(leave) for m in leaves]
    handles.append(module.get_submodule(first).register_forward_pre_hook(enter))
    call_with_hooks(module, trial, handles)
    return max(1, sum(sizes))


def _input_weights(name: str, layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights by which a layer multiplies its inputs."""
    own = (n for n, _ in layer.named_parameters(recurse=False) if n in _INPUT_WEIGHTS)
    return tuple(f"{name}.{n}".lstrip(".") for n in own)


def _masked_forward(self: Any, x: Tensor) -> Tensor:
    plain: Any = type(self).__bases__[0]
    result: Tensor = plain.forward(self, x * self.mask.to(x.dtype))
    return result


def sites_of_layers(
    layers: Sequence[Sequence[int]], starts: Mapping[str, int], sites: Sequence[Site]
) -> list[int | None] | None:
    """Return for each layer which site drops its inputs, or None. Return None if a site does more than that.

    Args:
        layers: the layers as in `credibly.backends.cpp.stack.Stack`.
        starts: the start of each weight in the parameter vector, by name.
        sites: the dropout sites.
    """
    if any(site.alpha or not site.direct or len(site.weights) != 1 for site in sites):
        return None
    by_start = {starts[site.weights[0]]: index for index, site in enumerate(sites)}
    return [by_start.get(layer[2]) for layer in layers] if len(by_start) == len(sites) else None


def _masked_class(kind: type) -> Any:
    """Return the subclass of a layer's class that masks its inputs."""
    return _MASKED.get(kind) or type(f"Masked{kind.__name__}", (kind, MaskedInput), {"forward": _masked_forward})


# Subclasses by layer, under names of this module, so that a network with masks can be pickled.
_MASKED: dict[type, Any] = {
    kind: type(f"Masked{kind.__name__}", (kind, MaskedInput), {"forward": _masked_forward, "__module__": __name__})
    for kind in WEIGHTED
}
globals().update({made.__name__: made for made in _MASKED.values()})
