"""The run folder of a fit to a table: atomic writes, and validation of what is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from credibly.core.allocation import allocation_failure
from credibly.core.files import is_occupied, remove_drafts
from credibly.core.interrupts import holding_output
from credibly.errors import InputError, Interrupted, PeerError, StoreError
from credibly.storage.manifest import parse_manifest
from credibly.storage.replacing import recover, remove_leftovers, replace_folder
from credibly.storage.run_folder import RunFolder, resume_command
from credibly.storage.sealed import parse_facts

# Subfolder of the posteriors of the folds.
FOLDS = "folds"


def check_out(folder: Path, force: bool) -> None:
    """Raise if the folder is occupied, before any work. With force, only a run of `credibly fit` may be replaced."""
    recover(folder)
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

    If the folder is occupied, the new run is built beside it. Whatever the error, a run that can be resumed or loaded
    is kept, and the error says how to continue; otherwise it is removed.
    """
    remove_leftovers(folder)
    replaces = is_occupied(folder)
    work = staging_folder(folder) if replaces else folder
    made = [parent for parent in folder.parents if not parent.exists()]
    was_there = not replaces and folder.is_dir()
    if replaces:
        shutil.rmtree(work, ignore_errors=True)
    try:
        with holding_output():
            work.mkdir(parents=True, exist_ok=True)
            remove_drafts(work)
            yield work
    except BaseException as error:
        how = f"resume with {resume_command(os.fspath(work))}"
        stopped = isinstance(error, (KeyboardInterrupt, PeerError))
        if stopped and not (work / "posterior").exists() and (kept := _before_the_fit(work)):
            how = f"{kept}; {how}"
            _raise_kept(error, work, f"{folder} is unchanged; {how}" if replaces else how)
        if _resumable(work, isinstance(error, (Interrupted, PeerError))):
            _raise_kept(error, work, f"{folder} is unchanged; {how}" if replaces else how)
        shutil.rmtree(work, ignore_errors=True)
        if was_there:
            folder.mkdir()
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if (lack := allocation_failure(error)) is not None:
            raise StoreError(f"{lack}. Free some memory, or choose a smaller model; nothing was kept") from error
        if (reason := _disk_error(error)) is not None:
            raise StoreError(
                f"--out: cannot write {os.fspath(folder)!r} ({reason}). Free some space or choose another folder;"
                " nothing was kept"
            ) from error
        if isinstance(error, Interrupted):
            # Its message is about draws that no longer exist.
            raise KeyboardInterrupt from error
        raise
    if replaces:
        replace_folder(work, folder)


def _raise_kept(error: BaseException, work: Path, how: str) -> NoReturn:
    """Raise the error that ended a fit whose run can be resumed, with how to do that."""
    if isinstance(error, KeyboardInterrupt):
        raise Interrupted(how) from error
    intact = "The run is intact up to its last checkpoint"
    if (lack := allocation_failure(error)) is not None:
        raise StoreError(f"{lack}. {intact}: free some memory, then {how}") from error
    if (reason := _disk_error(error)) is not None:
        raise StoreError(
            f"--out: cannot write {os.fspath(work)!r} ({reason}). {intact}: free some space, then {how}"
        ) from error
    error.add_note(how if isinstance(error, PeerError) else f"{intact}; {how}")
    raise error


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Re-raise errors of disk and memory with the run folder and the command that resumes it."""
    how = f"resume with {resume_command(os.fspath(folder))}"
    intact = "The run is intact up to its last checkpoint"
    try:
        yield
    except Exception as error:
        if (lack := allocation_failure(error)) is not None:
            raise StoreError(f"path: {lack}. {intact}: free some memory, then {how}") from error
        reason = _disk_error(error) if isinstance(error, (OSError, StoreError)) else None
        if reason is None:
            raise
        raise StoreError(
            f"path: cannot write {os.fspath(folder)!r} ({reason}). {intact}: free some space, then {how}"
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


def _before_the_fit(folder: Path) -> str:
    """Describe what a fit has that was stopped before its final part; empty if there is nothing worth keeping."""
    try:
        facts = parse_facts(folder)
    except StoreError:
        return ""
    done = saved_folds(folder, facts)
    if not facts["files"] or not (done or facts["candidates"]):
        return ""
    parts = ["the choice of the model"] if facts["candidates"] else []
    parts += [f"{done} of {facts['folds']} fits to folds"] if done else []
    return f"{' and '.join(parts)} {'is' if len(parts) == 1 and not done else 'are'} kept"


def saved_folds(folder: Path, facts: dict[str, Any]) -> int:
    """Return the number of folds whose fits are complete."""
    return sum(is_saved(folder / FOLDS / str(k)) for k in range(facts["folds"]))


def is_saved(posterior: Path) -> bool:
    """Return whether a folder holds a complete posterior."""
    try:
        return is_complete(parse_manifest(posterior))
    except StoreError:
        return False


def is_complete(manifest: dict[str, Any]) -> bool:
    """Return whether a posterior is complete. One that is not streamed is saved only once it is."""
    return bool(manifest.get("status", "complete") == "complete")


def is_table_run(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is the run of a table."""
    return (Path(path) / "table.json").is_file()
