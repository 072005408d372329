"""The functions of arrays that the models use, in torch; those not defined here have the same name in torch and JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class TorchArrays:
    """Namespace of float64 tensors on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def array(self, value: Any) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(value), dtype=torch.float64)

    def log_sum_exp(self, value: Tensor, axis: int) -> Tensor:
        return torch.logsumexp(value, axis)

    def log_sigmoid(self, value: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(value)

    def cholesky(self, value: Tensor) -> Tensor:
        """Return the factor, NaN where there is none: a trajectory can reach any point."""
        factor, failed = torch.linalg.cholesky_ex(value)
        return torch.where((failed == 0)[..., None, None], factor, torch.nan)

    def solve_lower(self, factor: Tensor, vector: Tensor) -> Tensor:
        solution: Tensor = torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False)
        return solution.squeeze(-1)

    def scan(self, step: Callable[[Tensor, Any], Tensor], state: Tensor, inputs: Any) -> list[Tensor]:
        """Return the states after each of the inputs."""
        states = []
        for one in inputs:
            state = step(state, one)
            states.append(state)
        return states
