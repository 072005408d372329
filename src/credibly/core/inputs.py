"""Network inputs (a tensor, or a tuple or dict of tensors, with rows on the first axis), and conversion of data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from credibly.errors import InputError

Tensors: TypeAlias = tuple[Tensor, ...]
Inputs: TypeAlias = Tensor | Tensors | dict[str, Tensor]


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to every tensor of x."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(value) for name, value in x.items()}
    parts = tuple(function(value) for value in x)
    # Named tuples keep their type, and with it their `row_key`.
    return type(x)(*parts) if hasattr(x, "_fields") else parts


def row_key(x: Inputs) -> Inputs:
    """Return the tensors that identify a row: all of x, unless its type has a `row_key` of its own.

    Inputs whose type depends on other rows of a block need one, so that a row has the same key in every block.
    """
    found: Inputs = getattr(x, "row_key", x)
    return found


def tensors_of(x: Inputs) -> list[tuple[str, Tensor]]:
    """Return the tensors of x, each with its name for error messages."""
    if isinstance(x, Tensor):
        return [("x", x)]
    if isinstance(x, dict):
        return [(f"x[{name!r}]", value) for name, value in x.items()]
    return [(f"x[{i}]", value) for i, value in enumerate(x)]


def in_order(x: Inputs, names: Sequence[str]) -> Inputs:
    """Return inputs by name in the given order, other inputs as they are. Raise if names are missing or unknown."""
    if not isinstance(x, dict) or list(x) == list(names):
        return x
    missing, unknown = ([k for k in a if k not in b] for a, b in ((names, x), (x, names)))
    if missing or unknown:
        found = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which the problem does not have"
        raise InputError("x", found, f"Pass {', '.join(repr(name) for name in names)}, as in the problem")
    return {name: x[name] for name in names}


def row_count(x: Inputs) -> int:
    """Return the number of rows, which is the same for all tensors of x."""
    return int(tensors_of(x)[0][1].shape[0])


def call(net: Callable[..., Any], x: Inputs, *, heads: bool = True) -> Tensor:
    """Return the output tensor of net(x), net(*x) or net(**x)."""
    out = net(x) if isinstance(x, Tensor) else net(**x) if isinstance(x, dict) else net(*x)
    return output_tensor(out, heads=heads)


def output_tensor(out: Any, *, heads: bool = True) -> Tensor:
    """Return a network's output tensor: the output, `logits` of a transformers output, or the first of a tuple.

    The tensors of a plain dict, the `heads` of a network, are flattened and concatenated if they are expected.
    """
    if heads and is_heads(out):
        return torch.cat([head.reshape(len(head), -1) for head in out.values()], -1)
    for candidate in (out, getattr(out, "logits", None), out[0] if isinstance(out, (tuple, list)) and out else None):
        if isinstance(candidate, Tensor):
            return candidate
    found, advice = f"its forward returned {type(out).__name__}", "Return one tensor, or a tuple that starts with it"
    if isinstance(out, Mapping):
        advice += "; for a dict of outputs use Heads"
        other = next((name for name, head in out.items() if not isinstance(head, Tensor)), None)
        if other is not None:
            found += f", in which {other!r} is a {type(out[other]).__name__}"
            advice += ", and return one tensor per name: {name: output, ...}"
    raise InputError("net", found, advice)


def is_heads(out: Any) -> bool:
    """Return whether this is a plain dict of tensors, the outputs of several heads."""
    return type(out) in (dict, OrderedDict) and bool(out) and all(isinstance(head, Tensor) for head in out.values())


def arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return x as the (args, kwargs) of a call."""
    return ((x,), {}) if isinstance(x, Tensor) else ((), x) if isinstance(x, dict) else (x, {})


def to_tensor(value: Any, name: str, device: torch.device, dtype: torch.dtype | None, *, convert: bool) -> Tensor:
    """Return one array as a tensor on the device, floating values in the network's dtype or, for None, their own.

    numpy and pandas arrays are converted silently: their float64 is rarely a choice. A torch tensor was made on
    purpose, so a different device or floating dtype is an error unless `convert` is set.
    """
    if value is None or isinstance(value, Mapping):
        found = "is None" if value is None else f"is a {type(value).__name__} inside another structure"
        advice = "Pass one array here; leave out arguments of the network that are optional and not used"
        raise InputError(name, found, advice)
    if isinstance(value, Tensor):
        if value.is_nested:
            advice = f"Pad the rows, {name}.to_padded_tensor(0), and pass their lengths or a mask as a second input"
            raise InputError(name, "is a nested tensor", advice)
        if value.layout != torch.strided:
            raise InputError(name, f"has the layout {value.layout}", f"Make it dense: {name}.to_dense()")
        if not convert and value.device != device:
            raise InputError(
                name,
                f"is on {value.device}, the network on {device}",
                f"Move one of them, or pass device={str(device)!r} to move everything",
            )
        if not convert and value.is_floating_point() and dtype is not None and value.dtype != dtype:
            raise InputError(
                name,
                f"is {value.dtype}, the network {dtype}",
                f"Convert one of them, or pass dtype={dtype} to convert everything",
            )
        tensor = value.detach()
    else:
        array = _array(_numeric(value, name), name)
        if array.dtype.kind not in "fiub":
            raise InputError(
                name, f"holds values of dtype {array.dtype}", "Encode text, dates and categories as numbers first"
            )
        # torch has neither long doubles nor non-native byte orders.
        native = (
            np.dtype(np.float64) if array.dtype.kind == "f" and array.itemsize > 8 else array.dtype.newbyteorder("=")
        )
        # A copy, so that later changes to the caller's array have no effect.
        tensor = torch.from_numpy(np.array(array, dtype=native, order="C"))
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def to_values(value: Any, name: str) -> Tensor:
    """Return a tensor unchanged, and any other array as a tensor of its own dtype. Raise if it is not of numbers."""
    return value if isinstance(value, Tensor) else to_tensor(value, name, torch.device("cpu"), None, convert=True)


