"""One way to differentiate, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

Aux = TypeVar("Aux")


def grad_and_aux(function: Callable[[Tensor], tuple[Tensor, Aux]], point: Tensor) -> tuple[Tensor, Aux]:
    """The gradient at `point` of the first value of a function, and its second value, which is only carried along.

    Inside `torch.compile` the derivative is taken by torch.func, in eager code by autograd, which has less overhead.
    """
    if torch.compiler.is_compiling():
        gradient, aux = torch.func.grad(function, has_aux=True)(point)
        return gradient, aux
    with torch.enable_grad(), _noted():
        leaf = point.detach().requires_grad_()
        value, aux = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, aux


class _Noted:
    now = False


@contextmanager
def _noted() -> Iterator[None]:
    before = _Noted.now
    _Noted.now = True
    try:
        yield
    finally:
        _Noted.now = before


def first_order() -> bool:
    """Whether this runs in eager code inside `grad_and_aux` alone, where nobody asks for more than one derivative."""
    return _Noted.now and not transformed()


def transformed() -> bool:
    """Whether this runs inside a transformation of torch.func or in forward mode, which take functions of their own only."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
