"""Compare every file of a run folder with the checksum that was stored when it was written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from credibly.core.files import file_problem
from credibly.errors import StoreError
from credibly.storage.manifest import parse_manifest, sha256
from credibly.storage.replacing import recover
from credibly.storage.run_folder import MANIFEST
from credibly.storage.sealed import FILE, parse_facts, problem_of


@dataclass(frozen=True)
class Checked:
    """A file of a run, by its path within the folder, and what is wrong with it; None if nothing is."""

    file: str
    problem: str | None


def verify(path: str | os.PathLike[str]) -> list[Checked]:
    """Check all files of a run folder, of `credibly fit` or of `fit(..., out=path)`. Nothing is loaded from them.

    A run that an earlier version wrote without checksums has a separate problem: changes would not be detected.
    """
    folder = Path(path)
    if not recover(folder):
        raise StoreError(f"path: no such folder: {os.fspath(path)!r}")
    if not os.path.lexists(folder / FILE):
        return _verify_posterior(folder, "")
    try:
        facts = parse_facts(folder)
    except StoreError as error:
        return [Checked(FILE, str(error).removeprefix("path: "))]
    unsealed = None if facts["format_version"] > 1 else "lists no files of the run: an earlier version wrote it"
    found = [Checked(FILE, unsealed)]
    found += [Checked(name, problem_of(folder, name, digest)) for name, digest in facts["files"].items()]
    inner = ["posterior", *(f"folds/{k}" for k in range(facts["folds"]))]
    bad = {one.file for one in found if one.problem is not None}
    for name in inner:
        # Before the end of a fit there may be none yet.
        known = f"{name}/{MANIFEST}" in facts["files"]
        if f"{name}/{MANIFEST}" not in bad and (known or (folder / name).is_dir()):
            checked = _verify_posterior(folder / name, f"{name}/")
            found += checked[1:] if known and checked[0].problem is None else checked
    return found


def _verify_posterior(folder: Path, prefix: str) -> list[Checked]:
    try:
        manifest = parse_manifest(folder)
    except StoreError as error:
        return [Checked(f"{prefix}{MANIFEST}", str(error))]
    unsealed = None if "checksum" in manifest else "has no checksum: an earlier version wrote it"
    found = [Checked(f"{prefix}{MANIFEST}", unsealed)]
    for name, entry in manifest["files"].items():
        found.append(Checked(f"{prefix}{name}", _file_problem(folder / name, entry["bytes"], entry["sha256"])))
    return found


def _file_problem(path: Path, size: int, digest: str) -> str | None:
    problem = file_problem(path)
    if problem is not None:
        return "is missing" if problem == "it is missing" else f"cannot be read ({problem})"
    try:
        now = path.stat().st_size
        if now != size:
            return f"was truncated or modified ({now:,} bytes, {size:,} expected)"
        return None if sha256(path) == digest else "was modified (its checksum does not match)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
