"""Adding labels to a problem: validate them, convert them to its layout and append the rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from credibly.core.inputs import to_tensor
from credibly.errors import InputError
from credibly.problem import Problem


def restore_labels(problem: Problem, y: Tensor) -> Tensor:
    """Return prepared targets in the layout of the user's y."""
    return y if problem.likelihood.support == "class" else problem.likelihood.restore(y)


def prepare_labels(problem: Problem, count: int, labels: Any) -> Tensor:
    """Return the labels of `count` rows in the problem's internal layout. Raises for a wrong shape or value."""
    with errors_about("labels"):
        given = to_tensor(labels, "labels", problem.device, problem.layout.dtype, convert=True)
        expected = (count, *restore_labels(problem, problem.y).shape[1:])
        if tuple(given.shape) != expected:
            raise InputError("labels", f"must have shape {expected}, one label per row, got {tuple(given.shape)}")
        return problem.likelihood.prepare(given, problem.layout.dtype)


def fingerprint(tensors: list[tuple[str, Tensor]]) -> str:
    """Return a short hash of tensors by name, shape, dtype and values."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


@contextmanager
def errors_about(argument: str) -> Iterator[None]:
    """Re-raise errors about x or y under the name of the argument that held them."""
    try:
        yield
    except InputError as error:
        name = argument if error.argument in ("x", "y") else error.argument.replace("x[", f"{argument}[")
        raise InputError(name, error.found, error.advice) from error
