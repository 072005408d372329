"""Dropout made visible: a copy of a network whose dropout layers multiply by masks that are given to them.

A mask is a tensor like any parameter: (1, features) for one draw of q(w) that all rows share, (rows, features) for one draw a
row. So a pass with dropout is a pass of a deterministic network, many passes are one batch, and what lies before the first
mask is computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from credibly.core.inputs import Inputs, call, row_count
from credibly.errors import InputError

CHANNEL_WISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT = (nn.Dropout, *CHANNEL_WISE, nn.AlphaDropout)
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TAKING = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_INPUT_WEIGHTS = {"weight", "weight_ih", "weight_ih_l0", "weight_ih_l0_reverse"}
_INPUT_WEIGHTS |= {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
_SELU_FLOOR = -1.7580993408473766  # what alpha dropout puts in place of a dropped value: -scale * alpha of SELU


@dataclass(frozen=True)
class Site:
    """A place where dropout acts: a dropout layer, or the input of a layer before which it was inserted.

    Attributes:
        name: of the layer that holds the mask.
        rate: probability that a value is dropped.
        weights: the weights whose inputs are dropped, which carry the layer's share of the KL divergence; none at the end.
        direct: whether those weights see the dropped values themselves, with nothing between, and see nothing else.
    """

    name: str
    rate: float
    weights: tuple[str, ...]
    direct: bool
    alpha: bool = False

    @property
    def gain(self) -> float:
        """What a kept value is multiplied by: 1/keep, or 1 for alpha dropout, which rescales by itself."""
        return 1.0 if self.alpha else 1 / (1 - self.rate)

    @property
    def mask(self) -> str:
        """The name of its mask among the network's tensors."""
        return f"{self.name}.mask" if self.name else "mask"


class MaskedDropout(nn.Module):
    """In place of a dropout layer: values times the mask, which holds 0 and 1/keep (for alpha dropout 0 and 1)."""

    mask: Tensor
    keep: float
    alpha: bool
    channel_wise: bool

    def forward(self, x: Tensor) -> Tensor:
        """x with the mask applied."""
        return self.apply_mask(x, self.mask)

    def apply_mask(self, x: Tensor, mask: Tensor) -> Tensor:
        """The same with a mask from elsewhere that broadcasts against x."""
        if not self.alpha:
            return x * mask
        # Keeps mean and variance of SELU activations: a (x z + floor (1 - z)) + b (Klambauer et al. 2017).
        a = (self.keep + _SELU_FLOOR**2 * self.keep * (1 - self.keep)) ** -0.5
        b = -a * _SELU_FLOOR * (1 - self.keep)
        result: Tensor = a * (x * mask + _SELU_FLOOR * (1 - mask)) + b
        return result


class MaskedInput:
    """Marks layers before which dropout was inserted; their forward multiplies the input by `mask` first."""


def masked_copy(
    module: nn.Module, insert: str | Sequence[str] | None, rate: float | None
) -> tuple[nn.Module, dict[str, float]]:
    """A copy whose dropout acts through masks, and the rate of each place by the name of the layer that holds the mask.

    Args:
        module: the network, in evaluation mode.
        insert: patterns of the names of Linear and convolution layers before which dropout is inserted.
        rate: of all places; None keeps the layers' own rates, and 0.05 for inserted ones.
    """
    if rate is not None and not 0 < rate < 1:
        raise InputError("rate", f"found {rate!r}", "Pass a number between 0 and 1")
    module = copy.deepcopy(module)
    rates: dict[str, float] = {}
    for name, layer in module.named_modules():
        if type(layer) in DROPOUT:
            own = float(layer.p) if rate is None else rate
            if not 0 < own < 1:
                raise InputError(
                    "rate",
                    f"layer {name!r} drops with probability {own}",
                    "Pass rate= between 0 and 1, or mend the layer",
                )
            facts: dict[str, Any] = {
                "alpha": type(layer) in ALPHA,
                "channel_wise": type(layer) in CHANNEL_WISE,
                "keep": 1 - own,
            }
            layer.__class__ = MaskedDropout
            vars(layer).update(facts)
            layer.register_buffer("mask", torch.ones(()), persistent=False)
            rates[name] = own
    patterns = (insert,) if isinstance(insert, str) else tuple(insert or ())
    candidates = {name: layer for name, layer in module.named_modules() if type(layer) in WEIGHTED}
    for pattern in patterns:
        chosen = [name for name in candidates if fnmatchcase(name, pattern)]
        if not chosen:
            raise InputError(
                "insert",
                f"pattern {pattern!r} matches no Linear or convolution layer",
                f"They are {', '.join(candidates) or 'none'}",
            )
        for name in chosen:
            if name not in rates:
                layer = candidates[name]
                layer.__class__ = type(
                    f"Masked{type(layer).__name__}", (type(layer), MaskedInput), {"forward": _masked_forward}
                )
                layer.register_buffer("mask", torch.ones(()), persistent=False)
                rates[name] = 0.05 if rate is None else rate
    return module, rates


