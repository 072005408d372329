"""Copy networks that keep tensors of earlier forward passes as attributes.

Hooks such as those of the old `torch.nn.utils.weight_norm`, and forward passes that keep activations, store results of
computations as attributes of a module. `copy.deepcopy` rejects these, and tensors from inside `torch.func.vmap` have
no values once it has ended.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from credibly.networks.selection import RANDOM

Module = TypeVar("Module", bound=nn.Module)
# Maximum depth of nested containers that are searched.
DEEPEST = 3


def copy_module(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Return a deep copy in which stored results are detached, and NaN where their values are lost.

    `memo` maps ids of objects to their replacements, as in `copy.deepcopy`.
    """
    memo = {} if memo is None else memo
    for tensor in _stored(module):
        if _is_functorch_wrapper(tensor):
            memo.setdefault(id(tensor), _placeholder(tensor))
        elif not _is_leaf(tensor):
            memo.setdefault(id(tensor), tensor.detach().clone())
    made = copy.deepcopy(module, memo)
    if module in RANDOM:
        RANDOM[made] = RANDOM[module]
    return made


def forget_results(module: nn.Module) -> None:
    """Set attributes of the module that hold tensors from inside an ended `torch.func` transform to None."""
    for part in module.modules():
        # A module's own dicts of parameters and buffers are not changed.
        own = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        for name, value in own.items():
            if any(map(_is_functorch_wrapper, _tensors(value))):
                setattr(part, name, None)


def _stored(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for value in vars(part).values():
            yield from _tensors(value)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < DEEPEST and isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, depth + 1)
    elif depth < DEEPEST and isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part, depth + 1)


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:
        # A view of parameters of an ended `functional_call`, which an optimiser has stepped since: recurrent layers
        # keep such views in a list.
        return False


def _placeholder(tensor: Tensor) -> Tensor:
    shape = tuple(tensor.shape)
    value = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full(shape, value, dtype=tensor.dtype, device=tensor.device)


def _is_functorch_wrapper(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
