"""Files that a reader sees whole or not at all, and occupied folders."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it into place."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def is_occupied(folder: Path) -> bool:
    """Return whether there is anything at the path but an empty folder."""
    return folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir())))
