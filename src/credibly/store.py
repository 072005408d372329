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
from credibly.posterior import DensityPosterior, DrawsPosterior, Model, Posterior, Record
from credibly.priors import PRIORS
from credibly.specs import from_spec, kinds_of, to_spec
from credibly.stored_draws import StoredDraws

FORMAT = "credibly-run"
FORMAT_VERSION = 1
SHARD_BYTES = 2**28
POSTERIORS: dict[str, type[Posterior]] = {p.kind: p for p in (DrawsPosterior, DensityPosterior, GaussianPosterior, DropoutPosterior)}


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
    net: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    device: torch.device | str | None = None,
) -> Posterior:
    """The posterior of a run folder, on a network of the same shape (its weights do not matter: the stored ones are used).

    Args:
        path: the folder.
        net: the network that was fitted, or a new one built by the same code. None builds it from the folder's description,
            which there is for networks made of layers that torch and credibly come with.
        likelihood: only for one of your own class, which the folder cannot describe.
        device: where to put it; by default where the network is.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    record = Record(**{**manifest["record"], "status": manifest.get("status", manifest["record"]["status"])})
    if manifest["kind"] == "density":
        place = torch.device(device or "cpu")
        return DensityPosterior.from_tensors(None, _tensors(folder, manifest, place, None)[1], record, None)
    net = network_of(manifest, "Pass the network that was fitted") if net is None else net
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
    fixed, tensors = _tensors(folder, manifest, layout.device, layout.dtype)
    layout.set_fixed(fixed)
    own = likelihood or from_spec(manifest["likelihood"], kinds_of(*LIKELIHOODS.values(), *PRIORS.values()))
    forward = Forward(layout, "looped" if manifest["looped"] else "batched", blank_row(manifest["row"], layout.device))
    model = Model(layout, own, forward, manifest["row"])
    return POSTERIORS[manifest["kind"]].from_tensors(model, tensors, record, manifest["description"])


def network_of(manifest: dict[str, Any], advice: str) -> nn.Module:
    """The network that a manifest describes, or an error with advice where it describes none."""
    if manifest.get("network") is None:
        raise StoreError(f"net: the folder does not describe the network (it is of a class of its own). {advice}")
    from credibly.blueprint import build_network

    return build_network(manifest["network"])


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
    needed = {"kind", "record", "files"}
    if manifest.get("kind") != "density":
        needed |= {"layout", "random", "dtype", "likelihood", "row", "looped"}
    missing = needed - set(manifest)
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
    fixed = posterior.layout.fixed() if posterior._model is not None else {}
    shards = {"fixed.safetensors": {f"fixed/{k}": v for k, v in fixed.items()}}
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


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of one file."""
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise StoreError(f"path: {path.name} in {os.fspath(path.parent)!r} cannot be read ({error})") from error


def _tensors(
    folder: Path, manifest: dict[str, Any], device: torch.device, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The fixed tensors by name, and those of the posterior, whose shards are joined; streamed draws stay on the disk."""
    streamed = bool(manifest.get("streamed"))
    beside = ("state-", "data.", "initial.", "start.", *(("draws-",) if streamed else ()))
    groups: dict[str, dict[str, Tensor]] = {"fixed": {}}
    for file in sorted(f for f in manifest["files"] if not f.startswith(beside)):
        for key, tensor in load_tensors(folder / file, device).items():
            group, name = key.split("/", 1)
            groups.setdefault(group, {})[name] = tensor
    fixed = groups.pop("fixed")
    tensors: dict[str, Any] = {
        name: torch.cat([shards[k] for k in sorted(shards)], 1) if len(shards) > 1 else next(iter(shards.values()))
        for name, shards in groups.items()
    }
    if streamed:
        tensors |= _streamed(folder, manifest, tensors, device, dtype)
    return fixed, tensors


def _streamed(
    folder: Path, manifest: dict[str, Any], tensors: dict[str, Any], device: torch.device, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Draws in their shards and, of a run that has not ended, those beside them in its last checkpoint."""
    files = sorted(f for f in manifest["files"] if f.startswith("draws-"))
    state = load_tensors(folder / manifest["state"]) if manifest.get("state") else {}
    tail = state.get("recorder.draws")
    if not files and tail is None:
        raise StoreError(f"path: {os.fspath(folder)!r} has no draws yet. Go on with it by `credibly resume`")
    if tail is not None:
        names = manifest["noted"]
        noted = {f"stat.{name}": state["recorder.noted"][..., i] for i, name in enumerate(names)}
        tensors = {k: torch.cat([tensors[k], v.to(device)], 1) if k in tensors else v for k, v in noted.items()}
    return {**tensors, "draws": StoredDraws(folder, files, dtype=dtype or torch.float64, device=device, tail=tail)}


def _manifest(posterior: Posterior, folder: Path, files: list[str]) -> dict[str, Any]:
    facts = {file: {"bytes": (folder / file).stat().st_size, "sha256": _sha256(folder / file)} for file in files}
    return {
        **header(posterior._model, posterior.kind, posterior.record),
        "description": posterior.description(),
        "files": facts,
    }


def header(model: Model | None, kind: str, record: Record) -> dict[str, Any]:
    """What a manifest says of a run beside its files; without a model for a density that is not a network."""
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
            "looped": model.forward.looped,
            "likelihood": to_spec(model.likelihood),
            "network": None,
        }
    return facts


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
