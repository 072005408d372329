"""Triton kernels of IVON: a draw of all weights with its noise, and the update of one parameter, in one pass each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

BLOCK = 1024
# The largest Newton step of a mean, as in `inference/kernels/ivon.py`.
LIMIT = tl.constexpr(0.1)
POINTERS = ("mean_ptr", "curvature_ptr", "momentum_ptr", "gradient_ptr", "drawn_ptr")


@triton.jit(do_not_specialize=["count"])
def draw_kernel(
    out_ptr, mean_ptr, curvature_ptr, delta_ptr, seed_ptr, count, n, SAME: tl.constexpr, BLOCK: tl.constexpr
):
    """Write mean + e / sqrt(n (curvature + delta)), e of the stream that the seed in memory names."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    h = tl.load(curvature_ptr + i, mask=valid, other=1.0)
    delta = tl.load(delta_ptr) if SAME else tl.load(delta_ptr + i, mask=valid, other=0.0)
    e = tl.randn(tl.load(seed_ptr), i.to(tl.int32))
    mean = tl.load(mean_ptr + i, mask=valid, other=0.0)
    tl.store(out_ptr + i, mean + e * tl.rsqrt(n * (h + delta)), mask=valid)


@triton.jit(do_not_specialize=["count", "delta", "loc"], do_not_specialize_on_alignment=POINTERS)
def update_kernel(
    mean_ptr,
    curvature_ptr,
    momentum_ptr,
    gradient_ptr,
    drawn_ptr,
    controls_ptr,
    count,
    n,
    delta,
    loc,
    beta1,
    rate,
    BLOCK: tl.constexpr,
):
    """Update mean, curvature and mean gradient; the controls in memory are learning rate and bias correction."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    lr, correction = tl.load(controls_ptr), tl.load(controls_ptr + 1)
    m = tl.load(mean_ptr + i, mask=valid, other=0.0)
    h = tl.load(curvature_ptr + i, mask=valid, other=1.0)
    g = tl.load(gradient_ptr + i, mask=valid, other=0.0).to(tl.float32)
    total = h + delta
    change = g * (tl.load(drawn_ptr + i, mask=valid, other=0.0) - m) * n * total - h
    h = h + rate * change + 0.5 * rate * rate * change * change / total
    average = beta1 * tl.load(momentum_ptr + i, mask=valid, other=0.0) + (1 - beta1) * g
    tl.store(momentum_ptr + i, average, mask=valid)
    tl.store(curvature_ptr + i, h, mask=valid)
    step, most = (average * correction + delta * (m - loc)) / (h + delta), LIMIT * tl.rsqrt(h + delta)
    tl.store(mean_ptr + i, m - lr * tl.minimum(tl.maximum(step, -most), most), mask=valid)


def draw(out: Tensor, mean: Tensor, curvature: Tensor, delta: Tensor, n: float, seed: Tensor) -> None:
    """Write a draw to `out` (D,); delta is (1,) or (D,), and the seed a tensor (1,) of int64."""
    grid = (triton.cdiv(out.numel(), BLOCK),)
    draw_kernel[grid](out, mean, curvature, delta, seed, out.numel(), n, SAME=delta.numel() == 1, BLOCK=BLOCK)


def update(
    state: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    drawn: Tensor,
    n: float,
    prior: tuple[float, float],
    betas: tuple[float, float],
    controls: Tensor,
) -> None:
    """Update mean, curvature and mean gradient of one parameter in place; `controls` are (lr, correction)."""
    grid = (triton.cdiv(gradient.numel(), BLOCK),)
    kernel = update_kernel[grid]
    kernel(*state, gradient, drawn, controls, gradient.numel(), n, *prior, betas[0], 1 - betas[1], BLOCK=BLOCK)
