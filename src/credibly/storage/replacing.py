"""Replace a folder by another one such that a process killed at any moment leaves the old one or the new one in place.

Linux exchanges the two names in one operation. Elsewhere, and on file systems without it, the old folder is renamed
to `.NAME.PID.old` first. A process killed between the two renames leaves only that name, and `recover` moves it back
the next time the folder is accessed. Once the new folder is in place, the old one is renamed to `.NAME.PID.replaced`,
which is never moved back, and removed with its marker last, so that a rest of it is still recognised.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from credibly.core.files import fsync_folder

AT_FDCWD, RENAME_EXCHANGE = -100, 2
LOCK = "lock"
# A folder with one of these is a run, or the draft of one.
OWN = {LOCK, "manifest.json", "table.json"}
PART, OLD, REPLACED = "part", "old", "replaced"


def replace_folder(new: Path, target: Path) -> None:
    """Move the folder `new` to the place of `target`, whose old content is removed. Both are on one file system."""
    place = target.resolve()
    if not place.exists():
        os.rename(new, place)
        fsync_folder(place.parent)
        return
    if exchange(new, place):
        fsync_folder(place.parent)
        _discard(new, place)
        return
    old = _beside(place, OLD)
    os.rename(place, old)
    try:
        os.rename(new, place)
    except BaseException:
        os.rename(old, place)
        raise
    fsync_folder(place.parent)
    _discard(old, place)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one operation, and return whether the system supports that."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), os.fspath(other))


def recover(target: Path) -> bool:
    """Move back a folder that a killed process had moved aside; return whether the folder exists now.

    Does nothing where the folder exists, or where the process that moved it still runs.
    """
    if os.path.lexists(target):
        return target.is_dir()
    with suppress(OSError):
        for aside in _siblings(target.absolute(), OLD):
            if (aside / "manifest.json").is_file() or (aside / "table.json").is_file():
                os.rename(aside, target)
                fsync_folder(target.absolute().parent)
                return True
    return False


def remove_leftovers(target: Path) -> None:
    """Delete what killed processes left beside a folder: drafts `.NAME.PID.part`, and replaced folders."""
    recover(target)
    place = target.absolute()
    with suppress(OSError):
        for ending in (PART, REPLACED):
            for leftover in _siblings(place, ending):
                _remove(leftover)
        for leftover in _siblings(place, OLD) if target.exists() else ():
            _discard(leftover, place)


def _beside(place: Path, ending: str) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}.{ending}")


def _discard(folder: Path, place: Path) -> None:
    """Delete a folder that another one has replaced, under a name that is never moved back."""
    gone = _beside(place, REPLACED)
    if gone.exists():
        _remove(gone)
    with suppress(OSError):
        os.rename(folder, gone)
        _remove(gone)


def _remove(folder: Path) -> None:
    """Delete a folder, its markers last: what a killed process leaves of it is still known as credibly's own."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name in OWN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()


def _siblings(target: Path, ending: str) -> list[Path]:
    """Return folders beside the target that dead processes of this machine left, and that nobody has locked."""
    own = re.compile(re.escape(f".{target.name}.") + r"(\d+)\." + ending)
    found = []
    for path in sorted(target.parent.iterdir()):
        match = own.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink() and not is_alive(int(match[1])) and _is_abandoned(path):
            found.append(path)
    return found


def _is_abandoned(folder: Path) -> bool:
    """Return whether a folder is credibly's own or empty, and no process holds its lock."""
    names = set(os.listdir(folder))
    return (not names or bool(names & OWN)) and not _locked(folder)


def _locked(folder: Path) -> bool:
    """Return whether a process, of this machine or another, holds the lock of a folder."""
    try:
        import fcntl

        with open(folder / LOCK, "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine runs."""
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
