"""Recording draws: in memory, or in shards of a run folder together with the state to resume from.

In a folder, memory does not grow with the number of draws: one block is kept, written when it is full, and reused.
Every few seconds the sampler's state and the current block are written with a new manifest. A run that is killed
resumes from there and repeats what came after.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from credibly.distributed.world import Mesh
from credibly.inference.sampling.sampler import Sampler
from credibly.storage.run_folder import RESUME_FILES, RunFolder, state_files
from credibly.storage.stored_draws import StoredDraws, join_shards, shard_numbers

SHARD_BYTES = 2**24
# Seconds between two checkpoints.
EVERY_SECONDS = 10.0
# Fraction of the time that checkpoints may take: a slow disk gets fewer of them.
FRACTION = 0.01


class Recorder:
    """Draws (chain, draw, D) of this process's chains and the statistics of each, in memory.

    Attributes:
        kept: draws per chain so far.
        filled: how many of them are in the current block.
        before: seconds that the run had taken before this process resumed it.
        rounds: convergence checks so far of a run with `until`, one row per round.
    """

    def __init__(
        self,
        chains: int,
        draws: int,
        dim: int,
        names: tuple[str, ...],
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block: int | None = None,
    ) -> None:
        self.mesh, self.chains, self.own = mesh, chains, mesh.chains(chains)
        self.total, self.names, self.kept = draws, names, 0
        self.block = min(draws, block or draws)
        # Uninitialised, so that no memory is committed before there are draws.
        self.draws = torch.empty(len(self.own), self.block, dim, dtype=dtype, device=device)
        self.statistics = torch.zeros(len(self.own), self.block, len(names), dtype=torch.float64, device=device)
        self.filled = 0
        self.before = 0.0
        self.rounds = torch.zeros(0, 0, dtype=torch.float64)

    def add(self, theta: Tensor, statistics: dict[str, Tensor]) -> None:
        """Add a draw (C, D) of every chain."""
        self.draws[:, self.filled] = theta
        self.statistics[:, self.filled] = torch.stack([statistics[name].double() for name in self.names], -1)
        self.filled += 1
        self.kept += 1
        if self.filled == self.block:
            self.spill()

    def spill(self) -> None:
        """Handle a full block; in memory there is nothing to do, because the block holds all draws."""

    def reserve(self, draws: int) -> None:
        """Make room for the given number of further draws."""
        missing = self.filled + draws - self.block
        if missing > 0:
            self.block += missing
            self.draws = torch.cat([self.draws, self.draws.new_zeros(len(self.own), missing, self.draws.shape[2])], 1)
            more = self.statistics.new_zeros(len(self.own), missing, len(self.names))
            self.statistics = torch.cat([self.statistics, more], 1)

    def discard(self) -> None:
        """Discard all draws: they were warm-up."""
        self.kept = self.filled = 0

    def so_far(self) -> Tensor:
        """Return the draws of this process's chains, (C, draw, D)."""
        return self.draws[:, : self.filled]

    def checkpoint(self, sampler: Sampler, *, force: bool = False, status: str = "running") -> None:
        """Write a checkpoint; in memory there is nothing to do."""

    def result(self) -> tuple[Tensor | StoredDraws, dict[str, Tensor]]:
        """Return the draws of all chains so far, and their statistics by name."""
        values = self.mesh.all_chains(self.statistics[:, : self.filled], self.chains).cpu()
        draws = self.mesh.all_chains(self.draws[:, : self.filled], self.chains)
        return draws, {name: values[..., i].clone() for i, name in enumerate(self.names)}


