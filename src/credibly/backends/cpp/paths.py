"""Microcanonical Langevin paths on a density of the C++ backend."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.backends.cpp import api
from credibly.backends.cpp.density import CppDensity
from credibly.core.inputs import Tensors


def follow(
    density: CppDensity,
    state: Tensors,
    size: float,
    scale: Tensor | None,
    steps: int,
    scheme: api.Scheme,
    noise: Tensor | None,
    strength: float,
) -> Tensor:
    """Take `steps` steps of every chain in place, as `kernels.mclmc` defines them.

    `state` is theta, direction and gradient (C, D), and the log likelihood (C,). `noise` (C, steps, D) refreshes the
    direction after every step with the given strength; None for paths without noise. Returns the sums of the energy
    errors and of their squares, (2, C).
    """
    theta, direction, gradient, log_likelihood = state
    kicks, drifts = scheme
    assert noise is None or noise.stride()[1:] == (theta.shape[1], 1)
    outcome = torch.empty(len(theta), 2, dtype=torch.float64)
    arguments = api.Paths(
        chains=len(theta),
        threads=density.threads(len(theta), steps),
        theta=api.address(theta),
        direction=api.address(direction),
        gradient=api.address(gradient),
        log_likelihood=api.address(log_likelihood),
        step_size=size,
        scale=api.address(scale),
        loc=api.address(density.energy_of_prior[0]),
        precision=api.address(density.energy_of_prior[1]),
        steps=steps,
        drifts=len(drifts),
        kick=(api.Real * len(kicks))(*kicks),
        drift=(api.Real * len(drifts))(*drifts),
        noise=None if noise is None else noise.data_ptr(),
        noise_pitch=0 if noise is None else noise.stride(0),
        strength=strength,
        outcome=api.address(outcome),
    )
    api.function("paths", density.stack.dtype)(density.struct, arguments)
    return outcome.T
