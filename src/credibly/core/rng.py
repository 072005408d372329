"""Random streams. Each is named by (seed, purpose, indices), so results do not depend on how work is distributed.

Nothing in the package uses torch's global generator. The stream of chain 3 at iteration 17 is the same whichever
process draws it, and a resumed run needs no stored generator state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.errors import InputError

# Number of normal draws per step from which generating them takes a noticeable fraction of the step.
MANY = 2**15
# Number of normal draws from 16 words of a counter-based stream.
CHUNK = 32
# The increment of a stream's counter from word to word.
WORD_STEP = 0x9E3779B97F4A7C15


def check_seed(seed: int) -> int:
    """Return the seed. Raise unless it is a non-negative integer below 2**63."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise InputError("seed", f"must be a non-negative integer below 2**63, got {seed!r}")
    return seed


def stream_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return a 63-bit seed for one stream; different names give unrelated streams."""
    name = f"{seed}/{purpose}/{'/'.join(str(i) for i in indices)}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, *indices: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator at the start of the stream named by (seed, purpose, indices)."""
    return torch.Generator(device).manual_seed(stream_seed(seed, purpose, *indices))


def stream_keys(seed: int, purpose: str, *indices: int) -> tuple[int, int]:
    """Return the two 64-bit keys of a counter-based stream."""
    name = f"{seed}/{purpose}/{'/'.join(str(i) for i in indices)}".encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def keys_from(keys: tuple[int, int], position: int) -> tuple[int, int]:
    """Return keys with which `fill_normal` continues the given keys at a position, a multiple of CHUNK."""
    return (keys[0] + position // 2 * WORD_STEP) % 2**64, keys[1]


def stream_words(keys: tuple[int, int], count: int) -> Any:
    """Return the first `count` 64-bit words of a counter-based stream: word w depends on the keys and w only.

    This is SplitMix64 from the first key on, with the second key added halfway through its mixing, as in
    backends/cpp/noise.h.
    """
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(WORD_STEP)
    z += np.uint64(keys[0])
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z += np.uint64(keys[1])
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def fill_normal(out: Tensor, keys: tuple[int, int]) -> None:
    """Fill `out` (a multiple of CHUNK,) with standard normal numbers of a counter-based stream.

    Of every 16 words, eight give the radii and eight the angles.
    """
    bits = torch.from_numpy(stream_words(keys, len(out) // 2).view(np.int32)).view(-1, 2, CHUNK // 2)
    for half, numbers in enumerate(normal_pairs(*bits.unbind(1))):
        out.view(-1, 2, CHUNK // 2)[:, half] = numbers


def draw_noise(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw noise that `normal` turns into standard normal numbers (M, K, ...): the numbers themselves, or raw bits.

    On a CPU torch draws normal numbers in one thread, which takes a quarter of a large step. Raw bits (SFC64, seeded by
    the generator) take a quarter of that, and a compiled step does the remaining arithmetic in all threads.
    """
    if generator.device.type != "cpu" or dtype != torch.float32 or math.prod(shape) < MANY:
        return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
    pairs = -(-math.prod(shape[2:]) // 2)
    words = shape[0] * shape[1] * pairs  # of 64 bits, one per pair
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    raw = np.random.SFC64(seed).random_raw(words)
    return torch.from_numpy(raw.view(np.int32)).reshape(*shape[:2], 2, pairs)


def normal(noise: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal numbers (M, K, *shape) from the noise of `draw_noise`."""
    if noise.is_floating_point():
        return noise
    pairs = torch.cat(normal_pairs(*noise.unbind(-2)), -1)
    return pairs[..., : math.prod(shape)].reshape(*noise.shape[:2], *shape)


def normal_pairs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two standard normal numbers per pair of 32-bit words, by Box-Muller: sqrt(-2 log u) e^(i pi v)."""
    # |bits| / 2^31 is uniform with 31 bits, finest near zero, where the tails come from. 0 is replaced by 1/4.
    radius = first.to(torch.float32).abs().clamp_min_(0.25).mul_(2.0**-31).log_().mul_(-2).sqrt_()
    angle = second.to(torch.float32) * (math.pi * 2.0**-31)
    return torch.cos(angle).mul_(radius), torch.sin(angle).mul_(radius)


@contextmanager
def global_stream(seed: int, purpose: str, *indices: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them after, for code that takes no generator.

    Restored are the CPU's generator and that of `device`.
    """
    own = torch.device(device)
    with torch.random.fork_rng(devices=[own] if own.type == "cuda" else []):
        # torch.manual_seed formats the call stack for missing devices, which takes a millisecond.
        number = stream_seed(seed, purpose, *indices)
        torch.default_generator.manual_seed(number)
        if own.type == "cuda":
            with torch.cuda.device(own):
                torch.cuda.manual_seed(number)
        yield
