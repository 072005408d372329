"""A network's architecture as JSON, and back, to open a stored run without the code that built its network.

A blueprint lists each layer with its arguments and position, and the dtype. It can hold only the layers of
`layer_table`, identified by their exact type, and nothing is imported or run by a name from the file. Parameter values
come from `load_state_dict`; the device, training mode and which parameters require gradients are up to the caller.

{"blueprint": 1, "dtype": "float32", "network": {"kind": "nn.Sequential", "children": [
    ["0", {"kind": "nn.Linear", "arguments": {"in_features": 8, "out_features": 50, "bias": true}}],
    ["1", {"kind": "nn.SiLU", "arguments": {"inplace": false}}],
    ["2", {"kind": "same", "as": "0"}]]}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from credibly.core.rng import global_stream
from credibly.errors import InputError, StoreError
from credibly.networks.held_padding import plain_type
from credibly.networks.layer_table import LAYERS, SHOWN_BY, TABLE, layer_kind

VERSION = 1
# Maximum depth of nested Sequentials.
DEEPEST = 32
# Maximum number of values in total, so that a modified number raises an error instead of exhausting memory.
LARGEST = 2**32
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


# -- to JSON -----------------------------------------------------------------------------------------------------------
class _Undescribable(Exception):
    """The first property found that a blueprint cannot represent."""


def describe_network(module: nn.Module) -> dict[str, Any] | None:
    """Return the blueprint of a network, ready for `json.dumps`, or None if a blueprint cannot represent it."""
    try:
        return _blueprint(module)
    except _Undescribable:
        return None


def why_not(module: nn.Module) -> str | None:
    """Return why a network has no blueprint, with the name of the layer, or None if it has one."""
    try:
        _blueprint(module)
    except _Undescribable as reason:
        return str(reason)
    return None


def _blueprint(module: nn.Module) -> dict[str, Any]:
    if not isinstance(module, nn.Module):
        raise InputError("module", f"must be a torch.nn.Module, got {type(module).__name__}")
    owners: dict[int, str] = {}
    network = _describe(module, "", {}, owners)
    dtypes = {str(t.dtype).removeprefix("torch.") for t in (*module.parameters(), *module.buffers())}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        raise _Undescribable(f"its tensors are {', '.join(sorted(dtypes))}, but a blueprint has one floating dtype")
    return {"blueprint": VERSION, "dtype": dtypes.pop() if dtypes else "float32", "network": network}


def _describe(module: nn.Module, path: str, seen: dict[int, str], owners: dict[int, str]) -> dict[str, Any]:
    if id(module) in seen:
        return {"kind": "same", "as": seen[id(module)]}
    cls = plain_type(module)
    here = _label(path, cls.__name__)
    if cls is nn.Sequential:
        _check_same(module, nn.Sequential(), here, children=False)
        if path.count(".") + 1 >= DEEPEST:
            raise _Undescribable(f"{here} is nested more than {DEEPEST} levels deep")
        children = []
        for name, child in module._modules.items():
            if child is None:
                raise _Undescribable(f"{here} has None as its child {name!r}")
            children.append([name, _describe(child, f"{path}.{name}" if path else name, seen, owners)])
        described: dict[str, Any] = {"kind": "nn.Sequential", "children": children}
    else:
        if cls not in TABLE:
            derived = any(isinstance(module, k) for k in (*TABLE, nn.Sequential))
            raise _Undescribable(f"{here} is {'a subclass of a known layer' if derived else 'not a known layer'}")
        arguments = {}
        for name, (test, expected) in TABLE[cls].items():
            shown = SHOWN_BY.get((cls, name))
            value = _plain(getattr(module, shown or name, None))
            value = value if shown is None else value is not None
            if not test(value):
                raise _Undescribable(f"{here} has {name} = {value!r}, expected {expected}")
            arguments[name] = value
        try:
            with torch.device("meta"):
                fresh = cls(**_with_tuples(arguments))
        except Exception as error:  # attributes were set to values that the class would refuse
            raise _Undescribable(f"{here} cannot be built from its own arguments ({error})") from error
        _check_same(module, fresh, here, children=True)
        _check_untied(module, path, owners)
        described = {"kind": layer_kind(cls), "arguments": arguments}
    seen[id(module)] = path
    return described


def _check_same(module: nn.Module, fresh: nn.Module, here: str, *, children: bool) -> None:
    """Raise if a layer differs from what its arguments build: hooks, parametrisations, attributes set by hand."""
    if plain_type(module) is not type(fresh):
        raise _Undescribable(f"{here} is {type(module).__name__}, but its arguments give {type(fresh).__name__}")
    mine, theirs = vars(module), vars(fresh)
    for name in {**theirs, **mine}:
        if name in ("training", "_parameters", "_buffers", "_modules"):
            continue
        a, b = _plain(mine.get(name)), _plain(theirs.get(name))
        if name not in mine or name not in theirs or type(a) is not type(b) or a != b:
            what = "hooks" if "hook" in name else f"an attribute {name} of its own ({str(a)[:40]})"
            raise _Undescribable(f"{here} has {what}, which a blueprint cannot represent")
    if _tensor_shapes(module) != _tensor_shapes(fresh):
        raise _Undescribable(f"{here} does not have the tensors that its arguments give")
    if children:
        if list(module._modules) != list(fresh._modules):
            raise _Undescribable(f"{here} does not have the submodules that its arguments give")
        for (name, child), other in zip(module._modules.items(), fresh._modules.values()):
            if child is not None and other is not None:
                _check_same(child, other, f"{name!r} in {here}", children=True)
            elif child is not other:
                raise _Undescribable(f"{here} does not have the submodules that its arguments give")


def _tensor_shapes(module: nn.Module) -> list[tuple[str, Any]]:
    every = [*module._parameters.items(), *module._buffers.items()]
    return [(name, None if t is None else (type(t), tuple(t.shape))) for name, t in every]


def _check_untied(module: nn.Module, path: str, owners: dict[int, str]) -> None:
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in every:
        full = f"{path}.{name}" if path else name
        if id(tensor) in owners:
            raise _Undescribable(f"{full} is tied to {owners[id(tensor)]}, which a blueprint cannot represent")
        owners[id(tensor)] = full


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


# -- from JSON ---------------------------------------------------------------------------------------------------------
def build_network(blueprint: Mapping[str, Any], most: int = LARGEST) -> nn.Module:
    """Build the network of a blueprint, of at most that many values, on the CPU, always with the same initial values.

    Every entry is checked before anything is allocated. An unknown or modified one raises a `StoreError` that names it.
    """
    _check_keys(blueprint, ("blueprint", "dtype", "network"), "the blueprint")
    if blueprint["blueprint"] != VERSION or type(blueprint["blueprint"]) is not int:
        raise StoreError(f"the blueprint has version {blueprint['blueprint']!r}, this release reads {VERSION}")
    if not isinstance(blueprint["dtype"], str) or blueprint["dtype"] not in _DTYPES:
        raise StoreError(f"the blueprint has dtype {blueprint['dtype']!r}, known are {', '.join(_DTYPES)}")
    with torch.device("meta"):
        trial = _build(blueprint["network"], "", {})
    count = sum(t.numel() for t in (*trial.parameters(), *trial.buffers()))
    limit = min(most, LARGEST)
    if count > limit:
        raise StoreError(f"the network of the blueprint has {count} values, more than the limit of {limit}")
    with global_stream(0, "blueprint"), torch.device("cpu"):
        return _build(blueprint["network"], "", {}).to(_DTYPES[blueprint["dtype"]])


def _build(entry: Any, path: str, built: dict[str, nn.Module]) -> nn.Module:
    where = f"entry {path!r} of the blueprint" if path else "the network of the blueprint"
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    if kind == "same":
        _check_keys(entry, ("kind", "as"), where)
        if not isinstance(entry["as"], str) or entry["as"] not in built:
            raise StoreError(f"{where} is the same as {entry['as']!r}, but there is no such entry before it")
        return built[entry["as"]]
    if kind == "nn.Sequential":
        _check_keys(entry, ("kind", "children"), where)
        if path.count(".") + 1 >= DEEPEST:
            raise StoreError(f"{where} is nested more than {DEEPEST} levels deep")
        module: nn.Module = nn.Sequential()
        pairs = entry["children"] if isinstance(entry["children"], list) else [None]
        for pair in pairs:
            if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)):
                raise StoreError(f"{where} has children that are not a list of [name, entry]")
            name, child = pair
            if not name or "." in name or name in module._modules:
                raise StoreError(f"{where} has a child named {name!r}, which is empty, has a dot or is a duplicate")
            _attempt(where, module.add_module, name, _build(child, f"{path}.{name}" if path else name, built))
    elif isinstance(kind, str) and kind in LAYERS:
        _check_keys(entry, ("kind", "arguments"), where)
        cls = LAYERS[kind]
        _check_keys(entry["arguments"], tuple(TABLE[cls]), f"{where} ({kind})")
        for name, (test, expected) in TABLE[cls].items():
            if not test(entry["arguments"][name]):
                raise StoreError(f"{where} ({kind}) has {name} = {entry['arguments'][name]!r}, expected {expected}")
        module = _attempt(f"{where} ({kind})", cls, **_with_tuples(entry["arguments"]))
    else:
        raise StoreError(f"{where} is {kind!r}, which is not a layer that this release knows")
    built[path] = module
    return module


def _attempt(where: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Valid arguments can still contradict each other; torch's layers then raise many kinds of error.
    try:
        return make(*args, **kwargs)
    except Exception as error:
        raise StoreError(f"{where} cannot be built: {error}") from error


def _check_keys(entry: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(entry, Mapping):
        expected = f"an object with {', '.join(keys)}" if keys else "an empty object"
        raise StoreError(f"{where} is {type(entry).__name__}, expected {expected}")
    wrong = [f"{k!r} is missing" for k in keys if k not in entry]
    wrong += [f"{k!r} is unknown" for k in entry if k not in keys]
    if wrong:
        raise StoreError(f"{where} was modified: {wrong[0]}")


def _with_tuples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}


def _label(path: str, kind: str) -> str:
    return f"layer {path!r} ({kind})" if path else f"the network ({kind})"
