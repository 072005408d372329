"""The run folder: safetensors shards and a JSON manifest, written beside and renamed into place; nothing is ever executed.

run/
  manifest.json            format, versions, model, method and its settings, seed, data fingerprint, checksums
  fixed.safetensors        parameters that are not random, and buffers
  draws-00000.safetensors  the posterior's tensors, in shards along the draws
and, while a sampler is at work or waits to be resumed
  state-00000.safetensors  where it stands, and the draws since the last shard
  data, initial, start     what the problem and the starting points were made of
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from credibly import __version__
from credibly.core.inputs import blank_row
from credibly.core.specs import from_spec, kinds_of, to_spec
from credibly.errors import StoreError
from credibly.forward import Forward, Plan
from credibly.likelihoods import LIKELIHOODS, Likelihood
from credibly.networks.blueprint import build_network, describe_network
from credibly.networks.layout import Layout
from credibly.posterior.base import DensityPosterior, DrawsPosterior, Model, Posterior
from credibly.posterior.dropout import DropoutPosterior
from credibly.posterior.gaussian import GaussianPosterior
from credibly.posterior.laplace import LaplacePosterior
from credibly.priors.elementwise import PRIORS
from credibly.storage.manifest import FORMAT, FORMAT_VERSION, load_tensors, read_with_state
from credibly.storage.record import Record
from credibly.storage.run_folder import RESUME_FILES, RunFolder, resume_command, write_tensors
from credibly.storage.stored_draws import StoredDraws, join_shards

SHARD_BYTES = 2**28
DTYPES = {str(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
POSTERIORS: dict[str, type[Posterior]] = {
    p.kind: p for p in (DrawsPosterior, DensityPosterior, GaussianPosterior, DropoutPosterior, LaplacePosterior)
}


def save(posterior: Posterior, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a run folder under a temporary name and renames it; a reader sees all of it or nothing."""
    target = Path(path)
    if target.exists() and not overwrite:
        raise StoreError(f"path: {os.fspath(path)!r} exists already. Choose another folder, or pass overwrite=True")
    if target.exists() and not (target / "manifest.json").is_file():
        raise StoreError(
            f"path: {os.fspath(path)!r} exists and is not a run folder, so it is not overwritten. Choose another"
        )
    if target.exists():
        RunFolder(path, {}).close()  # refuses a folder that a sampler is writing to
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        facts = header(posterior._model, posterior.kind, posterior.record)
        manifest = {**facts, "description": posterior.description(), "files": _write_files(posterior, draft)}
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
    if (
        folder / "table.json"
    ).is_file():  # a fit to a table keeps its posterior, which knows standardised columns, inside
        folder = folder / "posterior"
    manifest, state = read_with_state(folder)
    if manifest["kind"] not in POSTERIORS:
        raise StoreError(f"path: the manifest of {os.fspath(path)!r} is altered (unknown: {manifest['kind']!r})")
    record = Record(**{**manifest["record"], "status": manifest.get("status", manifest["record"]["status"])})
    if manifest["kind"] == "density":
        place, dtype = torch.device(device or "cpu"), DTYPES.get(str(manifest.get("dtype")), torch.float64)
        return DensityPosterior.from_tensors(None, _tensors(folder, manifest, state, place, dtype)[1], record, None)
    net = network_of(manifest, "Pass the network that was fitted") if net is None else net
    if device is not None:
        net = copy.deepcopy(net).to(device)
    extra = {e["name"]: tuple(e["shape"]) for e in manifest["layout"] if e["role"] == "extra"}
    layout = Layout(net, tuple(manifest["random"]), extra)
    if layout.signature() != manifest["layout"]:
        raise StoreError(difference(layout.signature(), manifest["layout"]))
    if str(layout.dtype) != manifest["dtype"]:
        raise StoreError(
            f"net is {layout.dtype}, the stored run {manifest['dtype']}. Convert it, as with net.to({manifest['dtype']})"
        )
    fixed, tensors = _tensors(folder, manifest, state, layout.device, layout.dtype)
    layout.set_fixed(fixed)
    own = likelihood or from_spec(manifest["likelihood"], kinds_of(*LIKELIHOODS.values(), *PRIORS.values()))
    plan: Plan = "looped" if manifest["looped"] else "batched"
    forward = Forward(layout, plan, blank_row(manifest["row"], layout.device), precision=manifest.get("precision"))
    model = Model(layout, own, forward, manifest["row"])
    return POSTERIORS[manifest["kind"]].from_tensors(model, tensors, record, manifest.get("description"))


