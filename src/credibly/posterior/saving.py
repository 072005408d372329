"""Writing a run folder: safetensors shards and a JSON manifest, written under a temporary name and renamed into place.

run/
  manifest.json            format, versions, model, method and its settings, seed, data fingerprint, checksums
  fixed.safetensors        parameters that are not random, and buffers
  draws-00000.safetensors  the posterior's tensors, sharded along the draws
and, while a sampler runs or waits to be resumed
  state-00000.safetensors  the sampler's state, and the draws since the last shard
  data, initial, start     the problem's data, the initial network and the starting points
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from credibly import __version__
from credibly.core.files import fsync_folder
from credibly.core.specs import to_spec
from credibly.errors import StoreError
from credibly.networks.blueprint import describe_network
from credibly.posterior.model import Model
from credibly.storage.manifest import FORMAT, FORMAT_VERSION
from credibly.storage.record import Record
from credibly.storage.replacing import recover, remove_leftovers, replace_folder
from credibly.storage.run_folder import RunFolder, write_manifest, write_tensors

SHARD_BYTES = 2**28


class Saveable(Protocol):
    """The interface that `save` needs from a posterior."""

    kind: ClassVar[str]
    record: Record
    _model: Model | None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name."""

    def description(self) -> Any:
        """Return everything else to store, in plain JSON."""


def save(posterior: Saveable, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a run folder under a temporary name and rename it, so a reader sees the complete folder or none.

    A folder that is overwritten stays in place until the new one is on the disk, and the two are exchanged in one
    operation: a process killed at any moment leaves one of them complete.
    """
    target = Path(path)
    if recover(target) and not overwrite:
        raise StoreError(f"path: {os.fspath(path)!r} already exists. Choose another folder, or pass overwrite=True")
    if target.exists() and not (target / "manifest.json").is_file():
        raise StoreError(
            f"path: {os.fspath(path)!r} exists and is not a run folder, so it is not overwritten. Choose another"
        )
    if target.exists():
        # Raises if a sampler is writing to the folder.
        RunFolder(path, {}).close()
    place = target.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(place)
    draft = place.with_name(f".{place.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        # Locked, so that no other process treats it as the leftover of a dead one.
        with RunFolder(draft, {}):
            facts = header(posterior._model, posterior.kind, posterior.record)
            manifest = {**facts, "description": posterior.description(), "files": write_files(posterior, draft)}
            fsync_folder(draft)
            write_manifest(draft, manifest)
        if target.exists() and not overwrite:  # created by another process in the meantime
            raise StoreError(f"path: {os.fspath(path)!r} already exists. Choose another folder, or pass overwrite=True")
        replace_folder(draft, place)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def save_into(posterior: Saveable, folder: RunFolder) -> None:
    """Write a posterior into the folder of the run that led to it, whose other files are removed."""
    files = write_files(posterior, folder.path)
    facts = header(posterior._model, posterior.kind, posterior.record)
    folder.manifest = {**facts, "description": posterior.description(), "files": files}
    folder.commit()


def header(model: Model | None, kind: str, record: Record) -> dict[str, Any]:
    """Return a manifest without its files. The model is None for a density that is not a network's."""
    facts = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "versions": {
            "credibly": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "kind": kind,
        "description": None,
        "record": dataclasses.asdict(record),
    }
    if model is not None:
        facts |= {
            "random": list(model.layout.random),
            "dtype": str(model.layout.dtype),
            "layout": model.layout.signature(),
            "row": model.row,
            "looped": (model.forward if model.frozen is None else model.frozen.whole).looped,
            "likelihood": to_spec(model.likelihood),
            "precision": model.forward.precision,
            "network": describe_network(model.layout.module),
            "own_gradients": model.layout.own_gradients,
        }
        if model.frozen is not None:
            facts["frozen_body"] = {"looped": model.forward.looped}
    return facts


def write_files(posterior: Saveable, folder: Path) -> dict[str, Any]:
    """Write the shards. Return their sizes and checksums by file name."""
    fixed = {} if posterior._model is None else posterior._model.layout.fixed()
    shards = {"fixed.safetensors": {f"fixed/{k}": v for k, v in fixed.items()}}
    for name, tensor in posterior.tensors().items():
        chunks: tuple[Tensor, ...] = (tensor,)
        if tensor.ndim == 3:
            chunks = tensor.split(max(1, SHARD_BYTES // max(1, tensor[:, :1].numel() * tensor.element_size())), 1)
        for number, chunk in enumerate(chunks):
            shards[f"{name}-{number:05d}.safetensors"] = {f"{name}/{number:05d}": chunk}
    return {file: write_tensors(folder / file, tensors) for file, tensors in shards.items()}
