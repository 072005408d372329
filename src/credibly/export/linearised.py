"""A stack of layers linearised in its weights, f(x, w*) + J(x) (w - w*), written out layer by layer.

Derivatives travel forward with the values: a layer h W' + b with steps dW and db turns (h, dh) into
(h W' + b, dh W' + h dW' + db), and an activation s turns it into (s(h), s'(h) dh). torch's own forward mode would build
the number of rows into a traced graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# The derivative of each activation, from its input and its output.
DERIVATIVES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Tensor]] = {
    nn.Tanh: lambda _, h, y: 1 - y * y,
    nn.ReLU: lambda _, h, y: (h > 0).to(h.dtype),
    nn.Sigmoid: lambda _, h, y: y * (1 - y),
    nn.SiLU: lambda _, h, y: torch.sigmoid(h) * (1 + h * torch.sigmoid(-h)),
    nn.Identity: lambda _, h, y: torch.ones_like(h),
    nn.Dropout: lambda _, h, y: torch.ones_like(h),
    nn.Softplus: lambda m, h, y: torch.where(h * m.beta > m.threshold, 1.0, torch.sigmoid(h * m.beta)),
    nn.ELU: lambda m, h, y: torch.where(h > 0, 1.0, y + m.alpha),
    nn.LeakyReLU: lambda m, h, y: torch.where(h > 0, 1.0, m.negative_slope),
    nn.GELU: lambda _, h, y: (
        0.5 + 0.5 * torch.erf(h * math.sqrt(0.5)) + h * torch.exp(-0.5 * h * h) * (1 / math.sqrt(2 * math.pi))
    ),
}


def is_linearisable(module: nn.Module) -> bool:
    """Return whether a module is a stack of layers whose derivatives are known here."""
    if type(module) is nn.Sequential:
        return all(is_linearisable(child) for child in module)
    if type(module) is nn.GELU:
        return module.approximate == "none"
    return type(module) in (nn.Linear, nn.Flatten, *DERIVATIVES)


class LinearisedStack(nn.Module):
    """A stack at w*, as a function of the steps w - w*, which are its buffers."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack.requires_grad_(False)
        for name, parameter in stack.named_parameters():
            self.register_buffer(self.step_name(name), torch.zeros_like(parameter))

    @staticmethod
    def step_name(name: str) -> str:
        """Return the buffer with the step of a parameter."""
        return f"step_{name.replace('.', '_')}"

    def forward(self, x: Tensor) -> Tensor:
        """Return the linearised outputs."""
        value, slope = self._pass(self.stack, "", x, torch.zeros_like(x))
        return value + slope

    def _pass(self, module: nn.Module, prefix: str, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(module, nn.Sequential):
            for name, child in module.named_children():
                h, dh = self._pass(child, f"{prefix}{name}.", h, dh)
            return h, dh
        if isinstance(module, nn.Linear):
            step = getattr(self, self.step_name(f"{prefix}weight"))
            slope = dh @ module.weight.mT + h @ step.mT
            if module.bias is not None:
                slope = slope + getattr(self, self.step_name(f"{prefix}bias"))
            return module(h), slope
        value = module(h)
        if isinstance(module, nn.Flatten):
            return value, module(dh)
        return value, DERIVATIVES[type(module)](module, h, value) * dh
