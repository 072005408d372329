"""Replace a folder by another one such that a process killed at any moment leaves the old one or the new one in place.

Linux exchanges the two names in one operation. Elsewhere, and on file systems without it, the old folder is renamed
to `.NAME.PID.old` first. A process killed between the two renames leaves only that name, and `recover` moves it back
the next time the folder is accessed.
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


def replace_folder(new: Path, target: Path) -> None:
    """Move the folder `new` to the place of `target`, whose old content is removed. Both are on one file system."""
    place = target.resolve()
    if not place.exists():
        os.rename(new, place)
        fsync_folder(place.parent)
        return
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    if exchange(new, place):
        fsync_folder(place.parent)
        # Another name, so that it is not mistaken for a run that can be resumed.
        with suppress(OSError):
            os.rename(new, old)
        shutil.rmtree(old, ignore_errors=True)
        return
    os.rename(place, old)
    try:
        os.rename(new, place)
    except BaseException:
        os.rename(old, place)
        raise
    fsync_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)


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
        for aside in _siblings(target.absolute(), "old"):
            if (aside / "manifest.json").is_file() or (aside / "table.json").is_file():
                os.rename(aside, target)
                fsync_folder(target.absolute().parent)
                return True
    return False


def remove_leftovers(target: Path) -> None:
    """Delete what killed processes left beside a folder: drafts `.NAME.PID.part`, and `.NAME.PID.old` once replaced."""
    recover(target)
    with suppress(OSError):
        for ending in ("part", "old"):
            for leftover in _siblings(target.absolute(), ending):
                if ending == "part" or target.exists():
                    shutil.rmtree(leftover, ignore_errors=True)


def _siblings(target: Path, ending: str) -> list[Path]:
    """Return folders beside the target that dead processes of this machine left, and that nobody has locked."""
    own = re.compile(re.escape(f".{target.name}.") + r"(\d+)\." + ending)
    found = []
    for path in sorted(target.parent.iterdir()):
        match = own.fullmatch(path.name)
        if (
            match
            and path.is_dir()
            and not path.is_symlink()
            and not is_alive(int(match[1]))
            and _is_abandoned(path, ending)
        ):
            found.append(path)
    return found


def _is_abandoned(folder: Path, ending: str) -> bool:
    """Return whether a folder is credibly's own, and no process holds its lock."""
    names = set(os.listdir(folder))
    # A replaced folder may be half removed.
    return (ending == "old" or not names or bool(names & OWN)) and not _locked(folder)


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
