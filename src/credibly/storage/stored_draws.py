"""Draws kept on disk: (chain, draw, D) in shards along the draws, whose slices are read on demand.

A shard is one file, `draws-00003.safetensors`, or several that each hold some of the chains, as written by the
processes of a run: `draws-00003-c00000.safetensors`, `draws-00003-c00004.safetensors`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from credibly.errors import StoreError


class StoredDraws:
    """Shards `draws/00000`, ... of a run folder, each (chain, some draws, D), as one array of draws.

    Args:
        folder: the run folder.
        files: the shards in order.
        dtype, device: of the tensors that are returned.
        tail: draws after those in the shards, (chain, draw, D), held by the state of a run that has not ended.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        files: list[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        tail: Tensor | None = None,
    ) -> None:
        # Absolute, since the program may change its working directory.
        self.name, self.folder = os.fspath(folder), Path(folder).absolute()
        self.files, self.dtype, self.device, self.tail = list(files), dtype, device, tail
        self.shards = [[f for f in sorted(self.files) if _number(f) == n] for n in shard_numbers(self.files)]
        # For each shard, the first chain of each of its files, and the number of chains.
        self.chain_offsets: list[list[int]] = []
        shapes = []
        for shard in self.shards:
            found = []
            for file in shard:
                with self._open(file) as stored:
                    found.append(tuple(stored.get_shape()))
            if len({s[1:] for s in found}) != 1:
                raise StoreError(f"the files of a shard in {self.name!r} have incompatible shapes {found}")
            self.chain_offsets.append([0, *itertools.accumulate(s[0] for s in found)])
            shapes.append((self.chain_offsets[-1][-1], *found[0][1:]))
        if tail is not None:
            shapes.append(tuple(tail.shape))
        if any(len(s) != 3 or (s[0], s[2]) != (shapes[0][0], shapes[0][2]) for s in shapes):
            raise StoreError(f"the shards of draws in {self.name!r} have incompatible shapes {sorted(set(shapes))}")
        self.counts = [count for _, count, _ in shapes]
        self.shape = torch.Size((shapes[0][0], sum(self.counts), shapes[0][2]) if shapes else (0, 0, 0))

    def tensor(self) -> Tensor:
        """Return all draws in memory, (chain, draw, D)."""
        return self.columns(0, self.shape[2])

    def columns(self, start: int, stop: int) -> Tensor:
        """Return coordinates start to stop of every draw, (chain, draw, stop - start)."""
        whole = torch.empty(*self.shape[:2], stop - start, dtype=self.dtype, device=self.device)
        first = 0
        for number, count in enumerate(self.counts):
            whole[:, first : first + count] = self._part(number, slice(None), slice(None), slice(start, stop))
            first += count
        return whole

    def rows(self, start: int, stop: int) -> Tensor:
        """Return draws start to stop in chain order (all of chain 0, then all of chain 1, ...), (stop - start, D)."""
        _, draws, dim = self.shape
        whole = torch.empty(stop - start, dim, dtype=self.dtype, device=self.device)
        for chain in range(start // draws, (stop - 1) // draws + 1):
            offset = chain * draws
            for number, count in enumerate(self.counts):
                first, last = max(start, offset), min(stop, offset + count)
                if first < last:
                    some = slice(first - offset, last - offset)
                    part = self._part(number, slice(chain, chain + 1), some, slice(None))
                    whole[first - start : last - start] = part[0]
                offset += count
        return whole

    def pick(self, indices: Tensor) -> Tensor:
        """Return draws by their index in chain order, (len(indices), D)."""
        _, draws, dim = self.shape
        whole = torch.empty(len(indices), dim, dtype=self.dtype, device=self.device)
        chain, draw = indices.cpu() // draws, indices.cpu() % draws
        first = 0
        for number, count in enumerate(self.counts):
            here = ((draw >= first) & (draw < first + count)).nonzero().squeeze(1)
            if len(here):
                part = self._part(number, slice(None), slice(None), slice(None))
                whole[here.to(whole.device)] = part[chain[here], draw[here] - first].to(whole)
            first += count
        return whole

    @property
    def bytes(self) -> int:
        """The size of all draws in memory."""
        return int(self.shape.numel()) * self.dtype.itemsize

    def _part(self, number: int, chains: slice, draws: slice, columns: slice) -> Tensor:
        if number == len(self.shards):
            assert self.tail is not None
            return self.tail[chains, draws, columns].to(self.device)
        first, last, _ = chains.indices(self.shape[0])
        found, offsets = [], self.chain_offsets[number]
        for file, start, stop in zip(self.shards[number], offsets, offsets[1:]):
            if max(first, start) < min(last, stop):
                with self._open(file) as stored:
                    found.append(stored[max(first, start) - start : min(last, stop) - start, draws, columns])
        return (found[0] if len(found) == 1 else torch.cat(found)).to(self.device)

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        """Open a file of a shard, for reading slices."""
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                yield opened.get_slice(f"draws/{file.removeprefix('draws-').removesuffix('.safetensors')}")
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{file} in {self.name!r} is missing or was changed ({error})") from error


def _number(file: str) -> int:
    return int(file.removeprefix("draws-")[:5])


def shard_numbers(files: Iterable[str]) -> list[int]:
    """Return the numbers of the shards among a folder's files."""
    return sorted({_number(f) for f in files if f.startswith("draws-")})


def join_shards(parts: dict[str, Tensor]) -> Tensor:
    """Join shards, named `00003` or with their first chain `00003-c00004`, into one tensor (chain, draw, ...)."""
    numbers = sorted({name[:5] for name in parts})
    whole = [torch.cat([parts[k] for k in sorted(parts) if k[:5] == n], 0) for n in numbers]
    return whole[0] if len(whole) == 1 else torch.cat(whole, 1)
