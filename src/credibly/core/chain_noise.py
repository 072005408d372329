"""Random numbers of many chains, from streams keyed by (seed, purpose, chain, block of iterations).

The numbers of a chain do not depend on the other chains or on where they run. A resumed run needs no generator state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credibly.core.rng import CHUNK, fill_normal, keys_from, stream, stream_keys

# How many numbers of a chain come from one stream: seeding it costs as much as a thousand of them.
BLOCK_VALUES = 2**16
# Numbers of a large chain that are generated at a time where that suffices: 4 MiB, a multiple of CHUNK.
LARGE_CHUNK = 2**20

Fill = Callable[[Tensor, tuple[int, int]], None]


class ChainNoise:
    """Standard normal or uniform numbers (C, D) for every iteration.

    Args:
        seed, purpose: key of the streams.
        chains: indices of the chains.
        dim: numbers per chain and iteration.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        chains: range,
        dim: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        uniform: bool = False,
    ) -> None:
        self.seed, self.purpose, self.chains, self.uniform = seed, purpose, chains, uniform
        # Depends only on the dimension, so that the streams do not depend on how chains are distributed.
        self.length = max(1, min(256, BLOCK_VALUES // max(1, dim)))
        self.values = torch.empty(len(chains), self.length, dim, device=device, dtype=dtype)
        self.block = -1

    def at(self, iteration: int) -> Tensor:
        """Return the numbers of one iteration, (C, D): a view that is valid until the next block."""
        block, position = divmod(iteration, self.length)
        if block != self.block:
            for row, chain in zip(self.values, self.chains):
                generator = stream(self.seed, self.purpose, chain, block, device=self.values.device)
                row.uniform_(generator=generator) if self.uniform else row.normal_(generator=generator)
            self.block = block
        return self.values[:, position]

    def of(self, index: int, iteration: int) -> Tensor:
        """Return the numbers of one iteration for the chain at `index`, (1, D)."""
        return self.at(iteration)[index : index + 1]

    def chunks(self, index: int, iteration: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the numbers of `of` in chunks, each with its slice of the chain; here a single chunk."""
        yield slice(None), self.of(index, iteration)

    def holds(self, iteration: int, count: int) -> bool:
        """Return whether `count` iterations from this one on come from one block."""
        return count <= self.left(iteration)

    def left(self, iteration: int) -> int:
        """Return how many iterations from this one on come from one block."""
        return self.length - iteration % self.length

    def span(self, iteration: int, count: int) -> Tensor:
        """Return the numbers of `count` iterations of one block, (C, count, D): a view."""
        self.at(iteration)
        position = iteration % self.length
        return self.values[:, position : position + count]


class LargeNoise:
    """Standard normal numbers for chains of many weights: of all chains, or of one at a time (`one_by_one`).

    torch draws normal numbers in one thread, which for a large network takes as long as the products of a minibatch
    step. Here each number is a function of the stream's keys and of its position, so the C++ backend can generate them
    in all threads, or inside a step from the keys alone. Without it, numpy generates the same words.

    Args:
        seed, purpose, chains, dim: as in `ChainNoise`.
        one_by_one: whether chains are requested one at a time.
        fill: fills a tensor with the numbers of two keys.
    """

    def __init__(
        self, seed: int, purpose: str, chains: range, dim: int, *, one_by_one: bool, fill: Fill = fill_normal
    ) -> None:
        self.seed, self.purpose, self.chains, self.dim = seed, purpose, chains, dim
        self.rows, self.padded = 1 if one_by_one else len(chains), -(-dim // CHUNK) * CHUNK
        self.fill = fill

    @functools.cached_property
    def values(self) -> Tensor:
        """Memory for all numbers of an iteration."""
        return torch.empty(self.rows, self.padded)

    @functools.cached_property
    def chunk(self) -> Tensor:
        """Memory for a chunk of the numbers of one chain."""
        return torch.empty(1, min(LARGE_CHUNK, self.padded))

    def at(self, iteration: int) -> Tensor:
        """Return the numbers of one iteration, (C, D): a view that is valid until the next call."""
        for row, chain in zip(self.values, self.chains):
            self.fill(row, self._keys(chain, iteration))
        return self.values[:, : self.dim]

    def of(self, index: int, iteration: int) -> Tensor:
        """Return the numbers of one iteration for the chain at `index`, (1, D).

        A view that is valid until the next call.
        """
        self.fill(self.values[0], self._keys(self.chains[index], iteration))
        return self.values[:1, : self.dim]

    def chunks(self, index: int, iteration: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the numbers of `of` in chunks, each with its slice of the chain: views valid until the next one."""
        keys = self._keys(self.chains[index], iteration)
        for start in range(0, self.dim, LARGE_CHUNK):
            stop = min(start + LARGE_CHUNK, self.dim)
            padded = -(-(stop - start) // CHUNK) * CHUNK
            self.fill(self.chunk[0, :padded], keys_from(keys, start))
            yield slice(start, stop), self.chunk[:, : stop - start]

    def keys(self, iteration: int, count: int) -> Any:
        """Return the keys of `count` iterations from this one on, an array (count, C, 2)."""
        keys = [[self._keys(chain, t) for chain in self.chains] for t in range(iteration, iteration + count)]
        return np.array(keys, dtype=np.uint64)

    def _keys(self, chain: int, iteration: int) -> tuple[int, int]:
        return stream_keys(self.seed, self.purpose, chain, iteration)
