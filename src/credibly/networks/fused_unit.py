"""A residual unit fused into one GPU operation, act(FilterResponseNorm(conv(x)) + other), with its gradient.

Convolutions with few filters are memory-bound, and libraries have no good kernels for them: theirs take several times
as long as the memory traffic requires, and normalisation, activation and sum each read and write memory again. The
Triton kernels of `credibly.backends.triton.unit` do everything in one pass. They provide first derivatives in eager
code, so they are used under `grad_and_aux` there; everywhere else the plain layers run.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from credibly.core.autodiff import first_order
from credibly.networks.normalisation import FilterResponseNorm

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Number of values of an image that one Triton program processes.
MOST_VALUES = 2**14


class Unit(nn.Module):
    """A convolution with "same" padding and a normalisation, then optionally a sum with `other` and an activation.

    Stride s divides the sides by s, rounded up.
    """

    def __init__(self, inputs: int, filters: int, kernel: int, stride: int, threshold: bool) -> None:
        super().__init__()
        self.uneven = stride > 1 and kernel > 1
        self.conv = nn.Conv2d(inputs, filters, kernel, stride, padding=0 if self.uneven else kernel // 2)
        self.norm = FilterResponseNorm(filters, threshold=threshold)

    def forward(self, x: Tensor, act: nn.Module | None = None, other: Tensor | None = None) -> Tensor:
        """Map (N, inputs, H, W) to (N, filters, H / stride, W / stride)."""
        if first_order() and self.fits(x, act):
            conv, norm, low = self.conv, self.norm, torch.is_autocast_enabled("cuda")
            parameters = (conv.weight, conv.bias, norm.weight, norm.bias, norm.tau)
            out: Tensor = FusedUnit.apply(  # type: ignore[no-untyped-call]
                x, *parameters, other, conv.stride[0], norm.eps, act is not None, low
            )
            return out
        if self.uneven:  # 3 x 3 with stride 2: an even side needs one row of padding in total, an odd side two
            x = F.pad(x, (x.shape[-1] % 2, 1, x.shape[-2] % 2, 1))
        y: Tensor = self.norm(self.conv(x))
        if other is not None:
            y = other + y
        return y if act is None else act(y)

    def fits(self, x: Tensor, act: nn.Module | None = None) -> bool:
        """Return whether the kernels support these images: float32 by TF32, or bfloat16, on a GPU; power-of-two sizes.

        Inputs with fewer than 16 channels, such as colours, get no gradient.
        """
        if not (HAS_TRITON and x.is_cuda and x.dim() == 4 and (act is None or type(act) is nn.SiLU)):
            return False
        low = torch.is_autocast_enabled("cuda")
        allowed = torch.get_autocast_dtype("cuda") == torch.bfloat16 if low else torch.backends.cudnn.allow_tf32
        kinds = (torch.float32, torch.bfloat16) if low else (torch.float32,)
        if not (allowed and x.dtype in kinds and self.conv.weight.dtype == torch.float32):
            return False
        channels, filters, before = self.conv.in_channels, self.conv.out_channels, x.shape[-1]
        after = -(-before // self.conv.stride[0])
        powers = all(map(_power, (filters, before, after))) and (channels < 16 or _power(channels))
        values = max(before * before * channels, after * after * filters)
        within = channels <= 64 and 16 <= filters <= 64 and after >= 4 and values <= MOST_VALUES
        return powers and within and x.shape[-2] == before and not (channels < 16 and x.requires_grad)


def fuses(module: nn.Module, x: Tensor) -> bool:
    """Return whether a network has units, all of which use the kernels for the gradient at such images."""
    units = [m for m in module.modules() if isinstance(m, Unit)]
    if not (units and HAS_TRITON and x.is_cuda):
        return False
    found: list[bool] = []
    handles = [u.register_forward_pre_hook(lambda u, args: found.append(u.fits(*args[:2]))) for u in units]
    try:
        with torch.no_grad():
            module(x)
    finally:
        for handle in handles:
            handle.remove()
    return all(found)


def _power(count: int) -> bool:
    return count & (count - 1) == 0


class FusedUnit(torch.autograd.Function):
    """The unit and its gradient by the kernels: in bfloat16 if `low`, else in float32 with TF32 products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        tau: Tensor | None,
        other: Tensor | None,
        stride: int,
        eps: float,
        silu: bool,
        low: bool,
    ) -> Tensor:
        """Return act(norm(conv(x)) + other), and save the output of the convolution."""
        from credibly.backends.triton.unit import forward_kernel

        x, other, size = _channels_last(x), _channels_last(other), _sizes(x, weight, stride)
        bias, gamma, beta, tau = (None if v is None else v.contiguous() for v in (bias, gamma, beta, tau))
        shape = (len(x), size["FILTERS"], size["SIDE"], size["SIDE"])
        kind = torch.bfloat16 if low else torch.float32
        out = torch.empty(shape, dtype=kind, device=x.device, memory_format=torch.channels_last)
        z = torch.empty_like(out)
        images, warps = _per_program(size["SIDE"] ** 2 * size["FILTERS"], low)
        forward_kernel[(-(-len(x) // images),)](
            x,
            _taps(weight, (2, 3, 1, 0), low),
            bias,
            gamma,
            beta,
            tau,
            other,
            z,
            out,
            len(x),
            eps,
            **size,
            IMAGES=images,
            BLOCK=_block(size["CHANNELS"], size["SIZE"]),
            LOW=low,
            TAU=tau is not None,
            OTHER=other is not None,
            SILU=silu,
            num_warps=warps,
        )
        ctx.save_for_backward(x, z, weight, gamma, beta, tau, other)
        ctx.stride, ctx.eps, ctx.silu, ctx.low = stride, eps, silu, low
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all tensor arguments."""
        from credibly.backends.triton.unit import norm_back_kernel

        x, z, weight, gamma, beta, tau, other = ctx.saved_tensors
        size = _sizes(x, weight, ctx.stride)
        dz, dother = torch.empty_like(z), None if other is None else torch.empty_like(z)
        sums = torch.empty(len(x), 4, size["FILTERS"], device=x.device)  # per image: bias, gamma, beta, tau
        norm_back_kernel[(len(x),)](
            z,
            gamma,
            beta,
            tau,
            other,
            _channels_last(gradient),
            dz,
            dother,
            sums,
            ctx.eps,
            SIDE=size["SIDE"],
            FILTERS=size["FILTERS"],
            TAU=tau is not None,
            OTHER=other is not None,
            SILU=ctx.silu,
            num_warps=max(1, min(8, size["SIDE"] ** 2 * size["FILTERS"] // 2048)),
        )
        dx = _input_gradient(dz, x, weight, size, ctx.low) if ctx.needs_input_grad[0] else None
        dbias, dgamma, dbeta, dtau = sums.sum(0).unbind(0)
        own = (dbias, dgamma, dbeta, None if tau is None else dtau)
        return dx, _weight_gradient(dz, x, size, ctx.low), *own, dother, None, None, None, None


def _input_gradient(dz: Tensor, x: Tensor, weight: Tensor, size: dict[str, int], low: bool) -> Tensor:
    from credibly.backends.triton.unit import input_back_kernel

    dx = torch.empty_like(x)
    images, warps = _per_program(size["SIDE_IN"] ** 2 * size["CHANNELS"], low)
    input_back_kernel[(-(-len(x) // images),)](
        dz,
        _taps(weight, (2, 3, 0, 1), low),
        dx,
        len(x),
        **size,
        IMAGES=images,
        BLOCK=_block(size["FILTERS"], size["SIZE"]),
        LOW=low,
        num_warps=warps,
    )
    return dx


def _weight_gradient(dz: Tensor, x: Tensor, size: dict[str, int], low: bool) -> Tensor:
    from credibly.backends.triton.unit import weight_back_kernel

    taps, channels, filters = size["SIZE"], size["CHANNELS"], size["FILTERS"]
    count = taps * taps * channels
    rows = min(64 if low or channels < 64 else 128, _next_power(count))
    # 4 or 16 programs per multiprocessor.
    positions, programs, stages = (128, 528, 2) if low else (64, 2112, 1)
    groups = -(-count // rows)
    shared = max(1, min(programs // groups, len(x) * size["SIDE"] ** 2 // positions))
    parts = torch.empty(shared, count, filters, device=x.device)
    weight_back_kernel[(groups, shared)](
        x, dz, parts, len(x), shared, **size, ROWS=rows, PLACES=positions, LOW=low, num_warps=4, num_stages=stages
    )
    return parts.sum(0).view(taps, taps, channels, filters).permute(3, 2, 0, 1).contiguous()


def _channels_last(x: Any) -> Any:
    return None if x is None else x.contiguous(memory_format=torch.channels_last)


def _sizes(x: Tensor, weight: Tensor, stride: int) -> dict[str, int]:
    before, size = x.shape[-1], weight.shape[-1]
    return {
        "SIDE_IN": before,
        "CHANNELS": x.shape[1],
        "SIDE": -(-before // stride),
        "FILTERS": weight.shape[0],
        "SIZE": size,
        "STRIDE": stride,
        "PAD": before % 2 if stride > 1 and size > 1 else size // 2,
    }


def _taps(weight: Tensor, order: tuple[int, ...], low: bool) -> Tensor:
    return weight.permute(order).to(torch.bfloat16 if low else torch.float32).contiguous()


def _per_program(values: int, low: bool) -> tuple[int, int]:
    """Return the images per program and its warps, given the values of one image."""
    return max(1, 2**13 // values), 8 if values > 2**13 and not low else 4


def _block(channels: int, size: int) -> int:
    """Return the number of (tap, channel) products that are summed at a time."""
    return min(channels, 64) if channels >= 16 else _next_power(channels * size * size)


def _next_power(count: int) -> int:
    return max(16, 1 << (count - 1).bit_length())
