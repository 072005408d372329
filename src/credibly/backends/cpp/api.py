"""The C++ library's interface: structs as `api.h` declares them, field by field, and the exported functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credibly.backends.cpp.library import library

Int, UInt, Real, Address = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p
# Pointers to ctypes arrays, which the struct keeps alive. Tensors are passed as `Address`: the caller keeps them alive.
Ints, Reals, Addresses = (ctypes.POINTER(kind) for kind in (Int, Real, Address))
SUFFIX = {torch.float32: "f32", torch.float64: "f64"}

# Kicks and drifts of an integrator, as fractions of a step.
Scheme = tuple[Sequence[float], Sequence[float]]


class Network(ctypes.Structure):
    """A stack of linear layers."""

    _fields_ = [
        ("layers", Int),
        ("inputs", Ints),
        ("outputs", Ints),
        ("weight", Ints),
        ("bias", Ints),
        ("activation", Ints),
        ("dim", Int),
    ]


class Data(ctypes.Structure):
    """Data in columns, and the likelihood."""

    _fields_ = [
        ("rows", Int),
        ("padded", Int),
        ("x", Address),
        ("y", Address),
        ("kind", Int),
        ("targets", Int),
        ("scale", Reals),
        ("log_scale", Int),
        ("per_target", Int),
        ("weight", Real),
        ("row_weight", Address),
    ]


class Prior(ctypes.Structure):
    """A normal prior."""

    _fields_ = [("loc", Address), ("precision", Address)]


class OutputPrior(ctypes.Structure):
    """The normal prior of output weights that are integrated out."""

    _fields_ = [("loc", Address), ("precision", Address)]


class Density(ctypes.Structure):
    """The log density of a network on all rows."""

    _fields_ = [("network", Network), ("data", Data), ("prior", Prior), ("output", OutputPrior)]


class Evaluations(ctypes.Structure):
    """Arguments of `evaluations`: log likelihoods and gradients of the log density."""

    _fields_ = [
        ("chains", Int),
        ("threads", Int),
        ("theta", Address),
        ("gradient", Address),
        ("log_likelihood", Address),
    ]


class Decodings(ctypes.Structure):
    """Arguments of `decodings`: output weights from standardised ones."""

    _fields_ = [("chains", Int), ("threads", Int), ("standardised", Address), ("theta", Address)]


class InverseMass(ctypes.Structure):
    """The inverse mass of a momentum: diagonal, or with the factors of `gaussians.mass.CorrelatedMass`."""

    _fields_ = [
        ("diagonal", Address),
        ("scale", Address),
        ("factors", Int),
        ("start", Ints),
        ("rows", Ints),
        ("rank", Ints),
        ("vectors", Address),
        ("gain", Address),
    ]


# The first fields of trajectories and trees.
STATE: list[tuple[str, Any]] = [
    ("chains", Int),
    ("threads", Int),
    ("theta", Address),
    ("momentum", Address),
    ("gradient", Address),
    ("log_likelihood", Address),
    ("step_size", Address),
    ("inverse_mass", InverseMass),
]


class Trajectories(ctypes.Structure):
    """Arguments of `trajectories`: steps of a symplectic integrator."""

    _fields_ = [*STATE, ("steps", Ints), ("drifts", Int), ("kick", Reals), ("drift", Reals)]


class Trees(ctypes.Structure):
    """Arguments of `trees`: transitions of the No-U-Turn sampler."""

    _fields_ = [
        *STATE,
        ("loc", Address),
        ("precision", Address),
        ("uniform", Address),
        ("uniform_pitch", Int),
        ("depth", Int),
        ("divergent", Real),
        ("outcome", Address),
    ]


class Paths(ctypes.Structure):
    """Arguments of `paths`: microcanonical Langevin dynamics."""

    _fields_ = [
        ("chains", Int),
        ("threads", Int),
        ("theta", Address),
        ("direction", Address),
        ("gradient", Address),
        ("log_likelihood", Address),
        ("step_size", Real),
        ("scale", Address),
        ("loc", Address),
        ("precision", Address),
        ("steps", Int),
        ("drifts", Int),
        ("kick", Reals),
        ("drift", Reals),
        ("noise", Address),
        ("noise_pitch", Int),
        ("strength", Real),
        ("outcome", Address),
    ]


class MinibatchSteps(ctypes.Structure):
    """Arguments of `minibatch_steps`: SGHMC or SGLD."""

    _fields_ = [
        ("chains", Int),
        ("threads", Int),
        ("count", Int),
        ("theta", Address),
        ("momentum", Address),
        ("gradient", Address),
        ("root", Address),
        ("log_likelihood", Address),
        ("rows", Address),
        ("batch", Int),
        ("scale", Real),
        ("noise", Address),
        ("noise_pitch", Int),
        ("schedule", Address),
    ]


class TrainingSteps(ctypes.Structure):
    """Arguments of `training_steps`: Adam or gradient descent with momentum."""

    _fields_ = [
        ("members", Int),
        ("threads", Int),
        ("count", Int),
        ("active", Address),
        ("theta", Address),
        ("first_moment", Address),
        ("second_moment", Address),
        ("loss_parts", Address),
        ("first_bad", Address),
        ("rows", Address),
        ("batch", Int),
        ("step_pitch", Int),
        ("member_pitch", Int),
        ("schedule", Address),
        ("schedule_pitch", Int),
        ("adam", Int),
        ("beta1", Real),
        ("beta2", Real),
        ("eps", Real),
        ("clip_norm", Real),
        ("weight", Real),
        ("constant", Real),
        ("uniform", Addresses),
        ("rates", Address),
        ("precision", Address),
        ("fixed_from", Int),
    ]


class Outputs(ctypes.Structure):
    """Arguments of `outputs`: one network output per parameter vector and row."""

    _fields_ = [
        ("network", Network),
        ("rows", Int),
        ("padded", Int),
        ("x", Address),
        ("chains", Int),
        ("threads", Int),
        ("theta", Address),
        ("out", Address),
    ]


class Passes(ctypes.Structure):
    """Arguments of `passes`: network outputs under dropout masks."""

    _fields_ = [
        ("network", Network),
        ("rows", Int),
        ("padded", Int),
        ("x", Address),
        ("passes", Int),
        ("threads", Int),
        ("theta", Address),
        ("masks", Addresses),
        ("mask_pitch", Int),
        ("out", Address),
    ]


class Moments(ctypes.Structure):
    """Arguments of `moments`: mean and variance over draws."""

    _fields_ = [
        ("values", Address),
        ("draws", Int),
        ("columns", Int),
        ("threads", Int),
        ("mean", Address),
        ("variance", Address),
    ]


ARGUMENTS: dict[str, tuple[type[ctypes.Structure], ...]] = {
    "evaluations": (Density, Evaluations),
    "decodings": (Density, Decodings),
    "trajectories": (Density, Trajectories),
    "trees": (Density, Trees),
    "paths": (Density, Paths),
    "minibatch_steps": (Density, MinibatchSteps),
    "training_steps": (Density, TrainingSteps),
    "outputs": (Outputs,),
    "passes": (Passes,),
    "moments": (Moments,),
}


def function(name: str, dtype: torch.dtype) -> Any:
    """Return a function for networks of the given dtype, by its name in `ARGUMENTS`."""
    return exported(f"{name}_{SUFFIX[dtype]}", ARGUMENTS[name])


def exported(name: str, arguments: tuple[type[ctypes.Structure], ...]) -> Any:
    """Return an exported function. It takes these structs and raises MemoryError if it fails."""
    found = getattr(library(), name)
    found.argtypes = [ctypes.POINTER(struct) for struct in arguments]
    found.restype, found.errcheck = Int, _check
    return found


def _check(failed: int, *_: Any) -> None:
    if failed:
        raise MemoryError("cannot allocate the working memory of the C++ backend")


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a contiguous tensor."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()