def network_of(manifest: dict[str, Any], advice: str) -> nn.Module:
    """The network that a manifest describes, or an error with advice where it describes none."""
    if manifest.get("network") is None:
        raise StoreError(f"net: the folder does not describe the network (it is more than layers in a row). {advice}")
    return build_network(manifest["network"])


def _write_files(posterior: Posterior, folder: Path) -> dict[str, Any]:
    """Writes the shards; their sizes and checksums by name."""
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
    return {file: write_tensors(folder / file, tensors) for file, tensors in shards.items()}


def _tensors(
    folder: Path, manifest: dict[str, Any], state: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The fixed tensors by name, and those of the posterior, whose shards are joined; streamed draws stay on the disk."""
    streamed = bool(manifest.get("streamed"))
    beside = (*RESUME_FILES, *(("draws-",) if streamed else ()))
    groups: dict[str, dict[str, Tensor]] = {"fixed": {}}
    for file in sorted(f for f in manifest["files"] if not f.startswith(beside)):
        noted = file.startswith(
            ("stats-", "stat.")
        )  # what was noted of each draw stays on the processor, as a fit leaves it
        for key, tensor in load_tensors(folder / file, "cpu" if noted else device).items():
            group, name = key.split("/", 1)
            groups.setdefault(group, {})[name] = tensor
    fixed = groups.pop("fixed")
    tensors: dict[str, Any] = {
        name: join_shards(shards) if len(shards) > 1 else next(iter(shards.values())) for name, shards in groups.items()
    }
    if streamed:
        tensors |= _streamed(folder, manifest, state, tensors, device, dtype)
    return fixed, tensors


def _streamed(
    folder: Path, manifest: dict[str, Any], state: dict[str, Tensor], tensors: dict[str, Any], device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """Draws in their shards and, of a run that has not ended, those beside them in its last checkpoint."""
    files = sorted(f for f in manifest["files"] if f.startswith("draws-"))
    tail = state.get("recorder.draws")
    if not files and tail is None:
        name = os.fspath(folder)
        raise StoreError(
            f"path: {name!r} has no draws yet. Where it is not at work, go on with it by {resume_command(name)}"
        )
    if tail is not None:
        names = manifest["noted"]
        noted = {f"stat.{name}": state["recorder.noted"][..., i] for i, name in enumerate(names)}
        tensors = {k: torch.cat([tensors[k], v], 1) if k in tensors else v for k, v in noted.items()}
    return {**tensors, "draws": StoredDraws(folder, files, dtype=dtype, device=device, tail=tail)}


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
            "precision": model.forward.precision,
            "network": describe_network(model.layout.module),
        }
    return facts


def difference(mine: list[dict[str, Any]], stored: list[dict[str, Any]]) -> str:
    """What tells two signatures apart, and what to do."""
    here, there = ({e["name"]: tuple(e["shape"]) for e in side} for side in (mine, stored))
    for name in [*there, *here]:
        if here.get(name) != there.get(name):
            found = f"shape {here[name]}" if name in here else "no such tensor"
            return f"net: {name} has {found}, the stored run has {there.get(name, 'no such tensor')}. Pass the network that was fitted"
    return "net: its tensors have other roles than in the stored run. Pass the network that was fitted"


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text + "\n")
        handle.flush()
        os.fsync(handle.fileno())
