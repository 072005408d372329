"""Check the Jacobian of a network by automatic differentiation against finite differences at two rows.

A forward pass that detaches what depends on the weights, rounds it, or calls `torch.autograd.grad` without
`create_graph=True`, has outputs that vary with the weights where autograd sees no dependence. Its Gauss-Newton matrix
would miss those terms without any error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from credibly.core.inputs import Inputs, arguments, map_inputs, output_tensor
from credibly.core.rng import stream
from credibly.curvature.gauss_newton import row_gradients
from credibly.curvature.parts import Parts, RowPass
from credibly.errors import InputError
from credibly.networks.calling import call_with
from credibly.networks.copying import copy_module
from credibly.problem import Problem

# Directions in which the derivative is compared, and the sizes of the steps relative to the weights.
DIRECTIONS = 3
STEPS = (1e-4, 1e-3)
# Difference, relative to the typical size of a derivative, that kinks (ReLU, max-pooling) may cause. Missing terms are
# of the order of 1.
TOLERANCE = 0.2
# Relative rounding error of an output: also networks in float64 may have single operations in float32.
ROUNDING = 1e-6


def check_jacobian(problem: Problem, theta: Tensor, parts: Parts) -> None:
    """Raise if the derivative of two rows' outputs near theta (D,) differs from finite differences.

    It costs one backward pass and six forward passes of two rows. A difference must persist at a second step size,
    since one step may cross a discontinuity.
    """
    layout, generator = problem.layout, stream(0, "jacobian check")
    x = map_inputs(lambda t: t[:2], problem.sample.x)
    width = _widths(problem, theta)
    # Not at theta itself: a layer that starts at zero would hide all layers before it.
    point = theta.detach() + 0.1 * width * _normal(width, generator)
    captured = RowPass(layout, problem.likelihood, problem.forward, point, parts)(x)
    vector = _normal(captured.output, generator)
    of_layers, rest = captured.pull_back(vector)
    gradient = row_gradients(captured.inputs, of_layers, rest).sum(0).double()
    usual = float((gradient * width[parts.indices].double()).norm())
    size = float((vector.double() * captured.output.double()).abs().sum())
    if not math.isfinite(usual + size):
        return  # the fit itself reports values that are not finite
    project, rounding = _in_double(problem, point, x, vector)
    for _ in range(DIRECTIONS):
        direction = torch.zeros_like(point, dtype=torch.float64)
        direction[parts.indices] = (width * _normal(width, generator))[parts.indices].double()
        exact = float(gradient @ direction[parts.indices])
        for step in STEPS:
            change = project(point + direction * step) - project(point - direction * step)
            found = change / (2 * step)
            if abs(found - exact) <= TOLERANCE * max(abs(found), usual) + rounding * size / step:
                break
        else:
            raise InputError(
                "net",
                f"automatic differentiation gives a derivative of {exact:.3g} in the weights where finite differences "
                f"give {found:.3g}",
                "Its forward hides a dependence on the weights from autograd: torch.autograd.grad without "
                "create_graph=True, detach(), no_grad or rounding. Differentiate by torch.func.grad there, or select "
                "parameters without such a dependence by random=",
            )


class _Widened(TorchDispatchMode):
    """Make every cast and new tensor of a floating dtype one of float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class _Seen(TorchDispatchMode):
    """Record the coarsest rounding of the floating dtypes of all results."""

    coarsest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, Tensor) and part.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(part.dtype).eps)
        return result


def _in_double(problem: Problem, point: Tensor, x: Inputs, vector: Tensor) -> tuple[Callable[[Tensor], float], float]:
    """Return the function <f(w), vector> of w (D,), and its relative rounding error.

    It is evaluated by a network in float64 unless that only runs in its own dtypes. `point` is one w to try it at.
    """
    layout, likelihood = problem.layout, problem.likelihood

    def evaluate(module: nn.Module, theta: Tensor, inputs: Inputs, within: Any) -> float:
        args, kwargs = arguments(inputs)
        with torch.no_grad():
            with within:
                output = output_tensor(call_with(module, layout.split(theta)[0], args, kwargs))
            return float((likelihood.arrange(output).double() * vector.double()).sum())

    wide = copy_module(layout.module).double()
    inputs = map_inputs(lambda t: t.double() if t.is_floating_point() else t, x)
    # A forward that casts to float32, as after an autocast of its own, has to be widened as well.
    for context in (_Widened,) if layout.mixed else (nullcontext, _Widened):
        try:
            evaluate(wide, point.double(), inputs, context())
        except Exception:  # such as a tensor of fixed dtype made in its forward
            continue
        return lambda theta: evaluate(wide, theta.double(), inputs, context()), ROUNDING  # noqa: B023
    seen = _Seen()  # type: ignore[no-untyped-call]
    evaluate(layout.module, point, x, seen)
    return lambda theta: evaluate(layout.module, theta.to(layout.dtype), x, nullcontext()), max(ROUNDING, seen.coarsest)


def _widths(problem: Problem, theta: Tensor) -> Tensor:
    """Return a natural size of changes of every weight, (D,): the root mean square of its tensor, or 0.1 if zero."""
    width = torch.full_like(theta, 0.1)
    for entry in problem.layout.entries:
        size = float(theta[entry.start : entry.stop].detach().square().mean().sqrt()) if entry.stop > entry.start else 0
        if size > 0:
            width[entry.start : entry.stop] = size
    return width


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
