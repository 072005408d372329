"""table.json of a run, and the files that it is bound to by their checksums.

A posterior's manifest has the checksums of its own files, and table.json those of the manifests, the configuration and
the stored rows. Its own checksum then stands for the whole run: a part that is edited, or comes from another run,
does not match. Whoever can write to the folder can recompute all of them; a checksum detects accidents and careless
edits, and it is not a signature.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from credibly.core.files import file_problem, write_atomic
from credibly.errors import StoreError
from credibly.storage.json_files import FileProblem, read_json
from credibly.storage.manifest import sha256
from credibly.storage.replacing import recover

log = logging.getLogger("credibly")
FILE = "table.json"
FORMAT = "credibly-table-run"
# Version 1 did not list the files that belong to the run.
FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
MISSING = "is missing"


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write table.json atomically, with a checksum."""
    own = ("checksum", "format", "format_version")
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **{k: v for k, v in facts.items() if k not in own}}
    values["checksum"] = facts_checksum(values)
    write_atomic(folder / FILE, json.dumps(values, indent=1) + "\n")


def sealed_files(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the checksums of files of a run, by their paths within it."""
    return {name: sha256(folder / name) for name in names}


def read_facts(folder: Path) -> dict[str, Any]:
    """Read table.json. Raise if it, or a file that it lists, is not as `credibly fit` wrote it."""
    facts = parse_facts(folder)
    if facts["format_version"] == 1:
        _log_unsealed(os.fspath(folder))
    for name in facts["files"]:
        problem = problem_of(folder, name, facts["files"][name])
        # Code that needs a missing file reports it; predictions do not need the stored rows.
        if problem not in (None, MISSING):
            raise StoreError(f"path: {name} of {os.fspath(folder)!r} {problem}")
    return facts


@functools.cache
def _log_unsealed(name: str) -> None:
    """Log once that a run has no checksums of its files."""
    log.warning(
        "%s was written by an earlier version of credibly, without checksums of its files: changes to them cannot be "
        "detected. Fit it again from its config.toml to add them",
        name,
    )


def parse_facts(folder: Path) -> dict[str, Any]:
    """Return the content of table.json, without checking the files that it lists."""
    name = os.fspath(folder)
    if not recover(folder):
        raise StoreError(f"path: no such folder: {name!r}")
    if not os.path.lexists(folder / FILE):
        raise StoreError(f"path: {name!r} is not a run of `credibly fit` (it has no {FILE})")
    try:
        facts = read_json(folder / FILE)
    except FileProblem as problem:
        raise StoreError(f"path: {FILE} of {name!r} is truncated or corrupt ({problem})") from problem
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise StoreError(f"path: {name!r} is not a run of `credibly fit`")
    version = facts.get("format_version")
    if type(version) is not int or version not in READ_VERSIONS:
        raise StoreError(
            f"path: {name!r} has format {version}, this version of credibly reads {FORMAT_VERSION}."
            " Use the version that wrote it, or fit the table again from its config.toml"
        )
    if facts.get("checksum") != facts_checksum(facts):
        raise StoreError(f"path: {FILE} of {name!r} was modified (its checksum does not match)")
    facts.setdefault("files", {})
    from credibly.storage.schemas import facts_problems

    invalid = facts_problems(facts)
    if invalid:
        raise StoreError(f"path: {FILE} of {name!r} was modified (missing or invalid: {', '.join(invalid)})")
    outside = next((file for file in facts["files"] if not _is_inside(file)), None)
    if outside is not None:
        raise StoreError(f"path: {FILE} of {name!r} was modified (it names a file outside the folder: {outside!r})")
    return facts


def problem_of(folder: Path, name: str, digest: str) -> str | None:
    """Return what is wrong with a file of a run, or None if it is the one that was written."""
    problem = file_problem(folder / name)
    if problem is not None:
        return MISSING if problem == "it is missing" else f"cannot be read ({problem})"
    try:
        same = sha256(folder / name) == digest
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if same else "was modified, or is of another run (its checksum does not match)"


def facts_checksum(facts: dict[str, Any]) -> str:
    """Return the checksum of the fields of table.json."""
    values = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _is_inside(name: str) -> bool:
    return bool(Path(name).parts) and not Path(name).is_absolute() and ".." not in Path(name).parts
