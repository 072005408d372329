"""Reading a run folder's manifest: what is not whole, was altered or is not a run is refused with a reason.

A manifest lists every file with its size and checksum, so a folder is whole when all of them fit. Nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor

from credibly.errors import StoreError
from credibly.storage.record import Record
from credibly.storage.run_folder import BESIDE, checksum, state_files

FORMAT = "credibly-run"
FORMAT_VERSION = 1
TRIES = 100  # at a folder that is being written to


def parse_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; the files that it lists are not looked at."""
    name = os.fspath(folder)
    if not folder.is_dir():
        raise StoreError(f"path: there is no folder {name!r}")
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"path: {name!r} is not a run folder (it has no manifest.json)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"path: the manifest of {name!r} is cut short or altered ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"path: {name!r} is not a run folder of credibly")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"path: {name!r} has format {manifest.get('format_version')}, this version reads {FORMAT_VERSION}. Use the version that wrote it"
        )
    if (manifest.get("streamed") or "checksum" in manifest) and manifest.get("checksum") != checksum(manifest):
        raise StoreError(f"path: the manifest of {name!r} was altered (its checksum does not fit)")
    odd = _oddities(manifest)
    if odd:
        raise StoreError(f"path: the manifest of {name!r} is altered (missing or unknown: {', '.join(odd)})")
    for file in manifest["files"]:
        if Path(file).name != file:
            raise StoreError(
                f"path: the manifest of {name!r} is altered (it names a file outside the folder: {file!r})"
            )
    return manifest


def _oddities(manifest: dict[str, Any]) -> list[str]:
    """Names of what is missing, or is not of the form that it has to be."""
    forms: dict[str, type | tuple[type, ...]] = {"kind": str, "record": dict, "files": dict}
    if manifest.get("kind") != "density":
        forms |= {"layout": list, "random": list, "dtype": str, "likelihood": dict, "row": dict, "looped": bool}
    odd = sorted(name for name, form in forms.items() if not isinstance(manifest.get(name), form))
    if odd:
        return odd
    fields = {f.name for f in dataclasses.fields(Record)}
    odd = [f"{name!r} in the record" for name in sorted(fields ^ set(manifest["record"]))]
    facts = manifest["files"].items()
    return odd + [f"the facts of {n}" for n, f in facts if not isinstance(f, dict) or set(f) != {"bytes", "sha256"}]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder that nobody is writing to, after every file it lists has been found whole."""
    manifest = parse_manifest(folder)
    for file in manifest["files"]:
        _check_file(folder, file, manifest["files"][file])
    return manifest


def read_with_state(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest, and the state of a run that has not ended, after every file of the posterior has been found whole.

    The run may go on meanwhile: a state is replaced by the next one, while shards stay as they are.
    """
    for attempt in range(TRIES):
        manifest, state = parse_manifest(folder), {}
        name = manifest.get("state")
        if name is None:
            break
        try:
            pieces = [_check_file(folder, file, manifest["files"][file]) for file in state_files(manifest)]
            state = join_state(pieces, lambda key: 0 if key in ("recorder.draws", "recorder.noted") else None)
            break
        except StoreError:
            if attempt == TRIES - 1 or parse_manifest(folder).get("state") == name:
                raise
    for file in manifest["files"]:
        if not file.startswith(BESIDE):
            _check_file(folder, file, manifest["files"][file])
    return manifest, state


def _check_file(folder: Path, file: str, facts: dict[str, Any]) -> dict[str, Tensor]:
    """Refuses a file that is not the one the manifest lists; the tensors of a state, which may be gone the next moment."""
    name, place = os.fspath(folder), folder / file
    try:
        size = place.stat().st_size
        if size != facts["bytes"]:
            raise StoreError(
                f"path: {file} in {name!r} is cut short or altered ({size} bytes, {facts['bytes']} expected)"
            )
        if not file.startswith("state-"):
            content, digest = None, sha256(place)
        else:
            content = place.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
    except FileNotFoundError:
        raise StoreError(f"path: {name!r} is not whole: {file} is missing") from None
    except OSError as error:
        raise StoreError(f"path: {file} in {name!r} cannot be read ({error.strerror})") from error
    if digest != facts["sha256"]:
        raise StoreError(f"path: {file} in {name!r} was altered (its checksum does not fit)")
    tensors: dict[str, Tensor] = load_bytes(content) if content is not None else {}
    return tensors


def join_state(pieces: list[dict[str, Tensor]], axis_of: Callable[[str], int | None]) -> dict[str, Tensor]:
    """The state of all chains from the pieces that processes wrote, in the order of their chains; `axis_of` says where these lie."""
    if len(pieces) == 1:
        return pieces[0]
    joined = {}
    for key, first in pieces[0].items():
        axis = axis_of(key)
        joined[key] = first if axis is None else torch.cat([piece[key] for piece in pieces], axis)
    return joined


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of one file."""
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise StoreError(f"path: {path.name} in {os.fspath(path.parent)!r} cannot be read ({error})") from error


def sha256(path: Path) -> str:
    """Of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
