"""Draws and updates of IVON on one large network in C++ and float32."""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.backends.cpp import api, api_wide
from credibly.backends.cpp.in_use import library

# Number of values below which starting threads costs more than it saves.
MIN_THREADED = 2**16


def supports(theta: Tensor) -> bool:
    """Return whether the C++ functions can work on a tensor, if the library is available."""
    return theta.dtype == torch.float32 and theta.device.type == "cpu" and library() is not None


def _threads(count: int) -> int:
    return torch.get_num_threads() if count >= MIN_THREADED else 1


def draw(out: Tensor, mean: Tensor, curvature: Tensor, delta: Tensor | float, n: float, keys: tuple[int, int]) -> None:
    """Write m + e / sqrt(n (h + delta)) to `out` (D,), with the noise e of two keys; delta is a number or (D,)."""
    vector = delta if isinstance(delta, Tensor) else None
    arguments = api_wide.GaussianDraw(
        keys=api_wide.Keys(*keys),
        count=len(out),
        threads=_threads(len(out)),
        mean=api.address(mean),
        curvature=api.address(curvature),
        deltas=api.address(vector),
        delta=0.0 if isinstance(delta, Tensor) else delta,
        n=n,
        out=api.address(out),
    )
    api_wide.function("gaussian_draw")(arguments)


def update(
    state: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    drawn: Tensor,
    n: float,
    prior: tuple[float, float],
    betas: tuple[float, float],
    lr: float,
    correction: float,
) -> None:
    """Update mean, curvature and mean gradient of one parameter in place; `prior` is its delta and mean."""
    mean, curvature, momentum = state
    arguments = api_wide.GaussianUpdate(
        count=gradient.numel(),
        threads=_threads(gradient.numel()),
        mean=api.address(mean),
        curvature=api.address(curvature),
        momentum=api.address(momentum),
        gradient=api.address(gradient),
        drawn=api.address(drawn),
        n=n,
        delta=prior[0],
        loc=prior[1],
        beta1=betas[0],
        rate=1 - betas[1],
        lr=lr,
        correction=correction,
    )
    api_wide.function("gaussian_update")(arguments)
