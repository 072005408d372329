"""Shared code of the models: arrays of torch or JAX, log densities up to a constant, transforms with their Jacobian.

Positive parameters are exp(u) and add u to the log density, fractions are 1 / (1 + exp(-u)) and add
log p + log(1 - p), and an ordered pair is a, a + exp(u) and adds u. All functions work on the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# A tensor or a JAX array, and the namespace of its functions: see `torch_arrays.py` and `jax_side/posteriors.py`.
Array: TypeAlias = Any
Arrays: TypeAlias = Any
Data: TypeAlias = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Model:
    """A posterior on the unconstrained scale.

    Attributes:
        dim: D.
        log_prob: log density up to a constant, from (..., D) to (...), with the Jacobian of the transforms.
        constrain: the parameters of the reference draws, from (..., D) to (..., P).
        names: of those parameters.
    """

    dim: int
    log_prob: Callable[[Array], Array]
    constrain: Callable[[Array], Array]
    names: tuple[str, ...]


Builder: TypeAlias = Callable[[Arrays, Data], Model]


def indexed(name: str, count: int) -> tuple[str, ...]:
    """Return the names of the elements of a vector, numbered from 1 as in Stan."""
    return tuple(f"{name}[{i}]" for i in range(1, count + 1))


def design(columns: Sequence[npt.ArrayLike]) -> npt.NDArray[Any]:
    """Return the matrix of these columns, a number standing for a constant column."""
    return np.stack(np.broadcast_arrays(*(np.asarray(c, float) for c in columns)), -1)


def normal(xp: Arrays, value: Array, mean: Any, scale: Any) -> Array:
    """Return log N(value; mean, scale^2) per element. The scale is a number or an array, and its logarithm counts."""
    log_scale = np.log(scale) if isinstance(scale, (int, float)) else xp.log(scale)
    return -0.5 * xp.square((value - mean) / scale) - log_scale


def cauchy(xp: Arrays, value: Array, scale: float) -> Array:
    """Return the log density of a Cauchy centred on 0; of a half-Cauchy, too, up to a constant."""
    return -xp.log1p(xp.square(value / scale))


def student(xp: Arrays, value: Array, freedom: float, mean: float, scale: float) -> Array:
    """Return the log density of Student's t."""
    return -0.5 * (freedom + 1) * xp.log1p(xp.square((value - mean) / scale) / freedom)


def log_fraction(xp: Arrays, u: Array) -> Array:
    """Return log p + log(1 - p) of p = 1 / (1 + exp(-u)): the log Jacobian of the transform."""
    return xp.log_sigmoid(u) + xp.log_sigmoid(-u)


def fraction(xp: Arrays, u: Array) -> Array:
    """Return 1 / (1 + exp(-u))."""
    return xp.exp(xp.log_sigmoid(u))


def join(xp: Arrays, *parts: Array) -> Array:
    """Return the parts side by side; a part without a last axis of its own must have one of length 1."""
    return xp.concatenate(parts, axis=-1)
