"""Select the random parameters of a network, and determine the dtypes of these and of the fixed ones."""

from __future__ import annotations

import functools
import glob
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from weakref import WeakKeyDictionary

import torch
from torch import nn

from credibly.core.inputs import Inputs, call, map_inputs, tensors_of
from credibly.errors import InputError

Patterns = str | Sequence[str]
# The random parameters of layouts, by their copies of networks.
RANDOM: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def names_by_parameter(module: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each parameter to all its names: more than one if it is tied."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in groups.values()}


def random_patterns(module: nn.Module, random: Patterns | None) -> tuple[str, ...]:
    """Return the patterns of the random parameters; None selects the trainable ones, those with `requires_grad`.

    If all parameters are trainable that is "*", else the name of each of them.
    """
    if random is not None:
        patterns = (random,) if isinstance(random, str) else tuple(random) if isinstance(random, Collection) else ()
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            advice = 'Such as random="head.*"; None selects the trainable parameters'
            raise InputError("random", f"must be a pattern of names or several of them, got {random!r}", advice)
        return patterns
    names = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    if all(names.values()):
        return ("*",)
    # The copy of a network in a layout has no gradients, and the random parameters of that layout.
    known = RANDOM.get(module)
    if not any(names.values()) and known is not None:
        return known
    if not any(names.values()):
        raise InputError(
            "random",
            f"none of the {len(names)} parameters of net is trainable: requires_grad is False for all",
            'Pass random="*" for all of them or a pattern such as random="head.*", or set requires_grad',
        )
    return tuple(glob.escape(name) for name, trainable in names.items() if trainable)


def matching(names: Mapping[str, Sequence[str]], patterns: tuple[str, ...]) -> list[str]:
    """Return the parameters, by first name, with a name that matches a pattern. Raise if a pattern matches none."""
    found = set()
    for pattern in patterns:
        fits = {name for name, aliases in names.items() if any(fnmatchcase(alias, pattern) for alias in aliases)}
        if not fits:
            raise InputError("random", f"pattern {pattern!r} matches no parameter", f"The names are {listed(names)}")
        found |= fits
    return [name for name in names if name in found]


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return the parameters with requires_grad=False of a network that has others too."""
    flags = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return frozenset(name for name, trainable in flags.items() if not trainable) if any(flags.values()) else frozenset()


def joint_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the smallest floating dtype that holds values of all given ones."""
    return functools.reduce(torch.promote_types, dtypes)


def input_dtype(module: nn.Module, x: Inputs) -> torch.dtype | None:
    """Return the first dtype, in the order of the parameters, that a network of several takes floating inputs in.

    None if it takes none of them, or if no input is floating.
    """
    if not any(t.is_floating_point() for _, t in tensors_of(x)):
        return None
    for dtype in dict.fromkeys(p.dtype for p in module.parameters() if p.is_floating_point()):
        trial = map_inputs(lambda t, dtype=dtype: t[:2].to(dtype) if t.is_floating_point() else t[:2], x)  # type: ignore[misc]
        try:
            with torch.no_grad():
                call(module, trial)
        except Exception:  # whatever the reason, the network does not take this dtype
            continue
        return dtype
    return None


def listed(names: Mapping[str, object] | Sequence[str], most: int = 8) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "none"
