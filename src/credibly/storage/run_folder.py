"""A run folder while it is being written: shards, the state to resume from, and the manifest that makes them valid.

A checkpoint writes new files first and then replaces the manifest, which is the moment it takes effect. A file that a
manifest lists is never written to again. So a process that dies at any point leaves a manifest whose files are all
complete, and a concurrent reader sees one checkpoint or the next. Files that a dead process left unfinished are removed
on resume. The lock belongs to the operating system and vanishes with the process that holds it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from credibly.core.files import file_problem, fsync_folder, write_bytes
from credibly.errors import StoreError
from credibly.storage.replacing import LOCK, recover, remove_leftovers

log = logging.getLogger("credibly")
MANIFEST = "manifest.json"
# Prefixes of files that are needed to resume a run, and removed when it is complete.
RESUME_FILES = ("state-", "stage-", "data.", "initial.", "start.", "mass.")
# The files of a run and their drafts. Nothing else in a folder is ever removed.
OWN_FILES = re.compile(
    r"((draws|stats|state|stage)-\d+(-c\d+)?|data|initial|start|mass|fixed)\.safetensors(\.part)?|"
    + re.escape(MANIFEST)
    + r"\.part"
)


class RunFolder:
    """A folder that only this process, or the processes of this run, may write to.

    `manifest` is what the next `commit` writes; it lists the files with their sizes and checksums. Of several processes
    one holds the lock and commits. The others write their own files, which the first one lists.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: dict[str, Any], *, lock: bool = True) -> None:
        self.name = os.fspath(path)
        self.path = Path(path).absolute()  # the program may change its working directory
        self.manifest = manifest
        self._lock = _acquire_lock(self.path, self.name) if lock else None

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], manifest: dict[str, Any], files: dict[str, dict[str, Tensor]]
    ) -> Self:
        """Create a folder with its first files: written and locked under a temporary name, then renamed."""
        name, target = os.fspath(path), Path(path).absolute()
        recover(target)
        if target.exists():
            raise _exists_error(name)
        manifest = {**manifest, "files": {}}
        draft, made = target.with_name(f".{target.name}.{os.getpid()}.part"), None
        with _as_store_error(f"out: cannot write {name!r} ({{}}). Choose another folder, or free some space"):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                made = cls(draft, manifest)
                for file, tensors in files.items():
                    manifest["files"][file] = write_tensors(draft / file, tensors)
                write_manifest(draft, manifest)
                if target.exists():  # created by another process in the meantime
                    raise _exists_error(name)
                os.replace(draft, target)
                made.name, made.path = name, target
                fsync_folder(target.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                if made is not None:
                    made.close()
                raise
        return made

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write one file. It becomes part of the run with the next commit."""
        with self._resumable():
            self.manifest["files"][name] = write_tensors(self.path / name, tensors)

    def drop(self, name: str) -> None:
        """Remove a file from the list; `commit` deletes it."""
        self.manifest["files"].pop(name, None)

    def commit(self, **fields: Any) -> None:
        """Replace the manifest and delete files that it does not list."""
        self.manifest.update(fields)
        with self._resumable():
            fsync_folder(self.path)  # file names reach the disk before the manifest that lists them
            write_manifest(self.path, self.manifest)
            self.sweep()

    def sweep(self) -> None:
        """Delete the run's own files that the manifest does not list: unfinished, or no longer needed."""
        for file in self.path.iterdir():
            if OWN_FILES.fullmatch(file.name) and file.name not in self.manifest["files"]:
                file.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the folder with everything in it, if this process holds the lock."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is None:
            return
        # Deleted while the lock is held: a process that opened the file before sees that it is no longer the folder's.
        try:
            with suppress(OSError):
                (self.path / LOCK).unlink(missing_ok=True)
        finally:
            self._lock.close()

    @contextmanager
    def _resumable(self) -> Iterator[None]:
        """Turn a failed write into an error that explains how to resume."""
        message = (
            f"cannot write to {self.name!r} ({{}}). The run is intact up to its last checkpoint: "
            f"free some space, then resume it with {resume_command(self.name)}"
        )
        with _as_store_error(message):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def state_files(manifest: dict[str, Any]) -> list[str]:
    """Return the files of the last checkpoint's state, sorted by first chain; none before the first checkpoint."""
    name = manifest.get("state")
    if name is None:
        return []
    return sorted(f for f in manifest["files"] if f.startswith(name[: len("state-00000")]))


def resume_command(name: str) -> str:
    """Return the shell command that resumes the run in a folder."""
    import shlex

    return f"`credibly resume {shlex.quote(name)}`"


def _exists_error(name: str) -> StoreError:
    return StoreError(f"out: {name!r} already exists. Resume it with {resume_command(name)}, or choose another folder")


@contextmanager
def _as_store_error(message: str) -> Iterator[None]:
    """Turn errors of the file system into a StoreError, with the reason in place of {} in the message."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str((error.strerror if isinstance(error, OSError) else None) or error)
        raise StoreError(message.replace("{}", reason)) from error


# -- the lock ----------------------------------------------------------------------------------------------------------
def _acquire_lock(path: Path, name: str) -> IO[bytes]:
    """Lock the folder, or raise at once with the name of the holder.

    Not by `filelock`: its non-blocking acquire reports a lock file that was just deleted by its holder as still held.
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover  (not on this platform: the run is not locked)
        return open(os.devnull, "rb")
    while True:
        if (path / LOCK).exists() and (problem := file_problem(path / LOCK)) is not None:
            raise StoreError(f"cannot lock {name!r} ({LOCK}: {problem}), so the run cannot continue")
        try:
            handle = open(path / LOCK, "ab+", buffering=0)  # noqa: SIM115  (held as long as the run)
        except OSError as error:
            raise StoreError(f"cannot write to {name!r} ({error.strerror}), so the run cannot continue") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().decode(errors="replace").strip() or "another process"
            handle.close()
            raise StoreError(f"{name!r} is in use by {holder}. Wait until it ends, or stop it") from None
        except OSError as error:  # some network file systems have no locks
            log.warning("the run in %s is not locked (%s): make sure that no other process resumes it", name, error)
        if _is_same_file(path / LOCK, handle):
            break
        handle.close()  # its holder deleted it and released the lock between our open and our flock
    with suppress(OSError):  # for the error message of other processes; a full disk must not stop this one
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {platform.node()}".encode())
    return handle


def _is_same_file(path: Path, handle: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


# -- files -------------------------------------------------------------------------------------------------------------
def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write a file under a temporary name and rename it. Return its size and checksum."""
    content = save(dict(zip(tensors, _unshared(list(tensors.values())))))
    draft = path.with_name(path.name + ".part")
    write_bytes(draft, content)
    os.replace(draft, path)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _unshared(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors contiguous on the CPU, no two in one storage, as safetensors requires. Copy only if needed."""
    seen: set[int] = set()
    ready = []
    for tensor in tensors:
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone(memory_format=torch.contiguous_format)
        seen.add(plain.untyped_storage().data_ptr())
        ready.append(plain)
    return ready


def checksum(manifest: dict[str, Any]) -> str:
    """Return the checksum of a manifest's fields."""
    fields = {k: v for k, v in manifest.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the checksum of its fields, and put it in place once it is on the disk."""
    draft = folder / f"{MANIFEST}.part"
    sealed = {**manifest, "checksum": checksum(manifest)}
    write_bytes(draft, (json.dumps(sealed, indent=1) + "\n").encode())
    os.replace(draft, folder / MANIFEST)
    fsync_folder(folder)
