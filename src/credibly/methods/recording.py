"""Where draws go as they come: into memory, or into a run folder in shards, with the state to go on from.

Memory does not grow with the number of draws in a folder: a block of them is held, written out when it is full, and used
again. Between shards, every few seconds, the state of the sampler and the block as it stands are written, so that a run that
is killed goes on from there.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from credibly.run_folder import RunFolder
from credibly.stored_draws import StoredDraws

SHARD_BYTES = 2**24
EVERY_SECONDS = 10.0  # between two checkpoints; they cost milliseconds


class Resumable(Protocol):
    """What can be written down and taken up again."""

    def tensors(self) -> dict[str, Tensor]:
        """All that the next iteration depends on."""

    def report(self) -> dict[str, Any]:
        """How far each chain is, in plain JSON values."""


class Recorder:
    """Draws (chain, draw, D) and what was noted of each, in memory."""

    def __init__(
        self, chains: int, draws: int, dim: int, names: tuple[str, ...], *, dtype: torch.dtype, device: torch.device, block: int | None = None
    ) -> None:  # fmt: skip
        self.total, self.names, self.kept = draws, names, 0
        length = min(draws, block or draws)
        self.draws = torch.zeros(chains, length, dim, dtype=dtype, device=device)
        self.noted = torch.zeros(chains, length, len(names), dtype=torch.float64, device=device)
        self.filled = 0

    def add(self, theta: Tensor, noted: dict[str, Tensor]) -> None:
        """Keeps a draw (C, D) of every chain."""
        self.draws[:, self.filled] = theta
        self.noted[:, self.filled] = torch.stack([noted[name].double() for name in self.names], -1)
        self.filled += 1
        self.kept += 1
        if self.filled == self.draws.shape[1]:
            self.spill()

    def spill(self) -> None:
        """Called when the block is full: in memory the block is all there is."""

    def checkpoint(self, process: Resumable, *, force: bool = False, status: str = "running") -> None:
        """Makes what there is safe; in memory there is nothing to do."""

    def result(self) -> tuple[Tensor | StoredDraws, dict[str, Tensor]]:
        """The draws so far, and what was noted of each by name."""
        noted = self.noted[:, : self.filled].cpu()
        return self.draws[:, : self.filled], {name: noted[..., i].clone() for i, name in enumerate(self.names)}


class FolderRecorder(Recorder):
    """The same in a run folder, which also keeps the state of the sampler."""

    def __init__(
        self, folder: RunFolder, chains: int, draws: int, dim: int, names: tuple[str, ...], *, dtype: torch.dtype, device: torch.device,
        layout_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        block = max(1, SHARD_BYTES // max(1, chains * dim * dtype.itemsize))
        super().__init__(chains, draws, dim, names, dtype=dtype, device=device, block=block)
        self.folder, self.layout_dtype = folder, layout_dtype
        self.shards = sum(1 for name in folder.manifest["files"] if name.startswith("draws-"))
        self.saved = time.monotonic()
        self.states = 0

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Takes up the block as the last checkpoint wrote it."""
        self.kept, self.filled = int(tensors["recorder.kept"]), int(tensors["recorder.filled"])
        self.states = int(tensors["recorder.states"])
        if self.filled:
            self.draws[:, : self.filled] = tensors["recorder.draws"].to(self.draws)
            self.noted[:, : self.filled] = tensors["recorder.noted"].to(self.noted)

    def spill(self) -> None:
        """Writes the block as a shard. It counts with the next checkpoint, which follows at once."""
        number = self.shards
        noted = self.noted[:, : self.filled].cpu()
        self.folder.write(f"draws-{number:05d}.safetensors", {f"draws/{number:05d}": self.draws[:, : self.filled]})
        named = {f"stat.{name}/{number:05d}": noted[..., i] for i, name in enumerate(self.names)}
        self.folder.write(f"stats-{number:05d}.safetensors", named)
        self.shards += 1
        self.filled = 0
        self.saved = -1.0

    def checkpoint(self, process: Resumable, *, force: bool = False, status: str = "running") -> None:
        """State, block and manifest, if the last one is some seconds old or a shard was just written."""
        if not force and time.monotonic() - self.saved < EVERY_SECONDS and self.saved >= 0:
            return
        counts = {"kept": self.kept, "filled": self.filled, "states": self.states + 1}
        state = {f"recorder.{k}": torch.tensor(float(v), dtype=torch.float64) for k, v in counts.items()}
        if self.filled:
            state |= {
                "recorder.draws": self.draws[:, : self.filled],
                "recorder.noted": self.noted[:, : self.filled],
            }
        state |= {f"process.{k}": v for k, v in process.tensors().items()}
        old = self.folder.manifest.get("state")
        name = f"state-{self.states % 2}.safetensors"
        self.folder.write(name, state)
        if old and old != name:
            self.folder.drop(old)
        self.folder.commit(state=name, status=status, progress=process.report())
        self.states += 1
        self.saved = time.monotonic()

    def finish(self, record: dict[str, Any], process: Resumable) -> None:
        """The last shard and the final manifest, without a state."""
        if self.filled:
            self.spill()
        for name in [n for n in self.folder.manifest["files"] if n.startswith(("state-", "data", "initial"))]:
            self.folder.drop(name)
        self.folder.manifest.pop("state", None)
        self.folder.commit(status=record["status"], record=record, progress=process.report())

    def result(self) -> tuple[Tensor | StoredDraws, dict[str, Tensor]]:
        """The draws as they lie in the folder."""
        from safetensors.torch import load_file

        files = self.folder.manifest["files"]
        names = sorted(n for n in files if n.startswith("draws-"))
        noted: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for name in sorted(n for n in files if n.startswith("stats-")):
            for key, values in load_file(self.folder.path / name).items():
                noted[key.split("/")[0].removeprefix("stat.")].append(values)
        statistics = {name: torch.cat(parts, 1) for name, parts in noted.items() if parts}
        return StoredDraws(self.folder.path, names, dtype=self.layout_dtype, device=self.draws.device), statistics
