"""Draws that stay on the disk: (chain, draw, D) in shards along the draws, read in the pieces that are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


class StoredDraws:
    """Shards `name/00000`, ... of a run folder, each (chain, some draws, D), as one array of draws.

    Args:
        folder: the run folder.
        files: the shards in order.
        dtype, device: what the pieces are given back as.
        tail: draws after those in the shards, (chain, draw, D): what a run that has not ended holds beside them.
    """

    def __init__(
        self, folder: str | os.PathLike[str], files: list[str], *, dtype: torch.dtype, device: torch.device, tail: Tensor | None = None
    ) -> None:  # fmt: skip
        self.folder, self.files, self.dtype, self.device, self.tail = Path(folder), list(files), dtype, device, tail
        self.counts: list[int] = []
        chains = dim = 0
        for number in range(len(self.files)):
            with self._open(number) as shard:
                chains, count, dim = shard.get_slice(self._key(number)).get_shape()
            self.counts.append(count)
        if tail is not None:
            chains, count, dim = tail.shape
            self.counts.append(count)
        self.shape = torch.Size((chains, sum(self.counts), dim))

    def tensor(self) -> Tensor:
        """All of it, (chain, draw, D), in memory."""
        return self.columns(0, self.shape[2])

    def columns(self, start: int, stop: int) -> Tensor:
        """Some coordinates of every draw, (chain, draw, stop - start)."""
        whole = torch.empty(*self.shape[:2], stop - start, dtype=self.dtype, device=self.device)
        place = 0
        for number, count in enumerate(self.counts):
            whole[:, place : place + count] = self._part(number, slice(None), slice(None), slice(start, stop))
            place += count
        return whole

    def rows(self, start: int, stop: int) -> Tensor:
        """Draws start to stop in the order of the chains (all of chain 0, then all of chain 1, ...), (stop - start, D)."""
        _, draws, dim = self.shape
        whole = torch.empty(stop - start, dim, dtype=self.dtype, device=self.device)
        for chain in range(start // draws, (stop - 1) // draws + 1):
            place = chain * draws
            for number, count in enumerate(self.counts):
                first, last = max(start, place), min(stop, place + count)
                if first < last:
                    some = slice(first - place, last - place)
                    whole[first - start : last - start] = self._part(number, slice(chain, chain + 1), some, slice(None))[0]
                place += count
        return whole

    def pick(self, indices: Tensor) -> Tensor:
        """Draws by their place in that order, (len(indices), D)."""
        _, draws, dim = self.shape
        whole = torch.empty(len(indices), dim, dtype=self.dtype, device=self.device)
        chain, draw = indices.cpu() // draws, indices.cpu() % draws
        place = 0
        for number, count in enumerate(self.counts):
            here = ((draw >= place) & (draw < place + count)).nonzero().squeeze(1)
            if len(here):
                piece = self._part(number, slice(None), slice(None), slice(None))
                whole[here.to(whole.device)] = piece[chain[here], draw[here] - place].to(whole)
            place += count
        return whole

    @property
    def bytes(self) -> int:
        """What all of it takes in memory."""
        return int(self.shape.numel()) * self.dtype.itemsize

    def _part(self, number: int, chains: slice, draws: slice, columns: slice) -> Tensor:
        if number == len(self.files):
            assert self.tail is not None
            return self.tail[chains, draws, columns].to(self.device)
        with self._open(number) as shard:
            piece: Tensor = shard.get_slice(self._key(number))[chains, draws, columns]
        return piece.to(self.device)

    def _key(self, number: int) -> str:
        return f"draws/{number:05d}"

    def _open(self, number: int) -> safe_open:
        return safe_open(self.folder / self.files[number], framework="pt")
