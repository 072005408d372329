"""Gradients that work both in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

Aux = TypeVar("Aux")


def grad_and_aux(function: Callable[[Tensor], tuple[Tensor, Aux]], point: Tensor) -> tuple[Tensor, Aux]:
    """Return the gradient at `point` of a function's first output, and its second output unchanged.

    Uses torch.func inside `torch.compile` and autograd in eager code, where it has less overhead.
    """
    if torch.compiler.is_compiling():
        gradient, aux = torch.func.grad(function, has_aux=True)(point)
        return gradient, aux
    with torch.enable_grad(), eager_gradient():
        leaf = point.detach().requires_grad_()
        value, aux = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, aux


class _EagerGradient:
    active = False


@contextmanager
def eager_gradient() -> Iterator[None]:
    """Mark eager code whose outputs are differentiated once, by a backward pass."""
    before = _EagerGradient.active
    _EagerGradient.active = True
    try:
        yield
    finally:
        _EagerGradient.active = before


def first_order() -> bool:
    """Return whether this runs in eager code directly under `grad_and_aux`, so only a first derivative is taken."""
    return _EagerGradient.active and not transformed()


def transformed() -> bool:
    """Return whether this runs under a torch.func transform or forward-mode AD, which need differentiable torch ops."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
