"""A run folder while it is being written: shards, the state to go on from, and the manifest that makes them count.

A checkpoint writes new files first and then replaces the manifest, which is the moment it takes effect. A process that dies
at any point leaves a manifest whose files are all whole; what it had begun beside them is thrown away by the next one. The
lock belongs to the operating system and goes with the process that holds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from credibly.errors import StoreError

LOCK = "lock"


class RunFolder:
    """A folder that this process alone may write to.

    `manifest` is what the next `commit` writes; it keeps the list of files with their sizes and checksums.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
        self.path = Path(path)
        self.manifest = manifest
        self._lock = _take_lock(self.path)

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], manifest: dict[str, Any], files: dict[str, dict[str, Tensor]]
    ) -> Self:
        """A new folder with its first files, made under another name and renamed."""
        target = Path(path)
        if target.exists():
            raise StoreError(
                f"out: {os.fspath(path)!r} exists already. Go on with it by `credibly resume`, or choose another folder"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}.part")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            manifest = {**manifest, "files": {}}
            for name, tensors in files.items():
                manifest["files"][name] = _write_tensors(draft / name, tensors)
            _write_manifest(draft, manifest)
            os.replace(draft, target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return cls(target, manifest)

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """One file; it counts from the next commit on."""
        self.manifest["files"][name] = _write_tensors(self.path / name, tensors)

    def drop(self, name: str) -> None:
        """Takes a file off the list; `commit` removes it."""
        self.manifest["files"].pop(name, None)

    def commit(self, **fields: Any) -> None:
        """Replaces the manifest and removes files that it does not list."""
        self.manifest.update(fields)
        _write_manifest(self.path, self.manifest)
        self.sweep()

    def sweep(self) -> None:
        """Removes what a dead process left half-written."""
        for place in self.path.iterdir():
            ours = place.name.endswith((".safetensors", ".part"))
            if ours and place.name not in self.manifest["files"]:
                place.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the lock back."""
        self._lock.close()
        (self.path / LOCK).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take_lock(path: Path) -> Any:
    handle = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  (held as long as the run)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        inode = os.fstat(handle.fileno()).st_ino
        if not (path / LOCK).exists() or (path / LOCK).stat().st_ino != inode:  # its holder let go while we waited
            handle.close()
            return _take_lock(path)
    except ImportError:  # pragma: no cover  (no such call on this platform: the run goes unlocked)
        return handle
    except OSError:
        handle.seek(0)
        holder = handle.read().strip()
        handle.close()
        raise StoreError(
            f"path: {os.fspath(path)!r} is in use by another process{f' ({holder})' if holder else ''}. Wait until it ends, or stop it"
        ) from None
    handle.seek(0)
    handle.truncate()
    handle.write(f"process {os.getpid()}")
    handle.flush()
    return handle


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    draft = path.with_name(path.name + ".part")
    # Clones, since tied buffers or slices of one storage are refused by the format.
    save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, draft)
    with open(draft, "rb+") as handle:
        os.fsync(handle.fileno())
        facts = {"bytes": draft.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}
    os.replace(draft, path)
    return facts


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    draft = folder / "manifest.json.part"
    with open(draft, "w", encoding="utf-8") as handle:
        handle.write(json.dumps(manifest, indent=1, allow_nan=True) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(draft, folder / "manifest.json")
    if hasattr(os, "O_DIRECTORY"):
        entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
