"""Triton kernels of a residual unit: convolution, filter response normalisation and activation.

Images are channels last. A program holds all positions of one image (or a few) for all filters, so the mean over
positions is known before anything is written: the output of the convolution is written once, and that of the unit
beside it. Sums are in float32. The convolution is a matrix product over k = (tap, channel) (implicit im2col: its
operand is gathered from the image, not stored).
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"


# One compiled kernel serves any number of images, and parameters at any offset of a flat vector.
PARAMETERS = ("bias_ptr", "gamma_ptr", "beta_ptr", "tau_ptr")


@triton.jit
def _round_tf32(x):
    """Round float32 to the nearest tf32. The product would truncate, and is slower with operands from memory."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _gather(
    x_ptr,
    first,
    images,
    p,
    k,
    SIDE_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIDE: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BACK: tl.constexpr,
    KS: tl.constexpr,
):
    """Return the operand (position, k) of a convolution, with BACK of its transpose; `p` counts from image `first`."""
    n = p // (SIDE * SIDE)
    row, column = (p // SIDE) % SIDE, p % SIDE
    tap, channel = k // CHANNELS, k % CHANNELS
    down, right = tap // SIZE, tap % SIZE
    if BACK:
        y, x = row[:, None] + PAD - down[None, :], column[:, None] + PAD - right[None, :]
        inside = (y >= 0) & (x >= 0)
        if STRIDE > 1:
            inside = inside & (y % STRIDE == 0) & (x % STRIDE == 0)
            y, x = y // STRIDE, x // STRIDE
    else:
        y, x = row[:, None] * STRIDE + down[None, :] - PAD, column[:, None] * STRIDE + right[None, :] - PAD
        inside = (y >= 0) & (x >= 0)
    inside = inside & (y < SIDE_IN) & (x < SIDE_IN) & (k < KS)[None, :] & (first + n < images)[:, None]
    offset = ((n[:, None] * SIDE_IN + y) * SIDE_IN + x) * CHANNELS + channel[None, :]
    return tl.load(x_ptr + first.to(tl.int64) * (SIDE_IN * SIDE_IN * CHANNELS) + offset, mask=inside, other=0.0)


@triton.jit
def _convolve(
    x_ptr,
    w_ptr,
    first,
    images,
    SIDE_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIDE: tl.constexpr,
    FILTERS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BACK: tl.constexpr,
    IMAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
):
    """Return the convolution (positions of IMAGES images, FILTERS) in float32; `w_ptr` holds (tap, channel, filter)."""
    KS: tl.constexpr = SIZE * SIZE * CHANNELS
    p, f = tl.arange(0, IMAGES * SIDE * SIDE), tl.arange(0, FILTERS)
    total = tl.zeros([IMAGES * SIDE * SIDE, FILTERS], dtype=tl.float32)
    for block in tl.static_range((KS + BLOCK - 1) // BLOCK):
        k = block * BLOCK + tl.arange(0, BLOCK)
        a = _gather(x_ptr, first, images, p, k, SIDE_IN, CHANNELS, SIDE, SIZE, STRIDE, PAD, BACK, KS)
        w = tl.load(w_ptr + k[:, None] * FILTERS + f[None, :], mask=(k < KS)[:, None], other=0.0)
        if LOW:
            a, w = a.to(tl.bfloat16), w.to(tl.bfloat16)
        total = tl.dot(a, w, total, input_precision="tf32")  # ignored for bfloat16
    return total


@triton.jit(do_not_specialize=["images"], do_not_specialize_on_alignment=PARAMETERS)
def forward_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    gamma_ptr,
    beta_ptr,
    tau_ptr,
    other_ptr,
    z_ptr,
    out_ptr,
    images,
    eps,
    SIDE_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIDE: tl.constexpr,
    FILTERS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    IMAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    TAU: tl.constexpr,
    OTHER: tl.constexpr,
    SILU: tl.constexpr,
):
    """Write z = conv(x) and out = act(norm(z) + other)."""
    first = tl.program_id(0) * IMAGES
    total = _convolve(
        x_ptr, w_ptr, first, images, SIDE_IN, CHANNELS, SIDE, FILTERS, SIZE, STRIDE, PAD, False, IMAGES, BLOCK, LOW
    )
    f = tl.arange(0, FILTERS)
    total += tl.load(bias_ptr + f)[None, :]
    z = tl.reshape(total, [IMAGES, SIDE * SIDE, FILTERS]).to(z_ptr.dtype.element_ty)
    n, p = first + tl.arange(0, IMAGES), tl.arange(0, SIDE * SIDE)
    offsets = (n.to(tl.int64)[:, None, None] * (SIDE * SIDE) + p[None, :, None]) * FILTERS + f[None, None, :]
    valid = (n < images)[:, None, None] & (p >= 0)[None, :, None] & (f >= 0)[None, None, :]
    tl.store(z_ptr + offsets, z, mask=valid)
    u = z.to(tl.float32)
    u = u * tl.rsqrt(tl.sum(u * u, axis=1) / (SIDE * SIDE) + eps)[:, None, :]
    u = u * tl.load(gamma_ptr + f)[None, None, :] + tl.load(beta_ptr + f)[None, None, :]
    if TAU:
        u = tl.maximum(u, tl.load(tau_ptr + f)[None, None, :])
    if OTHER:
        u += tl.load(other_ptr + offsets, mask=valid, other=0.0).to(tl.float32)
    if SILU:
        u = u * tl.sigmoid(u)
    tl.store(out_ptr + offsets, u.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS)
def norm_back_kernel(
    z_ptr,
    gamma_ptr,
    beta_ptr,
    tau_ptr,
    other_ptr,
    grad_ptr,
    dz_ptr,
    dother_ptr,
    sums_ptr,
    eps,
    SIDE: tl.constexpr,
    FILTERS: tl.constexpr,
    TAU: tl.constexpr,
    OTHER: tl.constexpr,
    SILU: tl.constexpr,
):
    """Backpropagate through activation and normalisation.

    Writes the gradients of z and `other`, and per image the gradients of bias, gamma, beta and tau.
    """
    n = tl.program_id(0)
    p, f = tl.arange(0, SIDE * SIDE), tl.arange(0, FILTERS)
    offsets = n.to(tl.int64) * (SIDE * SIDE * FILTERS) + p[:, None] * FILTERS + f[None, :]
    z = tl.load(z_ptr + offsets).to(tl.float32)
    grad = tl.load(grad_ptr + offsets).to(tl.float32)
    gamma = tl.load(gamma_ptr + f)
    scale = tl.rsqrt(tl.sum(z * z, axis=0) / (SIDE * SIDE) + eps)
    unit = z * scale[None, :]
    u = unit * gamma[None, :] + tl.load(beta_ptr + f)[None, :]
    m = u
    if TAU:
        tau = tl.load(tau_ptr + f)[None, :]
        m = tl.maximum(u, tau)
    if SILU:
        a = m
        if OTHER:
            a += tl.load(other_ptr + offsets).to(tl.float32)
        s = tl.sigmoid(a)
        grad = grad * (s * (1 + a * (1 - s)))
    if OTHER:
        tl.store(dother_ptr + offsets, grad.to(dother_ptr.dtype.element_ty))
    sums = sums_ptr + n.to(tl.int64) * (4 * FILTERS) + f
    if TAU:
        above = tl.where(u > tau, 1.0, tl.where(u == tau, 0.5, 0.0))  # ties: half each, as in torch
        tl.store(sums + 3 * FILTERS, tl.sum(grad * (1 - above), axis=0))
        grad = grad * above
    gamma_grad = tl.sum(grad * unit, axis=0)
    tl.store(sums + FILTERS, gamma_grad)
    tl.store(sums + 2 * FILTERS, tl.sum(grad, axis=0))
    dz = (gamma * scale)[None, :] * (grad - unit * (gamma_grad / (SIDE * SIDE))[None, :])
    dz = dz.to(dz_ptr.dtype.element_ty)
    tl.store(dz_ptr + offsets, dz)
    tl.store(sums, tl.sum(dz.to(tl.float32), axis=0))


@triton.jit(do_not_specialize=["images"])
def input_back_kernel(
    dz_ptr,
    w_ptr,
    dx_ptr,
    images,
    SIDE_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIDE: tl.constexpr,
    FILTERS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    IMAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
):
    """Write the gradient of a convolution's input; `w_ptr` holds (tap, filter, channel)."""
    first = tl.program_id(0) * IMAGES
    total = _convolve(
        dz_ptr, w_ptr, first, images, SIDE, FILTERS, SIDE_IN, CHANNELS, SIZE, STRIDE, PAD, True, IMAGES, BLOCK, LOW
    )
    p, c = tl.arange(0, IMAGES * SIDE_IN * SIDE_IN), tl.arange(0, CHANNELS)
    offsets = first.to(tl.int64) * (SIDE_IN * SIDE_IN * CHANNELS) + p[:, None] * CHANNELS + c[None, :]
    valid = (first + p // (SIDE_IN * SIDE_IN) < images)[:, None] & (c >= 0)[None, :]
    tl.store(dx_ptr + offsets, total.to(dx_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["images", "programs"])
def weight_back_kernel(
    x_ptr,
    dz_ptr,
    parts_ptr,
    images,
    programs,
    SIDE_IN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIDE: tl.constexpr,
    FILTERS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    LOW: tl.constexpr,
):
    """Write sums of x[position + tap, channel] dz[position, filter] over every `programs`-th block of positions.

    Rows are k = (tap, channel).
    """
    KS: tl.constexpr = SIZE * SIZE * CHANNELS
    program, group = tl.program_id(1), tl.program_id(0)
    k, f = group * ROWS + tl.arange(0, ROWS), tl.arange(0, FILTERS)
    total = tl.zeros([ROWS, FILTERS], dtype=tl.float32)
    for block in range(program, tl.cdiv(images * (SIDE * SIDE), PLACES), programs):
        first = block * PLACES // (SIDE * SIDE)
        p = block * PLACES % (SIDE * SIDE) + tl.arange(0, PLACES)
        x = _gather(x_ptr, first, images, p, k, SIDE_IN, CHANNELS, SIDE, SIZE, STRIDE, PAD, False, KS)
        inside = (first + p // (SIDE * SIDE) < images)[:, None] & (f >= 0)[None, :]
        block_ptr = dz_ptr + first.to(tl.int64) * (SIDE * SIDE * FILTERS)
        dz = tl.load(block_ptr + p[:, None] * FILTERS + f[None, :], mask=inside, other=0.0)
        if LOW:
            x, dz = x.to(tl.bfloat16), dz.to(tl.bfloat16)
        else:
            x, dz = _round_tf32(x), _round_tf32(dz)
        total = tl.dot(tl.trans(x), dz, total, input_precision="tf32")
    offset = (program * KS + k)[:, None] * FILTERS + f[None, :]
    tl.store(parts_ptr + offset, total, mask=(k < KS)[:, None] & (f >= 0)[None, :])
