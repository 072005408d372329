"""Dropout layers that a forward pass calls several times, as in RoBERTa, T5 and many hand-written networks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from credibly.core.inputs import Inputs, call


class SharedDropout(nn.Module):
    """The replacement of a dropout layer that a forward pass calls several times: each call has a mask of its own.

    Its children "0", "1", ... hold the masks in the order of the calls. The network resets the order at every pass.
    """

    turn: int

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the mask of this call applied."""
        child = self._modules[str(self.turn % len(self._modules))]
        self.turn += 1
        assert child is not None
        result: Tensor = child(x)
        return result


def shared_dropout(module: nn.Module, kinds: tuple[type[nn.Module], ...], trial: Inputs) -> dict[str, int]:
    """Return the dropout layers that a forward pass calls more than once, each with the number of calls."""
    calls: dict[str, int] = {}

    def enter(name: str) -> None:
        calls[name] = calls.get(name, 0) + 1

    handles = [
        layer.register_forward_pre_hook(lambda _layer, _args, name=name: enter(name))
        for name, layer in module.named_modules()
        if type(layer) in kinds
    ]
    if handles:
        call_with_hooks(module, trial, handles)
    return {name: count for name, count in calls.items() if count > 1}


def shared_names(module: nn.Module, kinds: tuple[type[nn.Module], ...], sites: Collection[str]) -> dict[str, int]:
    """Return the dropout layers whose calls are among the sites, "drop.0" and so on, with the number of these."""
    layers = [name for name, layer in module.named_modules() if type(layer) in kinds]
    counts = {name: sum(f"{name}.{i}".lstrip(".") in sites for i in range(len(sites))) for name in layers}
    return {name: count for name, count in counts.items() if count}


def start_pass(module: nn.Module, _args: object) -> None:
    """Let the calls of shared layers start with their first mask: a hook before the forward pass of the network."""
    for layer in module.modules():
        if type(layer) is SharedDropout:
            layer.turn = 0


def call_with_hooks(module: nn.Module, trial: Inputs, handles: Sequence[RemovableHandle]) -> None:
    """Make one forward pass and remove the hooks."""
    try:
        with torch.no_grad():
            call(module, trial)
    finally:
        for handle in handles:
            handle.remove()
