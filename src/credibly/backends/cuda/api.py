"""The parameter of the CUDA kernel: the struct as `api.cu` declares it, field by field."""

from __future__ import annotations

import ctypes
import functools

POINTERS = ("x", "y", "loc", "precision", "scale", "offset")
SIZES = ("rows", "padded", "dim")
STATE = (
    "theta",
    "momentum",
    "gradient",
    "log_likelihood",
    "step_size",
    "inverse_mass",
    "steps",
    "partial",
    "partial_value",
    "arrivals",
)


@functools.cache
def arguments_struct(drifts: int) -> type[ctypes.Structure]:
    """Return the type `Arguments` for an integrator with the given number of drifts per step."""
    fields = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("weight", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in STATE),
        ("kick", ctypes.c_double * (drifts + 1)),
        ("drift", ctypes.c_double * drifts),
    ]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})
