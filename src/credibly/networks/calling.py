"""A module evaluated with other values of its parameters.

torch's `functional_call` follows tied weights by itself, but walks through the full module in every call to find them,
and leaves the given values in place of a parameter where a module is registered under two names. Here ties are found
once per module, and every attribute is replaced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

# Tied parameters, each as the attributes that refer to it, each attribute with all of its names.
Ties = list[list[list[str]]]


def find_ties(module: nn.Module) -> Ties:
    """Return the parameters that several attributes of a module refer to."""
    found: dict[int, dict[tuple[int, str], list[str]]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                names = found.setdefault(id(parameter), {}).setdefault((id(part), name), [])
                names.append(f"{prefix}.{name}" if prefix else name)
    return [list(attributes.values()) for attributes in found.values() if len(attributes) > 1]


def call_with(module: nn.Module, values: Mapping[str, Tensor], args: Any, kwargs: Any, ties: Ties | None = None) -> Any:
    """Call a module with these values of its parameters, by name; tied parameters share one value."""
    given = dict(values)
    for attributes in find_ties(module) if ties is None else ties:
        for name in (name for names in attributes for name in names if name in values):
            given.update({names[0]: values[name] for names in attributes if name not in names})
            break
    return functional_call(module, given, args, kwargs, tie_weights=False)
