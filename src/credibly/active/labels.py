"""Labels on their way into a problem: checked, put into its layout, and added to its rows."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, map_inputs, tensors_of, to_tensor
from credibly.errors import InputError
from credibly.problem import Problem


def with_rows(problem: Problem, x: Inputs, y: Tensor) -> Problem:
    """The same problem with more rows."""
    more = [value for _, value in tensors_of(x)]
    joined = iter([torch.cat([old, new]) for (_, old), new in zip(tensors_of(problem.x), more, strict=True)])
    whole = copy.copy(problem)
    whole.x = map_inputs(lambda _: next(joined), problem.x)
    whole.y = torch.cat([problem.y, y])
    whole.n = len(whole.y)
    return whole


def as_given(problem: Problem, y: Tensor) -> Tensor:
    """Prepared targets in the layout that the caller's y has."""
    return y if problem.likelihood.support == "class" else problem.likelihood.restore(y)


def prepared(problem: Problem, count: int, labels: Any) -> Tensor:
    """Labels of so many rows as the problem keeps them; a wrong shape or value is refused."""
    with named("labels"):
        given = to_tensor(labels, "labels", problem.device, problem.layout.dtype, convert=True)
        expected = (count, *as_given(problem, problem.y).shape[1:])
        if tuple(given.shape) != expected:
            raise InputError("labels", f"has shape {tuple(given.shape)}", f"Pass {expected}, one for each row")
        return problem.likelihood.prepare(given, problem.layout.dtype)


def fingerprint(tensors: list[tuple[str, Tensor]]) -> str:
    """A short hash of tensors, by name, shape, dtype and values."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


@contextmanager
def named(argument: str) -> Iterator[None]:
    """Errors about x or y, told about the argument that they came with."""
    try:
        yield
    except InputError as error:
        name = argument if error.argument in ("x", "y") else error.argument.replace("x[", f"{argument}[")
        raise InputError(name, error.found, error.advice) from error
