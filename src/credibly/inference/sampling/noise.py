"""Random numbers of many chains, each from streams named by (seed, purpose, chain, block of iterations).

A chain's numbers do not depend on which other chains run beside it or where, and a resumed run needs no generator's state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.backends.cpp import wide
from credibly.backends.cpp.library import library
from credibly.core.compilation import Compile
from credibly.core.rng import CHUNK, MANY, fill_normal, stream, stream_keys

BLOCK_VALUES = (
    2**16
)  # numbers of one chain that come from one stream: seeding a stream costs as much as a thousand of them
SOME = 2**11  # weights from which on steps that make their own noise are ahead of those that take it from memory


class ChainNoise:
    """Standard normal (C, D) or uniform numbers for every iteration.

    Args:
        seed, purpose: name of the streams.
        chains: numbers of the chains.
        dim: numbers a chain needs in an iteration.
    """

    def __init__(
        self, seed: int, purpose: str, chains: range, dim: int, *, device: torch.device, dtype: torch.dtype, uniform: bool = False
    ) -> None:  # fmt: skip
        self.seed, self.purpose, self.chains, self.uniform = seed, purpose, chains, uniform
        # By the dimension alone, so that the streams do not depend on how chains are spread.
        self.length = max(1, min(256, BLOCK_VALUES // max(1, dim)))
        self.values = torch.empty(len(chains), self.length, dim, device=device, dtype=dtype)
        self.block = -1

    def at(self, iteration: int) -> Tensor:
        """The numbers of one iteration, (C, D): a view that holds until the next block."""
        block, place = divmod(iteration, self.length)
        if block != self.block:
            for row, chain in zip(self.values, self.chains):
                generator = stream(self.seed, self.purpose, chain, block, device=self.values.device)
                row.uniform_(generator=generator) if self.uniform else row.normal_(generator=generator)
            self.block = block
        return self.values[:, place]

    def of(self, place: int, iteration: int) -> Tensor:
        """The numbers of one iteration for the chain in that place, (1, D)."""
        return self.at(iteration)[place : place + 1]

    def holds(self, iteration: int, count: int) -> bool:
        """Whether so many iterations from this one on come from one block."""
        return count <= self.left(iteration)

    def left(self, iteration: int) -> int:
        """Iterations from this one on that come from one block."""
        return self.length - iteration % self.length

    def span(self, iteration: int, count: int) -> Tensor:
        """The numbers of iterations that one block holds, (C, count, D): a view."""
        self.at(iteration)
        place = iteration % self.length
        return self.values[:, place : place + count]


class LargeNoise:
    """The same where a chain needs many numbers: of all chains, or of one at a time (`apart`), which stay in the caches.

    torch draws normal numbers in one thread, which for a large network takes as long as the products of a minibatch step. Here
    each number is a function of the stream's keys and of its place: compiled code makes them in all threads, or where it
    needs them, given the keys alone. Without compiled code the same words are made by numpy.
    """

    def __init__(self, seed: int, purpose: str, chains: range, dim: int, *, apart: bool, compile: Compile) -> None:
        self.seed, self.purpose, self.chains, self.dim = seed, purpose, chains, dim
        self.values = torch.empty(1 if apart else len(chains), -(-dim // CHUNK) * CHUNK)
        self.fill = wide.fill_normal if compile is not False and library() is not None else fill_normal

    def at(self, iteration: int) -> Tensor:
        """The numbers of one iteration, (C, D): a view that holds until the next call."""
        for row, chain in zip(self.values, self.chains):
            self.fill(row, self._keys(chain, iteration))
        return self.values[:, : self.dim]

    def of(self, place: int, iteration: int) -> Tensor:
        """The numbers of one iteration for the chain in that place, (1, D): a view that holds until the next call."""
        self.fill(self.values[0], self._keys(self.chains[place], iteration))
        return self.values[:1, : self.dim]

    def keys(self, iteration: int, count: int) -> Any:
        """Of so many iterations from this one on, an array (count, C, 2)."""
        every = [[self._keys(chain, t) for chain in self.chains] for t in range(iteration, iteration + count)]
        return np.array(every, dtype=np.uint64)

    def _keys(self, chain: int, iteration: int) -> tuple[int, int]:
        return stream_keys(self.seed, self.purpose, chain, iteration)


def diffusion(
    seed: int, purpose: str, chains: range, dim: int, *, device: torch.device, dtype: torch.dtype, apart: bool, compile: Compile,
    inside: bool,
) -> ChainNoise | LargeNoise:  # fmt: skip
    """By places where that is faster, from torch's own numbers elsewhere; `inside` is whether compiled steps may make them."""
    if device.type == "cpu" and dtype == torch.float32 and dim >= (min(SOME, MANY) if inside else MANY):
        return LargeNoise(seed, purpose, chains, dim, apart=apart, compile=compile)
    return ChainNoise(seed, purpose, chains, dim, device=device, dtype=dtype)