def find_sites(
    module: nn.Module, rates: dict[str, float], trial: Inputs
) -> tuple[tuple[Site, ...], dict[str, tuple[int, ...]]]:
    """The places where dropout acts, in the order of a trial pass, and the shape of each one's mask for a row."""
    rows = row_count(trial)
    shapes: dict[str, tuple[int, ...]] = {}
    order: list[tuple[str, str]] = []
    outputs: dict[str, Tensor] = {}
    fed: dict[str, list[str]] = {name: [] for name in rates}  # the layers that take a dropout's output as it is

    def enter(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if name in rates:
            order.append(("drop", name))
            x = args[0]
            if name in shapes:
                raise InputError(
                    "net", f"dropout {name!r} is used more than once in a pass", "Use a layer of its own for each place"
                )
            if x.ndim < 2 or x.shape[0] != rows:
                raise InputError(
                    "net", f"dropout {name!r} acts on {tuple(x.shape)}", "The rows have to be on the first axis there"
                )
            wide = bool(getattr(layer, "channel_wise", False)) and x.ndim > 2
            shapes[name] = (x.shape[1], *(1,) * (x.ndim - 2)) if wide else tuple(x.shape[1:])
        if isinstance(layer, _TAKING):
            order.append(("weight", name))
            if isinstance(layer, WEIGHTED):
                feeding = [site for site, out in outputs.items() if args[0] is out]
                for site in (*feeding, *((name,) if isinstance(layer, MaskedInput) else ())):
                    fed[site].append(name)

    def leave(name: str, layer: nn.Module, out: Any) -> None:
        if isinstance(layer, MaskedDropout):
            outputs[name] = out

    handles = []
    for name, layer in module.named_modules():
        if name in rates or isinstance(layer, _TAKING):
            handles.append(layer.register_forward_pre_hook(lambda m, args, name=name: enter(name, m, args)))
            handles.append(layer.register_forward_hook(lambda m, args, out, name=name: leave(name, m, out)))
    try:
        with torch.no_grad():
            call(module, trial)
    finally:
        for handle in handles:
            handle.remove()
    sites = []
    for place, (what, name) in enumerate(order):
        if what == "drop":
            after = fed[name] or [n for what, n in order[place:] if what == "weight"][:1]
            weights = tuple(w for n in after for w in _input_weights(n, module.get_submodule(n)))
            direct = bool(fed[name]) and all(order.count(("weight", n)) == 1 for n in after)
            alpha = bool(getattr(module.get_submodule(name), "alpha", False))
            sites.append(Site(name, rates[name], weights, direct, alpha))
    missing = [name for name in rates if name not in shapes]
    if missing:
        raise InputError(
            "net", f"dropout {missing[0]!r} was not used in a pass", "Remove the layer, or call it in forward"
        )
    return tuple(sites), shapes


def repeated_width(module: nn.Module, first: str, trial: Inputs) -> int:
    """Values that a row takes from its first mask on: what every pass computes anew."""
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
    try:
        with torch.no_grad():
            call(module, trial)
    finally:
        for handle in handles:
            handle.remove()
    return max(1, sum(sizes))


def _input_weights(name: str, layer: nn.Module) -> tuple[str, ...]:
    """The names of the weights by which a layer multiplies its inputs."""
    own = (n for n, _ in layer.named_parameters(recurse=False) if n in _INPUT_WEIGHTS)
    return tuple(f"{name}.{n}".lstrip(".") for n in own)


def _masked_forward(self: Any, x: Tensor) -> Tensor:
    plain: Any = type(self).__bases__[0]
    result: Tensor = plain.forward(self, x * self.mask)
    return result


def sites_of_layers(
    layers: Sequence[Sequence[int]], starts: Mapping[str, int], sites: Sequence[Site]
) -> list[int | None] | None:
    """For layers as `native.Stack` has them, which site drops the inputs of each, or None; None where a site is more than that.

    starts: the place of each weight in a parameter vector, by name.
    """
    if any(site.alpha or not site.direct or len(site.weights) != 1 for site in sites):
        return None
    places = {starts[site.weights[0]]: place for place, site in enumerate(sites)}
    return [places.get(layer[2]) for layer in layers] if len(places) == len(sites) else None
