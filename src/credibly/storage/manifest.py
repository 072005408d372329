"""Reading a run folder's manifest. A folder that is incomplete, modified or not a run is refused with the reason.

A manifest lists every file with its size and checksum: a folder is complete if all of them match. Nothing in it is
executed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor

from credibly.core.files import file_problem
from credibly.errors import StoreError
from credibly.storage.json_files import FileProblem, read_json
from credibly.storage.replacing import recover
from credibly.storage.run_folder import MANIFEST, RESUME_FILES, checksum, state_files

log = logging.getLogger("credibly")
FORMAT = "credibly-run"
# Version 1 had no checksum of the manifest itself in folders that were saved after a fit.
FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
# Attempts to read a folder that is being written to.
TRIES = 100


def parse_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a run folder, without checking the files that it lists."""
    name = os.fspath(folder)
    if not recover(folder):
        raise StoreError(f"there is no folder {name!r}")
    if not os.path.lexists(folder / MANIFEST):
        raise StoreError(f"{name!r} is not a run folder (it has no {MANIFEST})")
    try:
        manifest = read_json(folder / MANIFEST)
    except FileProblem as problem:
        raise StoreError(f"the manifest of {name!r} is truncated or was modified ({problem})") from problem
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{name!r} is not a run folder of credibly")
    if type(manifest.get("format_version")) is not int or manifest["format_version"] not in READ_VERSIONS:
        raise StoreError(
            f"{name!r} has format {manifest.get('format_version')}, this version reads {FORMAT_VERSION}. "
            "Use the version that wrote it"
        )
    sealed = manifest["format_version"] > 1 or manifest.get("streamed") or "checksum" in manifest
    if not sealed:
        _log_unsealed(name)
    elif manifest.get("checksum") != checksum(manifest):
        raise StoreError(f"the manifest of {name!r} was modified (its checksum does not match)")
    from credibly.storage.schemas import manifest_problems

    invalid = manifest_problems(manifest)
    if invalid:
        raise StoreError(f"the manifest of {name!r} was modified (missing or invalid: {', '.join(invalid)})")
    for file in manifest["files"]:
        if Path(file).name != file or file in (".", "..") or "\0" in file:
            raise StoreError(f"the manifest of {name!r} was modified (it names a file outside the folder: {file!r})")
    return manifest


@functools.cache
def _log_unsealed(name: str) -> None:
    """Log once that the manifest of a folder has no checksum."""
    log.warning(
        "the manifest of %s has no checksum: an earlier version of credibly wrote it, so changes to it cannot be "
        "detected. Save it again to add one",
        name,
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a run folder that no process writes to. Raise unless every file it lists is complete."""
    manifest = parse_manifest(folder)
    for file in manifest["files"]:
        _check_file(folder, file, manifest["files"][file])
    return manifest


def read_with_state(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the manifest, and the state of a run that has not ended. Raise unless the posterior's files are complete.

    The run may continue meanwhile: its state is replaced by the next one, its shards are not.
    """
    for attempt in range(TRIES):
        manifest, state = parse_manifest(folder), {}
        name = manifest.get("state")
        if name is None:
            break
        try:
            parts = [_check_file(folder, file, manifest["files"][file]) for file in state_files(manifest)]
            state = join_state(parts, lambda key: 0 if key in ("recorder.draws", "recorder.noted") else None)
            break
        except StoreError:
            if attempt == TRIES - 1 or parse_manifest(folder).get("state") == name:
                raise
    for file in manifest["files"]:
        if not file.startswith(RESUME_FILES):
            _check_file(folder, file, manifest["files"][file])
    return manifest, state


def _check_file(folder: Path, file: str, entry: dict[str, Any]) -> dict[str, Tensor]:
    """Raise unless a file is the one the manifest lists. Return the tensors of a state, which may soon be deleted."""
    name, path = os.fspath(folder), folder / file
    problem = file_problem(path)
    if problem not in (None, "it is missing"):
        raise StoreError(f"cannot read {file} in {name!r} ({problem})")
    try:
        size, expected = path.stat().st_size, entry["bytes"]
        if size != expected:
            raise StoreError(f"{file} in {name!r} is truncated or was modified ({size} bytes, {expected} expected)")
        if not file.startswith("state-"):
            content, digest = None, sha256(path)
        else:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
    except FileNotFoundError:
        raise StoreError(f"{name!r} is incomplete: {file} is missing") from None
    except OSError as error:
        raise StoreError(f"cannot read {file} in {name!r} ({error.strerror})") from error
    if digest != entry["sha256"]:
        raise StoreError(f"{file} in {name!r} was modified (its checksum does not match)")
    try:
        tensors: dict[str, Tensor] = load_bytes(content) if content is not None else {}
    except SafetensorError as error:
        raise StoreError(f"cannot read {file} in {name!r} ({error})") from error
    return tensors


def join_state(parts: list[dict[str, Tensor]], axis_of: Callable[[str], int | None]) -> dict[str, Tensor]:
    """Join the states that processes wrote, in chain order; `axis_of` returns the chain axis of a tensor, or None."""
    if len(parts) == 1:
        return parts[0]
    joined = {}
    for key, first in parts[0].items():
        axis = axis_of(key)
        joined[key] = first if axis is None else torch.cat([part[key] for part in parts], axis)
    return joined


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the tensors of one file."""
    problem = file_problem(path)
    if problem is not None:
        raise StoreError(f"cannot read {path.name} in {os.fspath(path.parent)!r} ({problem})")
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise StoreError(f"cannot read {path.name} in {os.fspath(path.parent)!r} ({error})") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
