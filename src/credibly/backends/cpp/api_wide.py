"""Structs and functions of wide networks, in float32, as `api.h` declares them."""

from __future__ import annotations

import ctypes
from typing import Any

from credibly.backends.cpp.api import Address, Data, Int, Network, Real, UInt, exported


class Table(ctypes.Structure):
    """Data in rows."""

    _fields_ = [("x", Address), ("y", Address), ("columns", Int)]


class ChunkedPrior(ctypes.Structure):
    """A normal prior, by coordinate and by chunk."""

    _fields_ = [("loc", Address), ("precision", Address), ("chunk_loc", Address), ("chunk_precision", Address)]


class WideDensity(ctypes.Structure):
    """The log density of a wide network on minibatches."""

    _fields_ = [("network", Network), ("data", Data), ("table", Table), ("prior", ChunkedPrior)]


class Keys(ctypes.Structure):
    """Keys of a stream of normal numbers."""

    _fields_ = [("first", UInt), ("second", UInt)]


class WideSteps(ctypes.Structure):
    """Arguments of `wide_steps`: SGHMC or SGLD with noise generated from keys."""

    _fields_ = [
        ("chains", Int),
        ("threads", Int),
        ("count", Int),
        ("single_thread", Int),
        ("theta", Address),
        ("momentum", Address),
        ("gradient", Address),
        ("root", Address),
        ("log_likelihood", Address),
        ("rows", Address),
        ("batch", Int),
        ("scale", Real),
        ("keys", Address),
        ("schedule", Address),
    ]


class Normals(ctypes.Structure):
    """Arguments of `fill_normal`: normal numbers of one stream."""

    _fields_ = [("keys", Keys), ("count", Int), ("threads", Int), ("out", Address)]


class GaussianDraw(ctypes.Structure):
    """Arguments of `gaussian_draw`: a draw of independent Gaussians with noise generated from keys."""

    _fields_ = [
        ("keys", Keys),
        ("count", Int),
        ("threads", Int),
        ("mean", Address),
        ("curvature", Address),
        ("deltas", Address),
        ("delta", Real),
        ("n", Real),
        ("out", Address),
    ]


class GaussianUpdate(ctypes.Structure):
    """Arguments of `gaussian_update`: one update of IVON for one parameter."""

    _fields_ = [
        ("count", Int),
        ("threads", Int),
        ("mean", Address),
        ("curvature", Address),
        ("momentum", Address),
        ("gradient", Address),
        ("drawn", Address),
        *((name, Real) for name in ("n", "delta", "loc", "beta1", "rate", "lr", "correction")),
    ]


ARGUMENTS: dict[str, tuple[type[ctypes.Structure], ...]] = {
    "wide_steps": (WideDensity, WideSteps),
    "fill_normal": (Normals,),
    "gaussian_draw": (GaussianDraw,),
    "gaussian_update": (GaussianUpdate,),
}


def function(name: str) -> Any:
    """Return a function by its name in `ARGUMENTS`."""
    return exported(name, ARGUMENTS[name])
