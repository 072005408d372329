"""Triton kernels of a residual network's unit: convolution, filter response normalisation, activation, for images on a GPU.

Images lie channels last. A program holds all places of an image (or of a few) for all filters, so the mean over places is
known before anything is written: the convolution's output is written once, and the unit's output beside it. Sums run in
float32. The convolution is a product over k = (tap, channel): what it multiplies is gathered from the image, not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"


# One kernel serves any number of images, and parameters at any place of a flat vector.
PARAMETERS = ("bias_ptr", "gamma_ptr", "beta_ptr", "tau_ptr")


@triton.jit
def _rounded(x):
    """float32 to the nearest tf32. The product would cut its last bits off; and from registers, not from memory, it turns faster."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _gathered(
    x_ptr, first, images, p, k, SIDE_IN: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """Values (place, k) that a convolution multiplies; with BACK those of its transpose. Places `p` count from image `first`."""
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
    place = ((n[:, None] * SIDE_IN + y) * SIDE_IN + x) * CHANNELS + channel[None, :]
    return tl.load(x_ptr + first.to(tl.int64) * (SIDE_IN * SIDE_IN * CHANNELS) + place, mask=inside, other=0.0)


@triton.jit
def _convolved(
    x_ptr, w_ptr, first, images, SIDE_IN: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, FILTERS: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr, IMAGES: tl.constexpr, BLOCK: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """(places of IMAGES images, FILTERS) in float32; `w_ptr` holds (tap, channel, filter)."""
    KS: tl.constexpr = SIZE * SIZE * CHANNELS
    p, f = tl.arange(0, IMAGES * SIDE * SIDE), tl.arange(0, FILTERS)
    total = tl.zeros([IMAGES * SIDE * SIDE, FILTERS], dtype=tl.float32)
    for block in tl.static_range((KS + BLOCK - 1) // BLOCK):
        k = block * BLOCK + tl.arange(0, BLOCK)
        a = _gathered(x_ptr, first, images, p, k, SIDE_IN, CHANNELS, SIDE, SIZE, STRIDE, PAD, BACK, KS)
        w = tl.load(w_ptr + k[:, None] * FILTERS + f[None, :], mask=(k < KS)[:, None], other=0.0)
        if LOW:
            a, w = a.to(tl.bfloat16), w.to(tl.bfloat16)
        total = tl.dot(a, w, total, input_precision="tf32")  # which bfloat16 does not heed
    return total


@triton.jit(do_not_specialize=["images"], do_not_specialize_on_alignment=PARAMETERS)
def forward_kernel(
    x_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, tau_ptr, other_ptr, z_ptr, out_ptr, images, eps,
    SIDE_IN: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, FILTERS: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, IMAGES: tl.constexpr, BLOCK: tl.constexpr, LOW: tl.constexpr,
    TAU: tl.constexpr, OTHER: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """z = conv(x), out = act(norm(z) + other): z and out are written."""
    first = tl.program_id(0) * IMAGES
    total = _convolved(
        x_ptr, w_ptr, first, images, SIDE_IN, CHANNELS, SIDE, FILTERS, SIZE, STRIDE, PAD, False, IMAGES, BLOCK, LOW
    )
    f = tl.arange(0, FILTERS)
    total += tl.load(bias_ptr + f)[None, :]
    z = tl.reshape(total, [IMAGES, SIDE * SIDE, FILTERS]).to(z_ptr.dtype.element_ty)
    n, p = first + tl.arange(0, IMAGES), tl.arange(0, SIDE * SIDE)
    places = (n.to(tl.int64)[:, None, None] * (SIDE * SIDE) + p[None, :, None]) * FILTERS + f[None, None, :]
    mine = (n < images)[:, None, None] & (p >= 0)[None, :, None] & (f >= 0)[None, None, :]
    tl.store(z_ptr + places, z, mask=mine)
    u = z.to(tl.float32)
    u = u * tl.rsqrt(tl.sum(u * u, axis=1) / (SIDE * SIDE) + eps)[:, None, :]
    u = u * tl.load(gamma_ptr + f)[None, None, :] + tl.load(beta_ptr + f)[None, None, :]
    if TAU:
        u = tl.maximum(u, tl.load(tau_ptr + f)[None, None, :])
    if OTHER:
        u += tl.load(other_ptr + places, mask=mine, other=0.0).to(tl.float32)
    if SILU:
        u = u * tl.sigmoid(u)
    tl.store(out_ptr + places, u.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS)
def norm_back_kernel(
    z_ptr, gamma_ptr, beta_ptr, tau_ptr, other_ptr, slope_ptr, dz_ptr, dother_ptr, sums_ptr, eps,
    SIDE: tl.constexpr, FILTERS: tl.constexpr, TAU: tl.constexpr, OTHER: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """From the slope of a unit's output: that of z, that of `other`, and an image's sums for bias, gamma, beta and tau."""
    n = tl.program_id(0)
    p, f = tl.arange(0, SIDE * SIDE), tl.arange(0, FILTERS)
    places = n.to(tl.int64) * (SIDE * SIDE * FILTERS) + p[:, None] * FILTERS + f[None, :]
    z = tl.load(z_ptr + places).to(tl.float32)
    slope = tl.load(slope_ptr + places).to(tl.float32)
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
            a += tl.load(other_ptr + places).to(tl.float32)
        s = tl.sigmoid(a)
        slope = slope * (s * (1 + a * (1 - s)))
    if OTHER:
        tl.store(dother_ptr + places, slope.to(dother_ptr.dtype.element_ty))
    sums = sums_ptr + n.to(tl.int64) * (4 * FILTERS) + f
    if TAU:
        above = tl.where(u > tau, 1.0, tl.where(u == tau, 0.5, 0.0))  # where both are equal, torch gives each one half
        tl.store(sums + 3 * FILTERS, tl.sum(slope * (1 - above), axis=0))
        slope = slope * above
    along = tl.sum(slope * unit, axis=0)
    tl.store(sums + FILTERS, along)
    tl.store(sums + 2 * FILTERS, tl.sum(slope, axis=0))
    dz = (gamma * scale)[None, :] * (slope - unit * (along / (SIDE * SIDE))[None, :])
    dz = dz.to(dz_ptr.dtype.element_ty)
    tl.store(dz_ptr + places, dz)
    tl.store(sums, tl.sum(dz.to(tl.float32), axis=0))


@triton.jit(do_not_specialize=["images"])
def input_back_kernel(
    dz_ptr, w_ptr, dx_ptr, images,
    SIDE_IN: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, FILTERS: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, IMAGES: tl.constexpr, BLOCK: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """The slope of a convolution's input; `w_ptr` holds (tap, filter, channel)."""
    first = tl.program_id(0) * IMAGES
    total = _convolved(
        dz_ptr, w_ptr, first, images, SIDE, FILTERS, SIDE_IN, CHANNELS, SIZE, STRIDE, PAD, True, IMAGES, BLOCK, LOW
    )
    p, c = tl.arange(0, IMAGES * SIDE_IN * SIDE_IN), tl.arange(0, CHANNELS)
    places = first.to(tl.int64) * (SIDE_IN * SIDE_IN * CHANNELS) + p[:, None] * CHANNELS + c[None, :]
    mine = (first + p // (SIDE_IN * SIDE_IN) < images)[:, None] & (c >= 0)[None, :]
    tl.store(dx_ptr + places, total.to(dx_ptr.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["images", "programs"])
def weight_back_kernel(
    x_ptr, dz_ptr, parts_ptr, images, programs,
    SIDE_IN: tl.constexpr, CHANNELS: tl.constexpr, SIDE: tl.constexpr, FILTERS: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Sums of x[place + tap, channel] dz[place, filter] over every so many images' places: rows k = (tap, channel)."""
    KS: tl.constexpr = SIZE * SIZE * CHANNELS
    mine, group = tl.program_id(1), tl.program_id(0)
    k, f = group * ROWS + tl.arange(0, ROWS), tl.arange(0, FILTERS)
    total = tl.zeros([ROWS, FILTERS], dtype=tl.float32)
    for block in range(mine, tl.cdiv(images * (SIDE * SIDE), PLACES), programs):
        first = block * PLACES // (SIDE * SIDE)
        p = block * PLACES % (SIDE * SIDE) + tl.arange(0, PLACES)
        x = _gathered(x_ptr, first, images, p, k, SIDE_IN, CHANNELS, SIDE, SIZE, STRIDE, PAD, False, KS)
        inside = (first + p // (SIDE * SIDE) < images)[:, None] & (f >= 0)[None, :]
        mine_ptr = dz_ptr + first.to(tl.int64) * (SIDE * SIDE * FILTERS)
        dz = tl.load(mine_ptr + p[:, None] * FILTERS + f[None, :], mask=inside, other=0.0)
        if LOW:
            x, dz = x.to(tl.bfloat16), dz.to(tl.bfloat16)
        else:
            x, dz = _rounded(x), _rounded(dz)
        total = tl.dot(tl.trans(x), dz, total, input_precision="tf32")
    place = (mine * KS + k)[:, None] * FILTERS + f[None, :]
    tl.store(parts_ptr + place, total, mask=(k < KS)[:, None] & (f >= 0)[None, :])
