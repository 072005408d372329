"""The floor of a computation: its FLOPs at the machine's peak matrix rate, its bytes at peak bandwidth (a roofline).

Nothing that does the same arithmetic can be faster. Activation functions, random numbers and dispatch are not included,
so the floor may not be attainable: it bounds the possible gain.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MATRICES = (384, 1024, 2048)  # sizes of the matrix products to time; the fastest counts
MEMORY = {"cpu": (2**18, 2**21, 2**24, 2**27), "cuda": (2**24, 2**27, 2**30)}  # bytes of the arrays to copy


@dataclass(frozen=True)
class Floor:
    """FLOPs of the matrix products, and bytes that must be read and written."""

    flops: float
    bytes: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """Return the minimum time on a machine with these rates."""
        return max(self.flops / rates.matrix, self.bytes / rates.bandwidth_for(self.bytes) if self.bytes else 0.0)

    def times(self, factor: float) -> Floor:
        return Floor(factor * self.flops, factor * self.bytes)


@dataclass(frozen=True)
class Rates:
    """Peak rates of this machine: matrix products, and copies by array size (caches are faster than memory)."""

    matrix: float  # FLOP/s
    bandwidth: tuple[tuple[int, float], ...]  # (bytes of the array, bytes per second read and written together)
    products: str = "float32"  # bf16 on a GPU, the fastest precision timed there

    def bandwidth_for(self, count: float) -> float:
        """Return the rate of the smallest measured array with at least `count` bytes, or of the largest."""
        return next((rate for size, rate in self.bandwidth if size >= count), self.bandwidth[-1][1])

    def record(self) -> dict[str, Any]:
        return {"matrix_flop_s": self.matrix, "bandwidth_byte_s": {str(size): rate for size, rate in self.bandwidth}}

    def __str__(self) -> str:
        copies = ", ".join(f"{rate / 1e9:.0f} GB/s at {size / 2**20:.3g} MiB" for size, rate in self.bandwidth)
        return f"{self.products} products at {self.matrix / 1e9:,.0f} GFLOP/s; copies at {copies}"


def measure(device: str = "cpu", *, seconds: float = 0.3) -> Rates:
    """Measure both rates with the current number of torch threads."""
    best = 0.0
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for side in MATRICES if device == "cpu" else (4096, 8192):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        best = max(best, 2 * side**3 / _best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), seconds, device))
    rates = []
    for size in MEMORY[device]:
        source = torch.randn(size // 8, device=device)  # half the bytes are read, half written
        target = torch.empty_like(source)
        rates.append((size, size / _best(lambda s=source, t=target: t.copy_(s), seconds, device)))
    return Rates(best, tuple(rates), "float32" if device == "cpu" else "bf16")


def _best(call: Callable[[], object], seconds: float, device: str) -> float:
    """Return the shortest time of a call within the given number of seconds."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    call()
    wait()
    least, first = float("inf"), time.perf_counter()
    while time.perf_counter() - first < seconds:
        start = time.perf_counter()
        call()
        wait()
        least = min(least, time.perf_counter() - start)
    return least


def forward_flops(sizes: Sequence[int], rows: int) -> float:
    """Return the FLOPs of one forward pass of a multilayer perceptron."""
    return 2.0 * rows * sum(a * b for a, b in itertools.pairwise(sizes))


def gradient_flops(sizes: Sequence[int], rows: int) -> float:
    """Return the FLOPs of one gradient: the forward pass, and gradients of all weights and all inputs but the first."""
    return 3 * forward_flops(sizes, rows) - 2.0 * rows * sizes[0] * sizes[1]
