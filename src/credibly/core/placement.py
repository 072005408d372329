"""Devices and dtypes that a user asks for, checked before anything is moved there; and the dtype of exact integers."""

from __future__ import annotations

from typing import Any

import torch

from credibly.errors import InputError

# Dtypes that networks and densities can have.
FLOATING = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ALIASES = {"double": "float64", "float": "float32", "half": "float16"}


def to_dtype(name: str, value: object) -> torch.dtype:
    """Return a floating dtype, given as one or by its name. Raise on others."""
    text = str(value).removeprefix("torch.")
    found = FLOATING.get(_ALIASES.get(text, text)) if isinstance(value, (str, torch.dtype)) else None
    if found is None:
        known = ", ".join(f"torch.{each}" for each in FLOATING)
        raise InputError(name, f"must be one of {known}, got {value!r}", "Or pass its name, such as 'float64'")
    return found


def to_device(name: str, value: torch.device | str | int) -> torch.device:
    """Return a device on which tensors can be allocated. Raise if this machine or this installation of torch does not
    have it."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    # torch raises an AssertionError if it was built without CUDA.
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise InputError(
            name,
            f"must be a device of this machine ({', '.join(_devices())}), got {value!r}",
            "Leave it out to stay where the network is, or install torch with support for the device",
        ) from error
    return device


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of labels and counts: at least float32, because narrower ones round integers above 256."""
    return torch.promote_types(dtype, torch.float32)


def placement(device: torch.device | str | int | None, dtype: torch.dtype | str | None) -> dict[str, Any]:
    """Return the arguments of `Module.to` that are not None."""
    where = {} if device is None else {"device": to_device("device", device)}
    return where | ({} if dtype is None else {"dtype": to_dtype("dtype", dtype)})


def _devices() -> list[str]:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]
