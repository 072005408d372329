"""Random streams. Every stream is named by (seed, purpose, indices), so results do not depend on how work is spread.

Nothing in the package touches torch's global generator: a stream for chain 3 at iteration 17 is the same stream whichever
process draws it, and a resumed run needs no stored generator state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from credibly.errors import InputError


def check_seed(seed: int) -> int:
    """A seed is a plain non-negative integer below 2**63."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError("seed", f"found {seed!r}", "Pass an integer from 0 up, such as seed=0")
    return seed


def stream_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for one stream; different names give unrelated streams."""
    name = f"{seed}/{purpose}/{'/'.join(str(i) for i in indices)}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, *indices: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator at the start of the stream named by (seed, purpose, indices)."""
    return torch.Generator(device).manual_seed(stream_seed(seed, purpose, *indices))


@contextmanager
def global_stream(seed: int, purpose: str, *indices: int) -> Iterator[None]:
    """Seeds torch's global CPU generator inside the block and puts it back after: for code that takes no generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, purpose, *indices))
        yield
