"""The folder of a fit to a table on the disk: whole, ours, of a version that is known, or refused; never half-written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from credibly.errors import InputError, Interrupted, StoreError

FORMAT = "credibly-table-run"
FORMAT_VERSION = 1


def check_out(folder: Path, force: bool) -> None:
    """Refuses a place that is taken, before any work; with force only a run folder of a table may be replaced."""
    if not folder.exists():
        return
    if not force:
        raise InputError("--out", f"{folder} exists", "Choose another folder, or pass --force to replace a run")
    if not (folder / "table.json").is_file():
        raise InputError(
            "--out", f"{folder} is not the folder of a fit, so it is not replaced", "Choose another folder"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """What was at this place goes only when the new run is there; a run that cannot be gone on with is taken away."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    try:
        yield
    except Interrupted:  # a sampler's folder is whole, and is to be gone on with
        shutil.rmtree(old, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """table.json, whole or as it was before."""
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **{k: v for k, v in facts.items() if k != "checksum"}}
    values["checksum"] = _checksum(values)
    part = folder / f".table.json.{os.getpid()}.part"
    try:
        part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(part, folder / "table.json")
    finally:
        part.unlink(missing_ok=True)


def is_table_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a fit to a table."""
    return (Path(path) / "table.json").is_file()


def read_facts(folder: Path) -> dict[str, Any]:
    """table.json, after checks that it is whole, ours, and of a version that is known here."""
    name = os.fspath(folder)
    if not folder.is_dir():
        raise StoreError(f"path: there is no folder {name!r}")
    try:
        facts = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"path: {name!r} is not the folder of a fit to a table (it has no table.json)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"path: table.json of {name!r} is cut short or altered ({error})") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise StoreError(f"path: {name!r} is not the folder of a fit to a table")
    if facts.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"path: {name!r} has format {facts.get('format_version')}, this version reads {FORMAT_VERSION}. Use the version that wrote it"
        )
    if facts.get("checksum") != _checksum(facts):
        raise StoreError(f"path: table.json of {name!r} was altered (its checksum does not fit)")
    return facts


def _checksum(facts: dict[str, Any]) -> str:
    told = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
