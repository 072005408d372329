"""Random numbers of many chains, each from streams named by (seed, purpose, chain, block of iterations).

A chain's numbers do not depend on which other chains run beside it or where, and a resumed run needs no generator's state.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credibly.rng import MANY, stream, stream_seed

BLOCK_VALUES = (
    2**16
)  # numbers of one chain that come from one stream: seeding a stream costs as much as a thousand of them


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

    def holds(self, iteration: int, count: int) -> bool:
        """Whether so many iterations from this one on come from one block."""
        return iteration % self.length + count <= self.length

    def span(self, iteration: int, count: int) -> Tensor:
        """The numbers of iterations that one block holds, (C, count, D): a view."""
        self.at(iteration)
        place = iteration % self.length
        return self.values[:, place : place + count]


class ChainBits:
    """The same as bits, of which `credibly.rng.normal` makes the numbers inside a compiled step: for many numbers a chain.

    torch draws normal numbers in one thread, which for a large network takes as long as the rest of a minibatch step.
    """

    def __init__(self, seed: int, purpose: str, chains: range, dim: int) -> None:
        self.seed, self.purpose, self.chains = seed, purpose, chains
        self.pairs = -(-dim // 2)

    def at(self, iteration: int) -> Tensor:
        """Bits of one iteration, (C, 1, 2, pairs)."""
        raw = [
            np.random.SFC64(stream_seed(self.seed, self.purpose, chain, iteration)).random_raw(self.pairs)
            for chain in self.chains
        ]
        return torch.from_numpy(np.stack(raw).view(np.int32)).reshape(len(raw), 1, 2, self.pairs)


def diffusion(
    seed: int, purpose: str, chains: range, dim: int, *, device: torch.device, dtype: torch.dtype
) -> ChainNoise | ChainBits:
    """Bits where that is faster, numbers elsewhere."""
    if device.type == "cpu" and dtype == torch.float32 and dim >= MANY:
        return ChainBits(seed, purpose, chains, dim)
    return ChainNoise(seed, purpose, chains, dim, device=device, dtype=dtype)
