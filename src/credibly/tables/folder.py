"""The run folder of a fit to a table: atomic writes, and validation of what is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from credibly.core.files import is_occupied, write_atomic
from credibly.errors import InputError, Interrupted, PeerError, StoreError
from credibly.storage.manifest import parse_manifest
from credibly.storage.run_folder import RunFolder, resume_command

FORMAT = "credibly-table-run"
FORMAT_VERSION = 1


def check_out(folder: Path, force: bool) -> None:
    """Raise if the folder is occupied, before any work. With force, only a run of `credibly fit` may be replaced."""
    if not is_occupied(folder):
        return
    if not folder.is_dir():
        raise InputError("--out", f"{folder} is a file", "Pass a folder")
    if not force:
        raise InputError("--out", f"{folder} already exists", "Choose another folder, or pass --force to replace a run")
    for place in (folder, staging_folder(folder)):
        if is_occupied(place) and not is_table_run(place):
            raise InputError(
                "--out", f"{place} is not a run of `credibly fit` and will not be replaced", "Choose another folder"
            )
        if (place / "posterior").is_dir():
            # Raises if another process is working in it.
            with RunFolder(place / "posterior", {}):
                pass
    if folder.resolve() == Path.cwd():
        raise InputError("--out", f"{folder} is the current directory", "Run the command from another one")


def staging_folder(folder: Path) -> Path:
    """Return the folder in which the replacement of a run is built: run.new for run."""
    place = folder.resolve()
    return folder.parent / f"{folder.name}.new" if folder.name == place.name else place.with_name(f"{place.name}.new")


@contextmanager
def new_run(folder: Path) -> Iterator[Path]:
    """Yield the folder to build a run in. An existing run is replaced only once the new one is complete.

    If the folder is occupied, the new run is built beside it. A run that was interrupted, lost one of its processes or
    ran out of disk space is kept if it can be resumed, and the error says how; otherwise it is removed.
    """
    replaces = is_occupied(folder)
    work = staging_folder(folder) if replaces else folder
    made = [parent for parent in folder.parents if not parent.exists()]
    was_there = not replaces and folder.is_dir()
    if replaces:
        shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True, exist_ok=True)
        yield work
    except BaseException as error:
        kept = f"{folder} is unchanged; resume" if replaces else "resume"
        how = f"{kept} with {resume_command(os.fspath(work))}"
        if isinstance(error, KeyboardInterrupt) and _resumable(work, isinstance(error, Interrupted)):
            raise Interrupted(how) from error
        if isinstance(error, PeerError) and _resumable(work, True):
            error.add_note(how)
            raise
        reason = _disk_error(error)
        if reason is not None and _resumable(work, False):
            raise StoreError(
                f"--out: cannot write {os.fspath(work)!r} ({reason}). The run is intact up to its last checkpoint:"
                f" free some space, then {how}"
            ) from error
        shutil.rmtree(work, ignore_errors=True)
        if was_there:
            folder.mkdir()
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if reason is not None:
            raise StoreError(
                f"--out: cannot write {os.fspath(folder)!r} ({reason}). Free some space or choose another folder;"
                " nothing was kept"
            ) from error
        if isinstance(error, Interrupted):
            # By the sampler of a fold, whose message is about draws that are gone.
            raise KeyboardInterrupt from error
        raise
    if replaces:
        swap(work, folder)


def swap(new: Path, folder: Path) -> None:
    """Move a folder into the place of another one, which is removed."""
    place = folder.resolve()
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    if place.exists():
        place.rename(old)
    try:
        new.rename(place)
    except BaseException:
        if old.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Re-raise disk errors with the run folder and the command that resumes it."""
    try:
        yield
    except (OSError, StoreError) as error:
        reason = _disk_error(error)
        if reason is None:
            raise
        raise StoreError(
            f"path: cannot write {os.fspath(folder)!r} ({reason}). The run is intact up to its last checkpoint: free"
            f" some space, then resume with {resume_command(os.fspath(folder))}"
        ) from error


def _disk_error(error: BaseException) -> str | None:
    """Return the reason given by the file system, or None for an error of another origin."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return str(cause.strerror or cause) if isinstance(cause, OSError) else None


def _resumable(folder: Path, begun: bool) -> bool:
    """Return whether a run can be resumed: it has state, or its sampler was interrupted before the first draw."""
    try:
        manifest = parse_manifest(folder / "posterior")
    except StoreError:
        return False
    return begun or is_complete(manifest) or manifest.get("state") is not None


def is_complete(manifest: dict[str, Any]) -> bool:
    """Return whether a posterior is complete. One that is not streamed is saved only once it is."""
    return not manifest.get("streamed") or manifest["status"] == "complete"


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write table.json atomically, with a checksum."""
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **{k: v for k, v in facts.items() if k != "checksum"}}
    values["checksum"] = _checksum(values)
    write_atomic(folder / "table.json", json.dumps(values, indent=1) + "\n")


def is_table_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is the run of a table."""
    return (Path(path) / "table.json").is_file()


def read_facts(folder: Path) -> dict[str, Any]:
    """Read table.json. Raise unless it is intact, written by credibly and of a known version."""
    name = os.fspath(folder)
    if not folder.is_dir():
        raise StoreError(f"path: no such folder: {name!r}")
    try:
        facts = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"path: {name!r} is not a run of `credibly fit` (it has no table.json)") from None
    except OSError as error:
        raise StoreError(f"path: cannot read table.json of {name!r} ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"path: table.json of {name!r} is truncated or corrupt ({error})") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise StoreError(f"path: {name!r} is not a run of `credibly fit`")
    if facts.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"path: {name!r} has format {facts.get('format_version')}, this version of credibly reads {FORMAT_VERSION}."
            " Use the version that wrote it, or fit the table again from its config.toml"
        )
    if facts.get("checksum") != _checksum(facts):
        raise StoreError(f"path: table.json of {name!r} was modified (its checksum does not match)")
    return facts


def _checksum(facts: dict[str, Any]) -> str:
    values = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
