"""Trial passes before a fit: the computation that the fit will run, on two rows, with gradients.

A fit evaluates several parameter vectors, each on its own rows or all on the same ones, and differentiates the result.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from credibly.core.inputs import Inputs, map_inputs
from credibly.errors import InputError
from credibly.networks.layout import Layout

Parameters = dict[str, Tensor]
MEMORY = "micro_batch= bounds the memory of a full-batch pass instead"


def try_batched(
    run: Callable[[Parameters, Inputs, bool], Tensor], varied: Parameters, trial: Inputs, *, own_rows: bool = True
) -> None:
    """Run a batched pass of two parameter vectors with gradients, on shared rows and on separate rows.

    Masks of dropout always share their rows: `own_rows` is False. The caller interprets errors.
    """
    count = len(next(iter(varied.values())))
    for shared in (True, False) if own_rows else (True,):
        x = trial if shared else map_inputs(lambda t: torch.stack([t] * count), trial)
        _differentiate(lambda leaves, x=x, shared=shared: run(leaves, x, shared), varied)  # type: ignore[misc]


class Evaluated(Protocol):
    """The part of `Forward` that the trial needs: the network's layout, and outputs for named parameters."""

    layout: Layout
    stack: Any

    def apply(self, parameters: Parameters, x: Inputs) -> Tensor:
        """Return outputs (C, N, ...)."""


def refuse_without_gradient(forward: Evaluated, trial: Inputs) -> None:
    """Raise if the outputs at a few rows cannot be differentiated in the random parameters of the network."""
    if forward.stack is not None:
        # Plain layers and activations are always differentiable.
        return
    layout = forward.layout
    values = dict(layout.module.named_parameters())
    own = {e.name: values[e.name].detach().unsqueeze(0) for e in layout.entries if e.name not in layout.extra}
    with _checkpoint_calls() as calls:
        try:
            found = _differentiate(lambda leaves: forward.apply(leaves, trial), own)
        except InputError:
            raise
        except Exception as error:
            if calls:
                raise _checkpointed() from error
            raise _not_differentiable(error, layout.module) from error
    if calls:
        raise _checkpointed()
    if not found:
        raise InputError(
            "net",
            "its output has no gradient in the random parameters",
            "Its forward detaches or rounds what depends on them, runs under no_grad, or calls torch.autograd.grad "
            "without create_graph=True. Differentiate by torch.func.grad there, or choose other parameters by random=",
        )


def _differentiate(run: Callable[[Parameters], Tensor], parameters: Parameters) -> bool:
    """Return whether the output depends on one of the parameters, after a backward pass."""
    leaves = {n: v.detach().requires_grad_(v.is_floating_point()) for n, v in parameters.items()}
    with torch.enable_grad():
        output = run(leaves)
        if not output.requires_grad:
            return False
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients = torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    return any(gradient is not None for gradient in gradients)


def _checkpointed() -> InputError:
    return InputError(
        "net",
        "its forward calls torch.utils.checkpoint, whose recomputation would not see the weights of a draw",
        f"Call the layers directly; {MEMORY}",
    )


def _not_differentiable(error: Exception, module: nn.Module) -> InputError:
    reason = str(error).partition(" Hint:")[0].partition("\n")[0][:200].rstrip(".")
    if "quantized" in type(error).__module__ or any("quantized" in type(m).__module__ for m in module.modules()):
        quantised = next(n for n, m in module.named_modules() if "quantized" in type(m).__module__)
        return InputError(
            "net",
            f"the quantised layer {quantised!r} has no gradient, and random parameters come before it",
            "Pass the network before quantisation, or make only layers after it random by random=",
        )
    if "inplace" in reason or "in-place" in reason:
        return InputError(
            "net",
            f"its forward edits a tensor in place that its gradient needs ({reason})",
            "Write the result to a new tensor, e.g. h = h + ... instead of h += ...",
        )
    return InputError(
        "net",
        f"its output cannot be differentiated in the random parameters ({type(error).__name__}: {reason})",
        "Run net(x).sum().backward() to see where, or choose other parameters by random=",
    )


@contextmanager
def _checkpoint_calls() -> Iterator[list[str]]:
    """Record the calls of `torch.utils.checkpoint.checkpoint` within the context; none while a profiler runs."""
    wanted = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    calls: list[str] = []
    if sys.getprofile() is not None:
        yield calls
        return

    def watch(frame: FrameType, event: str, _value: Any) -> None:
        if event == "call" and frame.f_code is wanted:
            calls.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)