class FolderRecorder(Recorder):
    """Draws streamed to a run folder, which also keeps the state of the sampler."""

    def __init__(
        self,
        folder: RunFolder,
        chains: int,
        draws: int,
        dim: int,
        names: tuple[str, ...],
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout_dtype: torch.dtype,
    ) -> None:
        # Computed from all chains, so that shards do not depend on the number of processes.
        bytes_per_draw = chains * (dim * dtype.itemsize + len(names) * torch.float64.itemsize)
        super().__init__(
            chains, draws, dim, names, mesh, dtype=dtype, device=device, block=max(1, SHARD_BYTES // bytes_per_draw)
        )
        self.folder, self.layout_dtype = folder, layout_dtype
        # Numbers are not used twice: shards of discarded draws are deleted only by the next commit.
        self.shards = max(shard_numbers(folder.manifest["files"]), default=-1) + 1
        # Files that this process has written since the last commit.
        self.unlisted: dict[str, Any] = {}
        self.states = 0
        self.began = self.saved = time.monotonic()
        self.pause = EVERY_SECONDS

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the block of the last checkpoint; shards keep the length that the run started with."""
        if int(tensors["recorder.block"]) != self.block:
            self.block = int(tensors["recorder.block"])
            self.draws = self.draws.new_zeros(len(self.draws), self.block, self.draws.shape[2])
            self.statistics = self.statistics.new_zeros(len(self.statistics), self.block, self.statistics.shape[2])
        self.kept, self.filled = int(tensors["recorder.kept"]), int(tensors["recorder.filled"])
        self.states, self.before = int(tensors["recorder.states"]), float(tensors["recorder.seconds"])
        self.rounds = tensors.get("recorder.rounds", self.rounds)
        if self.filled:
            self.draws[:, : self.filled] = tensors["recorder.draws"].to(self.draws)
            self.statistics[:, : self.filled] = tensors["recorder.noted"].to(self.statistics)

    def reserve(self, draws: int) -> None:
        """Do nothing: a full block is written and reused."""

    def discard(self) -> None:
        """Discard all draws; the next checkpoint deletes their shards."""
        super().discard()
        for name in [n for n in self.folder.manifest["files"] if n.startswith(("draws-", "stats-"))]:
            self.folder.drop(name)
            self.unlisted.pop(name, None)

    def so_far(self) -> Tensor:
        """Return the draws of this process's chains, those in shards included."""
        names = sorted(n for n in self.folder.manifest["files"] if n.startswith("draws-"))
        block = super().so_far()
        if not names:
            return block
        stored = StoredDraws(self.folder.path, names, dtype=self.layout_dtype, device=self.draws.device).tensor()
        return torch.cat([stored[self.own.start : self.own.stop], block.to(stored)], 1)

    def spill(self) -> None:
        """Write the block as a shard, which becomes part of the run at the next checkpoint."""
        number = f"{self.shards:05d}{self._suffix}"
        values = self.statistics[:, : self.filled].cpu()
        self._write(f"draws-{number}.safetensors", {f"draws/{number}": self.draws[:, : self.filled]})
        self._write(
            f"stats-{number}.safetensors",
            {f"stat.{name}/{number}": values[..., i] for i, name in enumerate(self.names)},
        )
        self.shards += 1
        self.filled = 0

    def checkpoint(self, sampler: Sampler, *, force: bool = False, status: str = "running") -> None:
        """Write state, block and manifest if the last ones are old enough. A collective call of all processes."""
        now = time.monotonic()
        if not force and now - self.saved < self.pause:
            return
        seconds = self.before + now - self.began
        counts = {
            "kept": self.kept,
            "filled": self.filled,
            "block": self.block,
            "states": self.states + 1,
            "seconds": seconds,
        }
        state = {f"recorder.{k}": torch.tensor(float(v), dtype=torch.float64) for k, v in counts.items()}
        if self.filled:
            state["recorder.draws"] = self.draws[:, : self.filled]
            state["recorder.noted"] = self.statistics[:, : self.filled]
        if len(self.rounds):
            state["recorder.rounds"] = self.rounds
        state |= {f"process.{k}": v for k, v in sampler.tensors().items()}
        old = state_files(self.folder.manifest)
        self._write(f"state-{self.states:05d}{self._suffix}.safetensors", state)
        first = f"state-{self.states:05d}{self._first_suffix}.safetensors"
        self._commit(sampler, drop=old, state=first, status=status)
        self.states += 1
        self.saved = time.monotonic()
        self.pause = max(EVERY_SECONDS, (self.saved - now) / FRACTION)

    def finish(self, record: dict[str, Any], sampler: Sampler) -> None:
        """Write the last shard and the final manifest, without a state."""
        if self.filled:
            self.spill()
        beside = [n for n in self.folder.manifest["files"] if n.startswith(RESUME_FILES)]
        self.folder.manifest.pop("state", None)
        self._commit(sampler, drop=beside, status=record["status"], record=record)

    @property
    def _suffix(self) -> str:
        """The suffix of this process's files: the number of its first chain."""
        return f"-c{self.own.start:05d}" if self.mesh.shape[0] > 1 else ""

    @property
    def _first_suffix(self) -> str:
        return "-c00000" if self.mesh.shape[0] > 1 else ""

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self.mesh.writes:
            self.folder.write(name, tensors)
            self.unlisted[name] = self.folder.manifest["files"][name]

    def _commit(self, sampler: Sampler, *, drop: list[str], **fields: Any) -> None:
        """Write one manifest for the files of all processes; the others wait for the leader to finish."""
        report = sampler.report()
        world = self.mesh.world
        for files in world.gather(self.unlisted):
            self.folder.manifest["files"].update(files)
        self.unlisted = {}
        for name in drop:
            self.folder.drop(name)
        if world.leader:
            self.folder.commit(**fields, progress=report)
        else:
            self.folder.manifest.update(fields)
        world.barrier()

    def result(self) -> tuple[Tensor | StoredDraws, dict[str, Tensor]]:
        """Return the draws as they are stored in the folder."""
        from safetensors.torch import load_file

        files = self.folder.manifest["files"]
        names = sorted(n for n in files if n.startswith("draws-"))
        shards: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for name in sorted(n for n in files if n.startswith("stats-")):
            for key, values in load_file(self.folder.path / name).items():
                group, number = key.split("/")
                shards[group.removeprefix("stat.")][number] = values
        statistics = {name: join_shards(parts) for name, parts in shards.items() if parts}
        return StoredDraws(self.folder.path, names, dtype=self.layout_dtype, device=self.draws.device), statistics
