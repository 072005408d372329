"""The folder of a fit to a table on the disk: whole, ours, of a version that is known, or refused; never half-written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from credibly.errors import InputError, Interrupted, PeerError, StoreError
from credibly.storage.manifest import parse_manifest
from credibly.storage.run_folder import RunFolder, resume_command

FORMAT = "credibly-table-run"
FORMAT_VERSION = 1


def check_out(folder: Path, force: bool) -> None:
    """Refuses a place that is taken, before any work; with force only the run folder of a table may be replaced."""
    if not _taken(folder):
        return
    if not folder.is_dir():
        raise InputError("--out", f"{folder} is a file", "Name a folder")
    if not force:
        raise InputError("--out", f"{folder} exists", "Choose another folder, or pass --force to replace a run")
    for place in (folder, beside(folder)):
        if _taken(place) and not is_table_run(place):
            raise InputError("--out", f"{place} is not a run of `credibly fit`, so it stays", "Choose another folder")
        if (place / "posterior").is_dir():
            with RunFolder(place / "posterior", {}):  # refused where another process is at work in it
                pass
    if folder.resolve() == Path.cwd():
        raise InputError("--out", f"{folder} is the folder that this runs in", "Replace it from another one")


def beside(folder: Path) -> Path:
    """Where a run is made that is to replace another: run.new for run."""
    place = folder.resolve()
    return folder.parent / f"{folder.name}.new" if folder.name == place.name else place.with_name(f"{place.name}.new")


def _taken(folder: Path) -> bool:
    return folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir())))


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """A folder to make a run in, which is at its place in the end. What was there before goes only when the new run is whole.

    Where the place is taken the new run is made beside it. A run that was stopped, that lost one of its processes, or whose disk
    is full, stays if it can be gone on with, and the error says how; anything else is taken away.
    """
    replaces = _taken(folder)
    work = beside(folder) if replaces else folder
    made = [parent for parent in folder.parents if not parent.exists()]
    was_there = not replaces and folder.is_dir()
    if replaces:
        shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True, exist_ok=True)
        yield work
    except BaseException as error:
        kept = f"{folder} is as it was; go on" if replaces else "go on"
        how = f"{kept} with {resume_command(os.fspath(work))}"
        if isinstance(error, KeyboardInterrupt) and _can_go_on(work, isinstance(error, Interrupted)):
            raise Interrupted(how) from error
        if isinstance(error, PeerError) and _can_go_on(work, True):
            error.add_note(how)
            raise
        reason = _refused_by_disk(error)
        if reason is not None and _can_go_on(work, False):
            raise StoreError(
                f"--out: {os.fspath(work)!r} cannot be written ({reason}). The run is whole up to its last checkpoint: make room,"
                f" then {how}"
            ) from error
        shutil.rmtree(work, ignore_errors=True)
        if was_there:
            folder.mkdir()
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if reason is not None:
            raise StoreError(
                f"--out: {os.fspath(folder)!r} cannot be written ({reason}). Make room or choose another folder; nothing was kept"
            ) from error
        raise
    if replaces:
        swap(work, folder)


def swap(new: Path, folder: Path) -> None:
    """Puts a folder into the place of another, or into an empty one, and removes what was there."""
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
def writing(folder: Path) -> Iterator[None]:
    """What the disk refuses while a run goes on names the run's folder and how to go on with it."""
    try:
        yield
    except (OSError, StoreError) as error:
        reason = _refused_by_disk(error)
        if reason is None:
            raise
        how = resume_command(os.fspath(folder))
        raise StoreError(
            f"path: {os.fspath(folder)!r} cannot be written ({reason}). The run is whole up to its last checkpoint: make room, then"
            f" go on with {how}"
        ) from error


def _refused_by_disk(error: BaseException) -> str | None:
    """What the file system said, where an error came from it; that of a fit that failed otherwise is not of this kind."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return str(cause.strerror or cause) if isinstance(cause, OSError) else None


def _can_go_on(folder: Path, begun: bool) -> bool:
    """Whether there is something to go on with: draws, or a sampler that was told to stop before its first."""
    try:
        manifest = parse_manifest(folder / "posterior")
    except StoreError:
        return False
    return begun or has_ended(manifest) or manifest.get("state") is not None


def has_ended(manifest: dict[str, Any]) -> bool:
    """Whether a posterior is all there: what is not streamed was saved when it was."""
    return not manifest.get("streamed") or manifest["status"] == "complete"


def write_whole(path: Path, text: str) -> None:
    """A file of text, whole or as it was before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """table.json, whole or as it was before."""
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **{k: v for k, v in facts.items() if k != "checksum"}}
    values["checksum"] = _checksum(values)
    write_whole(folder / "table.json", json.dumps(values, indent=1) + "\n")


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
    except OSError as error:
        raise StoreError(f"path: table.json of {name!r} cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"path: table.json of {name!r} is cut short or altered ({error})") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise StoreError(f"path: {name!r} is not the folder of a fit to a table")
    if facts.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"path: {name!r} has format {facts.get('format_version')}, this version of credibly reads {FORMAT_VERSION}. Use the version"
            " that wrote it, or fit the table again from the config.toml in it"
        )
    if facts.get("checksum") != _checksum(facts):
        raise StoreError(f"path: table.json of {name!r} was altered (its checksum does not fit)")
    return facts


def _checksum(facts: dict[str, Any]) -> str:
    told = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
