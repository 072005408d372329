"""Atomic, durable file writes, so that a reader sees a complete file or none; and checks of occupied folders."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

# Drafts that `write_atomic` leaves behind when its process is killed.
DRAFT = re.compile(r"\..+\.\d+\.part")


def write_atomic(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it into place, on the disk before the call returns."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    write_bytes(part, text.encode())
    try:
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file to the disk completely, or leave nothing behind: a truncated file takes space that may be scarce."""
    try:
        with open(path, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def fsync_file(path: Path) -> None:
    """Flush a file that was written by other code to the disk."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system supports that."""
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


def is_occupied(folder: Path) -> bool:
    """Return whether there is anything at the path but an empty folder, or one with drafts of a killed process."""
    if folder.is_symlink() or not folder.exists():
        return folder.is_symlink()
    return not folder.is_dir() or any(not _is_draft(entry) for entry in folder.iterdir())


def remove_drafts(folder: Path) -> None:
    """Delete the drafts that a killed process left in a folder."""
    for entry in list(folder.iterdir()):
        if _is_draft(entry):
            entry.unlink(missing_ok=True)


def _is_draft(path: Path) -> bool:
    return DRAFT.fullmatch(path.name) is not None and path.is_file()


def file_problem(path: Path) -> str | None:
    """Return why a path is no ordinary file that can be opened without waiting, or None if it is one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return str(error.strerror or error)
    except ValueError:
        return "its name is invalid"
    if stat.S_ISREG(mode):
        return None
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    return f"it is {next((name for check, name in kinds if check(mode)), 'a device')}, not a file"
