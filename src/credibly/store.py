"""The run folder: safetensors shards and a JSON manifest, written beside and renamed into place; nothing is ever executed.

run/
  manifest.json            format, versions, model, method and its settings, seed, data fingerprint, checksums
  fixed.safetensors        parameters that are not random, and buffers
  draws-00000.safetensors  the posterior's tensors, in shards along the draws
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from credibly import __version__
from credibly.dropout_posterior import DropoutPosterior
from credibly.errors import StoreError
from credibly.forward import Forward
from credibly.gaussian_posterior import GaussianPosterior
from credibly.inputs import blank_row
from credibly.layout import Layout
from credibly.likelihoods import LIKELIHOODS, Likelihood
from credibly.posterior import DrawsPosterior, Model, Posterior, Record
from credibly.priors import PRIORS
from credibly.specs import from_spec, kinds_of, to_spec

FORMAT = "credibly-run"
FORMAT_VERSION = 1
SHARD_BYTES = 2**28
POSTERIORS: dict[str, type[Posterior]] = {p.kind: p for p in (DrawsPosterior, GaussianPosterior, DropoutPosterior)}


def save(posterior: Posterior, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a run folder under a temporary name and renames it; a reader sees all of it or nothing."""
    target = Path(path)
    if target.exists() and not overwrite:
        raise StoreError(f"path: {os.fspath(path)!r} exists already. Choose another folder, or pass overwrite=True")
    if target.exists() and not (target / "manifest.json").is_file():
        raise StoreError(
            f"path: {os.fspath(path)!r} exists and is not a run folder, so it is not overwritten. Choose another"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        files = _write_tensors(posterior, draft)
        manifest = _manifest(posterior, draft, files)
        _write_text(draft / "manifest.json", json.dumps(manifest, indent=1, allow_nan=True))
        if target.exists():
            shutil.rmtree(target)
        os.replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def load(
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    device: torch.device | str | None = None,
) -> Posterior:
    """The posterior of a run folder, on a network of the same shape (its weights do not matter: the stored ones are used).

    Args:
        path: the folder.
        net: the network that was fitted, or a new one built by the same code.
        likelihood: only for one of your own class, which the folder cannot describe.
        device: where to put it; by default where the network is.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if device is not None:
        net = copy.deepcopy(net).to(device)
    extra = {e["name"]: tuple(e["shape"]) for e in manifest["layout"] if e["role"] == "extra"}
    layout = Layout(net, tuple(manifest["random"]), extra)
    if layout.signature() != manifest["layout"]:
        raise StoreError(_difference(layout.signature(), manifest["layout"]))
    if str(layout.dtype) != manifest["dtype"]:
        raise StoreError(
            f"net is {layout.dtype}, the stored run {manifest['dtype']}. Convert it, as with net.to({manifest['dtype']})"
        )
    groups = _read_tensors(folder, manifest, layout.device)
    layout.set_fixed(groups.pop("fixed"))
    tensors = {
        name: torch.cat([shards[k] for k in sorted(shards)], 1) if len(shards) > 1 else next(iter(shards.values()))
        for name, shards in groups.items()
    }
    own = likelihood or from_spec(manifest["likelihood"], kinds_of(*LIKELIHOODS.values(), *PRIORS.values()))
    forward = Forward(layout, "looped" if manifest["looped"] else "batched", blank_row(manifest["row"], layout.device))
    model = Model(layout, own, forward, manifest["row"])
    return POSTERIORS[manifest["kind"]].from_tensors(
        model, tensors, Record(**manifest["record"]), manifest["description"]
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder, after every file it lists has been found whole."""
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
    missing = {"kind", "layout", "random", "dtype", "likelihood", "record", "files", "row", "looped"} - set(manifest)
    if missing or manifest["kind"] not in POSTERIORS:
        raise StoreError(
            f"path: the manifest of {name!r} is altered (missing or unknown: {', '.join(sorted(missing)) or manifest['kind']})"
        )
    for file, facts in manifest["files"].items():
        place = folder / file
        if Path(file).name != file:
            raise StoreError(
                f"path: the manifest of {name!r} is altered (it names a file outside the folder: {file!r})"
            )
        if not place.is_file():
            raise StoreError(f"path: {name!r} is not whole: {file} is missing")
        if place.stat().st_size != facts["bytes"]:
            raise StoreError(
                f"path: {file} in {name!r} is cut short or altered ({place.stat().st_size} bytes, {facts['bytes']} expected)"
            )
        if _sha256(place) != facts["sha256"]:
            raise StoreError(f"path: {file} in {name!r} was altered (its checksum does not fit)")
    return manifest


def _write_tensors(posterior: Posterior, folder: Path) -> list[str]:
    shards = {"fixed.safetensors": {f"fixed/{k}": v for k, v in posterior.layout.fixed().items()}}
    for name, tensor in posterior.tensors().items():
        step = (
            max(1, SHARD_BYTES // max(1, tensor[:, :1].numel() * tensor.element_size()))
            if tensor.ndim == 3
            else tensor.shape[0]
        )
        pieces = tensor.split(step, 1) if tensor.ndim == 3 else (tensor,)
        for number, piece in enumerate(pieces):
            shards[f"{name}-{number:05d}.safetensors"] = {f"{name}/{number:05d}": piece}
    for file, tensors in shards.items():
        # Clones, since tied buffers or slices of one storage are refused by the format.
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, folder / file)
        with open(folder / file, "rb+") as handle:
            os.fsync(handle.fileno())
    return list(shards)


def _read_tensors(folder: Path, manifest: dict[str, Any], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Tensors by group ("fixed", "draws", ...) and by name or shard number."""
    groups: dict[str, dict[str, Tensor]] = {"fixed": {}}
    for file in sorted(manifest["files"]):
        try:
            tensors = load_file(folder / file, device=str(device))
        except (SafetensorError, OSError) as error:
            raise StoreError(f"path: {file} in {os.fspath(folder)!r} cannot be read ({error})") from error
        for key, tensor in tensors.items():
            group, name = key.split("/", 1)
            groups.setdefault(group, {})[name] = tensor
    return groups


def _manifest(posterior: Posterior, folder: Path, files: list[str]) -> dict[str, Any]:
    model = posterior.model
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "versions": {
            "credibly": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "kind": posterior.kind,
        "description": posterior.description(),
        "random": list(model.layout.random),
        "dtype": str(model.layout.dtype),
        "layout": model.layout.signature(),
        "row": model.row,
        "looped": model.forward.looped,
        "likelihood": to_spec(model.likelihood),
        "record": dataclasses.asdict(posterior.record),
        "files": {file: {"bytes": (folder / file).stat().st_size, "sha256": _sha256(folder / file)} for file in files},
    }


def _difference(mine: list[dict[str, Any]], stored: list[dict[str, Any]]) -> str:
    here, there = ({e["name"]: tuple(e["shape"]) for e in side} for side in (mine, stored))
    for name in [*there, *here]:
        if here.get(name) != there.get(name):
            found = f"shape {here[name]}" if name in here else "no such tensor"
            return f"net: {name} has {found}, the stored run has {there.get(name, 'no such tensor')}. Pass the network that was fitted"
    return "net: its tensors have other roles than in the stored run. Pass the network that was fitted"


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text + "\n")
        handle.flush()
        os.fsync(handle.fileno())
