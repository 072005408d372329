"""Reading a run folder back: `credibly.load`. Only known classes are built; nothing in a folder is ever executed."""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credibly import posterior as package
from credibly.core.inputs import blank_row, tensors_of
from credibly.errors import StoreError
from credibly.forward import Forward, Plan
from credibly.frozen.features import Frozen
from credibly.likelihoods import Likelihood
from credibly.networks.blueprint import build_network
from credibly.networks.copying import copy_module
from credibly.networks.layout import Layout, layout_mismatch
from credibly.networks.refusals import unwrapped
from credibly.networks.statistics import folded
from credibly.posterior.base import KINDS, Posterior
from credibly.posterior.draws import DensityPosterior
from credibly.posterior.model import Model
from credibly.posterior.stored_likelihood import stored_likelihood
from credibly.storage.guarding import as_store_errors
from credibly.storage.manifest import load_tensors, read_with_state
from credibly.storage.record import Record
from credibly.storage.run_folder import RESUME_FILES, resume_command
from credibly.storage.sealed import read_facts
from credibly.storage.stored_draws import StoredDraws, join_shards

# Each module of this package registers its posterior classes when it is imported.
for _module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
    importlib.import_module(_module.name)
POSTERIORS = KINDS

DTYPES = {str(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def load(
    path: str | os.PathLike[str],
    net: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    device: torch.device | str | None = None,
) -> Posterior:
    """Load the posterior of a run folder.

    Args:
        path: the folder.
        net: the fitted network, or a new one built by the same code; its weights are replaced by the stored ones. None
            rebuilds it from the folder's description, which exists for networks made of layers of torch and credibly.
        likelihood: required only for `from_distribution` and classes of your own, whose code the folder does not hold.
        device: where to put it; the network's device by default.
    """
    folder = Path(path)
    # A fit to a table keeps its posterior, which is of standardised columns, in a subfolder.
    if (folder / "table.json").is_file():
        read_facts(folder)
        folder = folder / "posterior"
    manifest, state = read_with_state(folder)
    with as_store_errors(f"path: the run in {os.fspath(path)!r}"):
        return _build(path, folder, manifest, state, net, likelihood, device)


def _build(
    path: str | os.PathLike[str],
    folder: Path,
    manifest: dict[str, Any],
    state: dict[str, Tensor],
    net: nn.Module | None,
    likelihood: Likelihood | None,
    device: torch.device | str | None,
) -> Posterior:
    """Build the posterior that a manifest describes from the files of its folder."""
    if manifest["kind"] == "training":
        name = os.fspath(path)
        raise StoreError(f"path: the fit in {name!r} is not finished. Resume it with {resume_command(name)}")
    if manifest["kind"] not in POSTERIORS:
        raise StoreError(f"path: the manifest of {os.fspath(path)!r} is altered (unknown: {manifest['kind']!r})")
    record = Record(**{**manifest["record"], "status": manifest.get("status", manifest["record"]["status"])})
    if manifest["kind"] == DensityPosterior.kind:
        dtype = DTYPES.get(str(manifest.get("dtype")), torch.float64)
        _, tensors = _tensors(folder, manifest, state, torch.device(device or "cpu"), dtype)
        return DensityPosterior.from_tensors(None, tensors, record, None)
    net = network_of(manifest, "Pass the network that was fitted") if net is None else net
    if record.history.get("from_trained"):
        net = folded(unwrapped(net))
    if device is not None:
        net = copy_module(net).to(device)
    extra = {e["name"]: tuple(e["shape"]) for e in manifest["layout"] if e["role"] == "extra"}
    layout = Layout(net, tuple(manifest["random"]), extra, trained=True)
    if layout.signature() != manifest["layout"]:
        mismatch = layout_mismatch(layout.signature(), manifest["layout"])
        raise StoreError(f"{mismatch}. Pass the network that was fitted")
    if str(layout.dtype) != manifest["dtype"]:
        raise StoreError(
            f"net is {layout.dtype}, the stored run {manifest['dtype']}. Convert it with net.to({manifest['dtype']})"
        )
    row = blank_row(manifest["row"], layout.device)
    if layout.mixed:
        layout.input_dtype = next((t.dtype for _, t in tensors_of(row) if t.is_floating_point()), layout.input_dtype)
    if manifest.get("own_gradients"):
        layout.record_own_gradients()
    fixed, tensors = _tensors(folder, manifest, state, layout.device, layout.dtype)
    layout.set_fixed(fixed)
    own = stored_likelihood(manifest["likelihood"], likelihood)
    plan: Plan = "looped" if manifest["looped"] else "batched"
    forward = Forward(layout, plan, row, precision=manifest.get("precision"))
    apart = manifest.get("frozen_body")
    own_plan: Plan = "looped" if apart and apart["looped"] else "batched"
    frozen = Frozen.of(layout, forward, row, own_plan) if apart else None
    model = Model(layout, own, forward if frozen is None else frozen.forward, manifest["row"], frozen)
    return POSTERIORS[manifest["kind"]].from_tensors(model, tensors, record, manifest.get("description"))


def network_of(manifest: dict[str, Any], advice: str) -> nn.Module:
    """Build the network that a manifest describes. Raise with the given advice if it describes none."""
    if manifest.get("network") is None:
        raise StoreError(f"net: the folder does not describe the network (it is more than layers in a row). {advice}")
    # Twice as many: statistics of normalisation layers that were folded into their weights are not in the layout.
    most = 2 * sum(math.prod(entry["shape"]) for entry in manifest["layout"]) + 1024
    return build_network(manifest["network"], most)


def _tensors(
    folder: Path, manifest: dict[str, Any], state: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the fixed tensors and the posterior's, by name. Shards are joined; streamed draws stay on disk."""
    streamed = bool(manifest.get("streamed"))
    skipped = (*RESUME_FILES, *(("draws-",) if streamed else ()))
    groups: dict[str, dict[str, Tensor]] = {"fixed": {}}
    for file in sorted(f for f in manifest["files"] if not f.startswith(skipped)):
        # Statistics per draw stay on the CPU, as after a fit.
        on_cpu = file.startswith(("stats-", "stat."))
        for key, tensor in load_tensors(folder / file, "cpu" if on_cpu else device).items():
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
    folder: Path,
    manifest: dict[str, Any],
    state: dict[str, Tensor],
    tensors: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return draws in their shards and, for an unfinished run, those in its last checkpoint."""
    files = sorted(f for f in manifest["files"] if f.startswith("draws-"))
    tail = state.get("recorder.draws")
    if not files and tail is None:
        name = os.fspath(folder)
        raise StoreError(f"path: {name!r} has no draws yet. If it is not running, resume it: {resume_command(name)}")
    if tail is not None:
        names = manifest["noted"]
        statistics = {f"stat.{name}": state["recorder.noted"][..., i] for i, name in enumerate(names)}
        tensors = {k: torch.cat([tensors[k], v], 1) if k in tensors else v for k, v in statistics.items()}
    return {**tensors, "draws": StoredDraws(folder, files, dtype=dtype, device=device, tail=tail)}
