"""Where draws go as they come: into memory, or into a run folder in shards, with the state to go on from.

Memory does not grow with the number of draws in a folder: a block of them is held, written out when it is full, and used
again. Every few seconds the state of the sampler and the block as it stands are written with a new manifest; a run that is
killed goes on from there, and draws again what came after.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from credibly.distributed.world import Mesh
from credibly.storage.run_folder import RESUME_FILES, RunFolder, state_files
from credibly.storage.stored_draws import StoredDraws, join_shards, shard_numbers

SHARD_BYTES = 2**24
EVERY_SECONDS = 10.0  # between two checkpoints
SHARE = 0.01  # of the time that they may take: where a disk is slow there are fewer of them


class Resumable(Protocol):
    """What can be written down and taken up again."""

    def tensors(self) -> dict[str, Tensor]:
        """All that the next iteration depends on."""

    def report(self) -> dict[str, Any]:
        """How far each chain is, in plain JSON values."""

    def chain_axis(self, name: str) -> int | None:
        """The axis of a tensor of the state along which the chains lie; None where it is of all of them."""


class Recorder:
    """Draws (chain, draw, D) and what was noted of each, in memory: of the chains that this process has.

    Attributes:
        kept: draws of each chain so far.
        filled: those of them that are in the block.
        before: seconds that the run had taken before this process went on with it.
    """

    def __init__(
        self, chains: int, draws: int, dim: int, names: tuple[str, ...], mesh: Mesh, *, dtype: torch.dtype, device: torch.device,
        block: int | None = None,
    ) -> None:  # fmt: skip
        self.mesh, self.chains, self.own = mesh, chains, mesh.chains(chains)
        self.total, self.names, self.kept = draws, names, 0
        self.block = min(draws, block or draws)
        self.draws = torch.zeros(len(self.own), self.block, dim, dtype=dtype, device=device)
        self.noted = torch.zeros(len(self.own), self.block, len(names), dtype=torch.float64, device=device)
        self.filled = 0
        self.before = 0.0

    def add(self, theta: Tensor, noted: dict[str, Tensor]) -> None:
        """Keeps a draw (C, D) of every chain."""
        self.draws[:, self.filled] = theta
        self.noted[:, self.filled] = torch.stack([noted[name].double() for name in self.names], -1)
        self.filled += 1
        self.kept += 1
        if self.filled == self.block:
            self.spill()

    def spill(self) -> None:
        """Called when the block is full: in memory the block is all there is."""

    def checkpoint(self, process: Resumable, *, force: bool = False, status: str = "running") -> None:
        """Makes what there is safe; in memory there is nothing to do."""

    def result(self) -> tuple[Tensor | StoredDraws, dict[str, Tensor]]:
        """The draws so far of all chains, and what was noted of each by name."""
        noted = self.mesh.all_chains(self.noted[:, : self.filled], self.chains).cpu()
        draws = self.mesh.all_chains(self.draws[:, : self.filled], self.chains)
        return draws, {name: noted[..., i].clone() for i, name in enumerate(self.names)}


class FolderRecorder(Recorder):
    """The same in a run folder, which also keeps the state of the sampler."""

    def __init__(
        self, folder: RunFolder, chains: int, draws: int, dim: int, names: tuple[str, ...], mesh: Mesh, *, dtype: torch.dtype,
        device: torch.device, layout_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        a_draw = chains * (
            dim * dtype.itemsize + len(names) * torch.float64.itemsize
        )  # of all, however they are spread
        super().__init__(
            chains, draws, dim, names, mesh, dtype=dtype, device=device, block=max(1, SHARD_BYTES // a_draw)
        )
        self.folder, self.layout_dtype = folder, layout_dtype
        self.shards = len(shard_numbers(folder.manifest["files"]))
        self.unlisted: dict[str, Any] = {}  # files that this process has written since the last commit
        self.states = 0
        self.began = self.saved = time.monotonic()
        self.pause = EVERY_SECONDS

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Takes up the block as the last checkpoint wrote it; shards keep the length that the run was begun with."""
        if int(tensors["recorder.block"]) != self.block:
            self.block = int(tensors["recorder.block"])
            self.draws = self.draws.new_zeros(len(self.draws), self.block, self.draws.shape[2])
            self.noted = self.noted.new_zeros(len(self.noted), self.block, self.noted.shape[2])
        self.kept, self.filled = int(tensors["recorder.kept"]), int(tensors["recorder.filled"])
        self.states, self.before = int(tensors["recorder.states"]), float(tensors["recorder.seconds"])
        if self.filled:
            self.draws[:, : self.filled] = tensors["recorder.draws"].to(self.draws)
            self.noted[:, : self.filled] = tensors["recorder.noted"].to(self.noted)

    def spill(self) -> None:
        """Writes the block as a shard, which counts from the next checkpoint on."""
        number = f"{self.shards:05d}{self._piece}"
        noted = self.noted[:, : self.filled].cpu()
        self._write(f"draws-{number}.safetensors", {f"draws/{number}": self.draws[:, : self.filled]})
        self._write(
            f"stats-{number}.safetensors",
            {f"stat.{name}/{number}": noted[..., i] for i, name in enumerate(self.names)},
        )
        self.shards += 1
        self.filled = 0

    def checkpoint(self, process: Resumable, *, force: bool = False, status: str = "running") -> None:
        """State, block and manifest, where the last ones are some seconds old. Several processes come here together."""
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
            state["recorder.noted"] = self.noted[:, : self.filled]
        state |= {f"process.{k}": v for k, v in process.tensors().items()}
        old = state_files(self.folder.manifest)
        self._write(f"state-{self.states:05d}{self._piece}.safetensors", state)
        first = f"state-{self.states:05d}{self._first_piece}.safetensors"
        self._commit(process, drop=old, state=first, status=status)
        self.states += 1
        self.saved = time.monotonic()
        self.pause = max(EVERY_SECONDS, (self.saved - now) / SHARE)

    def finish(self, record: dict[str, Any], process: Resumable) -> None:
        """The last shard and the final manifest, without a state."""
        if self.filled:
            self.spill()
        beside = [n for n in self.folder.manifest["files"] if n.startswith(RESUME_FILES)]
        self.folder.manifest.pop("state", None)
        self._commit(process, drop=beside, status=record["status"], record=record)

    @property
    def _piece(self) -> str:
        """What tells a process's files apart from those of the others: the number of its first chain."""
        return f"-c{self.own.start:05d}" if self.mesh.shape[0] > 1 else ""

    @property
    def _first_piece(self) -> str:
        return "-c00000" if self.mesh.shape[0] > 1 else ""

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self.mesh.writes:
            self.folder.write(name, tensors)
            self.unlisted[name] = self.folder.manifest["files"][name]

    def _commit(self, process: Resumable, *, drop: list[str], **fields: Any) -> None:
        """One manifest for the files of all processes, written by one of them; the others go on when it is there."""
        report = process.report()
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
        """The draws as they lie in the folder."""
        from safetensors.torch import load_file

        files = self.folder.manifest["files"]
        names = sorted(n for n in files if n.startswith("draws-"))
        noted: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for name in sorted(n for n in files if n.startswith("stats-")):
            for key, values in load_file(self.folder.path / name).items():
                group, number = key.split("/")
                noted[group.removeprefix("stat.")][number] = values
        statistics = {name: join_shards(parts) for name, parts in noted.items() if parts}
        return StoredDraws(self.folder.path, names, dtype=self.layout_dtype, device=self.draws.device), statistics
