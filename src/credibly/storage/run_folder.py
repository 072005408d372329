"""A run folder while it is being written: shards, the state to go on from, and the manifest that makes them count.

A checkpoint writes new files first and then replaces the manifest, which is the moment it takes effect. A file that a manifest
lists is never written to again. So a process that dies at any point leaves a manifest whose files are all whole, and a reader
beside a run sees one checkpoint or the next; what a dead process had begun is thrown away by the one that goes on. The lock
belongs to the operating system and goes with the process that holds it.
"""

from __future__ import annotations

import errno
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

from credibly.errors import StoreError

log = logging.getLogger("credibly")
LOCK = "lock"
MANIFEST = "manifest.json"
BESIDE = ("state-", "data.", "initial.", "start.")  # files that a run needs to go on, and that go when it has ended
# The files of a run and their drafts: nothing else in a folder is ever removed.
OURS = re.compile(
    r"((draws|stats|state)-\d+(-c\d+)?|data|initial|start|fixed)\.safetensors(\.part)?|"
    + re.escape(MANIFEST)
    + r"\.part"
)


class RunFolder:
    """A folder that this process alone may write to, or with those that it shares a run with.

    `manifest` is what the next `commit` writes; it keeps the list of files with their sizes and checksums. Of several processes
    one has the lock and commits; the others write files of their own, which it lists.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: dict[str, Any], *, lock: bool = True) -> None:
        self.name = os.fspath(path)
        self.path = Path(path).absolute()  # a program may change its directory while it runs
        self.manifest = manifest
        self._lock = _take_lock(self.path, self.name) if lock else None

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], manifest: dict[str, Any], files: dict[str, dict[str, Tensor]]
    ) -> Self:
        """A new folder with its first files, made and locked under another name and renamed."""
        name, target = os.fspath(path), Path(path).absolute()
        if target.exists():
            raise _taken(name)
        manifest = {**manifest, "files": {}}
        draft, made = target.with_name(f".{target.name}.{os.getpid()}.part"), None
        with _clearly(f"out: {name!r} cannot be written ({{}}). Choose another folder, or make room"):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_drafts(target)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                made = cls(draft, manifest)
                for file, tensors in files.items():
                    manifest["files"][file] = write_tensors(draft / file, tensors)
                _write_manifest(draft, manifest)
                if target.exists():  # made by another process since
                    raise _taken(name)
                os.replace(draft, target)
                made.name, made.path = name, target
                _sync(target.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                if made is not None:
                    made.close()
                raise
        return made

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """One file; it counts from the next commit on."""
        with self._resumable():
            self.manifest["files"][name] = write_tensors(self.path / name, tensors)

    def drop(self, name: str) -> None:
        """Takes a file off the list; `commit` removes it."""
        self.manifest["files"].pop(name, None)

    def commit(self, **fields: Any) -> None:
        """Replaces the manifest and removes files that it does not list."""
        self.manifest.update(fields)
        with self._resumable():
            _sync(self.path)  # the files' names are safe before the manifest that lists them
            _write_manifest(self.path, self.manifest)
            self.sweep()

    def sweep(self) -> None:
        """Removes the run's own files that the manifest does not list: left half-written, or no longer needed."""
        for place in self.path.iterdir():
            if OURS.fullmatch(place.name) and place.name not in self.manifest["files"]:
                place.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes the folder with all that is in it; left to the process that has the lock."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock is None:
            return
        with suppress(OSError):  # removed while it is held: who waits for it sees that it is no longer the folder's
            (self.path / LOCK).unlink(missing_ok=True)
        self._lock.close()

    @contextmanager
    def _resumable(self) -> Iterator[None]:
        """A write that fails ends the run, and says that nothing is lost."""
        said = (
            f"path: {self.name!r} cannot be written ({{}}). The run is whole up to its last checkpoint: make room, then go on with "
            f"{resume_command(self.name)}"
        )
        with _clearly(said):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def state_files(manifest: dict[str, Any]) -> list[str]:
    """The files of the last checkpoint's state, by their first chains; none before the first checkpoint."""
    name = manifest.get("state")
    if name is None:
        return []
    return sorted(f for f in manifest["files"] if f.startswith(name[: len("state-00000")]))


def resume_command(name: str) -> str:
    """How to go on with a folder, as one types it."""
    import shlex

    return f"`credibly resume {shlex.quote(name)}`"


def _taken(name: str) -> StoreError:
    return StoreError(
        f"out: {name!r} exists already. Go on with it by {resume_command(name)}, or choose another folder"
    )


@contextmanager
def _clearly(said: str) -> Iterator[None]:
    """Turns what the file system refuses into a StoreError, with its reason in place of {}."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str((error.strerror if isinstance(error, OSError) else None) or error)
        raise StoreError(said.replace("{}", reason)) from error


# -- the lock ------------------------------------------------------------------------------------------------------------
def _take_lock(path: Path, name: str) -> IO[bytes]:
    try:
        import fcntl
    except ImportError:  # pragma: no cover  (no such call on this platform: the run goes unlocked)
        return open(os.devnull, "rb")
    while True:
        try:
            handle = open(path / LOCK, "ab+", buffering=0)  # noqa: SIM115  (held as long as the run)
        except OSError as error:
            raise StoreError(
                f"path: {name!r} cannot be written to ({error.strerror}), so the run cannot go on"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().decode(errors="replace").strip() or "another process"
            handle.close()
            raise StoreError(f"path: {name!r} is in use by {holder}. Wait until it ends, or stop it") from None
        except OSError as error:  # some network file systems have no locks
            log.warning(
                "the run in %s goes unlocked (%s): see to it that no other process goes on with it", name, error
            )
        if _still_there(path / LOCK, handle):
            break
        handle.close()  # its holder let go of it, and removed it, between our opening and our locking it
    with suppress(OSError):  # for the message of others; a full disk is no reason to stop here
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {platform.node()}".encode())
    return handle


def _still_there(place: Path, handle: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(place))
    except FileNotFoundError:
        return False


def _remove_drafts(target: Path) -> None:
    """Drafts of this folder whose process was killed before it had a name: a live one holds the lock inside."""
    for draft in target.parent.iterdir():
        pid = draft.name.removeprefix(f".{target.name}.").removesuffix(".part")
        named = pid.isdigit() and draft.name == f".{target.name}.{pid}.part"
        if named and (draft / LOCK).is_file() and not _alive(int(pid)):
            with suppress(StoreError):
                _take_lock(draft, os.fspath(draft)).close()
                shutil.rmtree(draft, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# -- files ---------------------------------------------------------------------------------------------------------------
def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Writes a file beside and renames it; returns its size and checksum."""
    content = save(dict(zip(tensors, _apart(list(tensors.values())))))
    draft = path.with_name(path.name + ".part")
    _write(draft, content)
    os.replace(draft, path)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous on the processor, no two in one storage: the format refuses those. Copies only where it must."""
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
    """Of all that a manifest says."""
    said = {k: v for k, v in manifest.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    draft = folder / f"{MANIFEST}.part"
    sealed = {**manifest, "checksum": checksum(manifest)}
    _write(draft, (json.dumps(sealed, indent=1) + "\n").encode())
    os.replace(draft, folder / MANIFEST)
    _sync(folder)


def _write(draft: Path, content: bytes) -> None:
    """All of it on the disk, or nothing left: what is cut short takes room that may be short."""
    try:
        with open(draft, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """The names in a folder on the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # pragma: no cover
    entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(entry)
    except OSError as error:  # pragma: no cover  (some network file systems cannot, and need not)
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(entry)
