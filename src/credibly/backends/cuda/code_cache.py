"""A cache of compiled GPU code on disk, shared between processes.

A file holds the machine code of one kernel behind its checksum. Its name is a hash of everything that determines the
code: source, architecture and other compiler flags, and the compiler's version. Code whose checksum differs is
compiled again, and a folder that others can write to is not used, since its files are run on the GPU.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("credibly")

HEADER = b"credibly-code-1\n"
DIGEST = hashlib.sha256().digest_size


def cached_code(parts: tuple[str, ...], build: Callable[[], bytes], folder: Path | None = None) -> bytes:
    """Return compiled code, from the cache if it is there and intact, else compiled now and cached.

    Args:
        parts: everything that determines the code.
        build: returns the code. Its exceptions are passed on.
        folder: folder of the cache. Default: `CREDIBLY_CACHE`, or `credibly` in the user's cache folder.
    """
    folder = cache_folder() if folder is None else folder
    if folder is None or not _private(folder):
        return build()
    path = folder / f"{_name(parts)}.code"
    code = _read(path)
    if code is None:
        code = build()
        _write(path, code)
    return code


def cache_folder() -> Path | None:
    """Return the folder of the cache, which may not exist yet, or None for a user without a home."""
    given = os.environ.get("CREDIBLY_CACHE")
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credibly"
    except RuntimeError:
        return None


def _name(parts: tuple[str, ...]) -> str:
    # Each part is preceded by its length, so that ("ab", "c") and ("a", "bc") are different keys.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _private(folder: Path) -> bool:
    """Create the folder if needed. Return whether only this user can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        log.info("GPU code is not cached: %s", error)
        return False
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(path: Path) -> bytes | None:
    """Return the code in a file, or None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    start = len(HEADER) + DIGEST
    code = content[start:]
    if content[:start] != HEADER + hashlib.sha256(code).digest():
        log.info("compiling GPU code again: %s is damaged", path.name)
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    """Write a file under a temporary name and rename it. A full or read-only disk is logged and ignored."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(HEADER + hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError as error:
        log.info("GPU code is not cached: %s", error)
        temporary.unlink(missing_ok=True)
