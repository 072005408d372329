"""Networks whose forward pass differentiates by `torch.autograd.grad`, as physics-informed networks do.

Such a forward pass needs autograd to record it, also where the caller needs no gradient, as in predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def record_own_gradients(module: nn.Module) -> None:
    """Let autograd record every forward pass of a network, in place; outputs are detached where it was off."""
    if _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def needs_own_gradients(error: Exception) -> bool:
    """Return whether a forward pass without gradients failed because it differentiates."""
    return "does not require grad" in str(error)


def _enter(module: Any, _args: Any) -> None:
    vars(module).setdefault("_outer_grad", []).append(torch.is_grad_enabled())
    torch.set_grad_enabled(True)


def _leave(module: Any, _args: Any, out: Any) -> Any:
    outer = module._outer_grad.pop()
    torch.set_grad_enabled(outer)
    return out if outer else _detached(out)


def _detached(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.detach()
    if type(out) in (tuple, list):
        return type(out)(_detached(part) for part in out)
    return {name: _detached(part) for name, part in out.items()} if type(out) is dict else out