def _numeric(value: Any, name: str) -> Any:
    """Return a table or column whose columns are all numeric or boolean as one array; other values unchanged."""
    if not hasattr(value, "to_numpy"):
        return value
    array = value.to_numpy()
    kinds = {getattr(dtype, "kind", "O") for dtype in np.atleast_1d(np.array(getattr(value, "dtypes", "O"), object))}
    if array.dtype.kind != "O" or not kinds <= set("fiub"):
        return array
    # Columns of several dtypes, or of dtypes of pandas that can mark values as missing.
    if bool(np.asarray(value.isna()).any()):
        raise InputError(name, "has missing values", "Drop or impute those rows")
    return value.to_numpy(dtype=np.float64 if len(kinds) > 1 else {"f": float, "b": bool}.get(kinds.pop(), np.int64))


def _array(value: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        parts = [v for v in value if isinstance(v, (Tensor, np.ndarray)) and v.ndim] if isinstance(value, list) else []
        if parts and len(parts) == len(value) and len({len(part) for part in parts}) == 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts[:3]) + (", ..." if len(parts) > 3 else "")
            found = f"is a list of arrays of different shapes: {shapes}"
            raise InputError(name, found, "Several inputs of the network are a tuple: x = (x1, x2)") from error
        raise InputError(
            name,
            f"is a {type(value).__name__} that is not one array: its rows have different lengths ({reason})",
            "Pad the rows to one length and pass the lengths or a mask as a second input: x = (padded, lengths)",
        ) from error


def to_inputs(x: Any, device: torch.device, dtype: torch.dtype | None, *, convert: bool = False) -> Inputs:
    """Return x as network inputs. Raise if it is empty, its lengths differ or a value is not finite."""
    result: Inputs
    if isinstance(x, Mapping) or (hasattr(x, "keys") and not hasattr(x, "to_numpy")):
        keys = list(x.keys())
        result = {str(k): to_tensor(x[k], f"x[{k!r}]", device, dtype, convert=convert) for k in keys}
    elif isinstance(x, tuple):
        result = tuple(to_tensor(v, f"x[{i}]", device, dtype, convert=convert) for i, v in enumerate(x))
    else:
        result = to_tensor(x, "x", device, dtype, convert=convert)
    parts = tensors_of(result) if isinstance(result, Tensor) or len(result) else []
    if not parts:
        raise InputError("x", "holds no tensor", "Pass a tensor, or a tuple or dict of tensors")
    for name, tensor in parts:
        if tensor.ndim == 0:
            raise InputError(name, "has no axis", "Pass rows along the first axis")
        if len(tensor) == 0:
            raise InputError(name, "has no rows", "Pass at least one row")
        if len(tensor) != len(parts[0][1]):
            found = f"has {len(tensor)} rows, {parts[0][0]} has {len(parts[0][1])}"
            advice = "All inputs need the same number of rows"
            if len(tensor) == 2 and tensor.dtype == torch.int64:
                advice += "; a graph and its edge_index are passed as credibly.data.Nodes((x, edge_index), rows, y)"
            raise InputError(name, found, advice)
        check_finite(name, tensor)
    return result


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise if a value is NaN or infinite, with the index of the first one."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # The extremes are NaN or infinite if any value is, and take no memory.
    if bool(torch.isfinite(torch.stack(tensor.aminmax())).all()):
        return
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        where = [int(i) for i in bad.nonzero()[0]]
        raise InputError(
            name,
            f"has {int(bad.sum())} values that are NaN or infinite, the first at {where}",
            "Drop or impute those rows",
        )


def network_device(net: nn.Module) -> torch.device:
    """Return the device of a network's parameters. Raise if there is more than one."""
    devices = {p.device for p in net.parameters()}
    if len(devices) != 1:
        found = f"its parameters are on {sorted(map(str, devices))}"
        raise InputError("net", found, "Put all of them on one device, e.g. with net.to(device)")
    return devices.pop()


def describe(x: Inputs) -> dict[str, Any]:
    """Return the structure, shapes and dtypes of one row, as JSON values."""
    parts: list[dict[str, Any]] = [
        {"name": n, "shape": list(t.shape[1:]), "dtype": str(t.dtype).removeprefix("torch.")} for n, t in tensors_of(x)
    ]
    for part, (_, tensor) in zip(parts, tensors_of(x)):
        # Integers that start above zero, such as lengths of sequences, may not be replaced by zeros.
        if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel():
            least = int(tensor.min())
            if least > 0:
                part["least"] = least
    if isinstance(x, dict):
        for part, key in zip(parts, x):
            part["name"] = key
    return {"form": "tensor" if isinstance(x, Tensor) else "dict" if isinstance(x, dict) else "tuple", "parts": parts}


def blank_row(description: Mapping[str, Any], device: torch.device) -> Inputs:
    """Return a row of zeros, or of the least integers, that fits a description by `describe`."""
    tensors = {
        p["name"]: torch.full((1, *p["shape"]), p.get("least", 0), dtype=getattr(torch, p["dtype"]), device=device)
        for p in description["parts"]
    }
    if description["form"] == "dict":
        return tensors
    values = tuple(tensors.values())
    return values[0] if description["form"] == "tensor" else values
