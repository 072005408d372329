"""Gradients that work both in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from credibly.core.inputs import Inputs, tensors_of
from credibly.errors import InputError

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


def grad_for(x: Inputs) -> torch.set_grad_enabled:
    """Return a context in which gradients are recorded if they already are and x requires them."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and requires_grad(x))


def requires_grad(x: Inputs) -> bool:
    """Return whether a tensor of x requires a gradient."""
    return any(tensor.requires_grad for _, tensor in tensors_of(x))


def attached(x: Any, ready: Inputs) -> Inputs:
    """Return inputs `ready`, which were converted from x, as differentiable functions of the tensors of x.

    Raise if none of them requires a gradient.
    """
    found: Inputs
    if isinstance(ready, Tensor):
        found = x.to(ready) if isinstance(x, Tensor) else ready
    elif isinstance(ready, dict):
        found = {name: x[name].to(own) if isinstance(x[name], Tensor) else own for name, own in ready.items()}
    else:
        found = tuple(given.to(own) if isinstance(given, Tensor) else own for given, own in zip(x, ready))
    if not requires_grad(found):
        raise InputError("x", "requires no gradient, and grad=True asks for one", "Call x.requires_grad_() first")
    return found


def transformed() -> bool:
    """Return whether this runs under a torch.func transform or forward-mode AD, which need differentiable torch ops."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
