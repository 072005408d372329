"""One way to differentiate, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
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
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        value, aux = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, aux


def transformed() -> bool:
    """Whether this runs inside a transformation of torch.func or in forward mode, which take functions of their own only."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
