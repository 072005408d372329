"""Random numbers of many chains, each from streams named by (seed, purpose, chain, block of iterations).

A chain's numbers do not depend on which other chains run beside it or where, and a resumed run needs no generator's state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.rng import stream

BLOCK_VALUES = 2**16  # numbers of one chain that come from one stream: seeding a stream costs as much as a thousand of them


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
