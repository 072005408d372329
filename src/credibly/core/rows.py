"""Rows of data and their weights: v_i >= 0 multiplies the log likelihood of row i; an integer equals repeated rows."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, check_finite, map_inputs, tensors_of, to_tensor
from credibly.errors import InputError


class Rows(NamedTuple):
    """Rows of the data, with their weights if they have any."""

    x: Inputs
    y: Tensor
    weight: Tensor | None = None

    def at(self, rows: Tensor | slice) -> Rows:
        """Return some of the rows, by indices of any shape or a slice."""
        weight = None if self.weight is None else self.weight[rows]
        return Rows(map_inputs(lambda t: t[rows], self.x), self.y[rows], weight)


def weigh(rows: Rows, given: Any, device: torch.device, dtype: torch.dtype) -> Rows:
    """Return the rows with the caller's weights; rows of weight 0 are left out, and weights of 1 become None."""
    if given is None:
        return rows
    weights = to_weights(given, len(rows.y), device, dtype)
    kept = weights.nonzero().squeeze(1)
    if len(kept) < len(rows.y):
        rows, weights = rows.at(kept), weights[kept]
    return rows._replace(weight=None if bool((weights == 1).all()) else weights)


def leave_out(rows: Rows, counted: Tensor | None) -> Rows:
    """Return the rows of which any element counts, given booleans (N, ...); None for all of them."""
    if counted is None:
        return rows
    kept = counted.flatten(1).any(1) if counted.ndim > 1 else counted
    if not bool(kept.any()):
        raise InputError("y", "has no label that counts: all of them are ignore_index", "Pass at least one label")
    return rows if bool(kept.all()) else rows.at(kept.nonzero().squeeze(1))


def to_weights(value: Any, rows: int, device: torch.device, dtype: torch.dtype, name: str = "sample_weight") -> Tensor:
    """Return weights as a tensor (rows,). Raise on values that are no weights."""
    weights = to_tensor(value, name, device, dtype, convert=True).to(dtype)
    if weights.shape != (rows,):
        raise InputError(name, f"must have shape ({rows},), one weight per row, got {tuple(weights.shape)}")
    check_finite(name, weights)
    if bool((weights < 0).any()):
        raise InputError(name, f"must be non-negative, got {float(weights.min()):g}")
    if not bool((weights > 0).any()):
        raise InputError(name, "must be positive for at least one row, got zeros only")
    return weights


def sum_rows(values: Tensor, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Sum (C, N, ...) over everything but the first axis, rows multiplied by their weights, (N,) or (C, N)."""
    if weight is None:
        return values.flatten(1).sum(1, dtype=dtype)
    each = values if values.ndim == 2 else values.flatten(2).sum(2)
    return (each * weight).sum(1, dtype=dtype)


def join_weights(parts: list[tuple[int, Tensor | None]], like: Tensor) -> Tensor | None:
    """Concatenate weights of several sets of rows, each with its number of rows; None stands for ones."""
    if all(weight is None for _, weight in parts):
        return None
    return torch.cat([like.new_ones(rows) if weight is None else weight for rows, weight in parts])


def hash_rows(rows: Rows) -> str:
    """Return a short hash of rows and their weights, including their order."""
    digest = hashlib.sha256()
    weights = [] if rows.weight is None else [("sample_weight", rows.weight)]
    for name, tensor in [*tensors_of(rows.x), ("y", rows.y), *weights]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # Flatten first: an axis of size 1 may have any stride even in a contiguous tensor.
        digest.update(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
