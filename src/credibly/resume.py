"""Going on with a run that was stopped: by Ctrl-C, by a lost machine, or by `kill -9` at any moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from credibly.errors import StoreError
from credibly.likelihoods import LIKELIHOODS
from credibly.methods import METHODS
from credibly.methods.sampler import resume_sampler, same_problem
from credibly.posterior import SampledPosterior
from credibly.priors import PRIORS
from credibly.problem import Problem, Tempering
from credibly.run_folder import RunFolder
from credibly.specs import from_spec, kinds_of
from credibly.store import load, load_tensors, network_of, read_manifest
from credibly.target import Density


def resume(path: str | os.PathLike[str], problem: Problem | Density | None = None, *, progress: bool | None = None) -> SampledPosterior:
    """Goes on with a run folder to its end; the draws are those of a run that was never stopped, bit for bit.

    Args:
        path: the folder that a sampler's `fit(..., out=path)` began.
        problem: the problem it was begun with. None builds it again from the folder, which works for networks made of
            layers that torch and credibly come with; a network of your own class, or a `Density`, has to be passed.
        progress: whether to show a progress line; None shows it on a terminal.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    name = os.fspath(path)
    if not manifest.get("streamed"):
        raise StoreError(f"path: {name!r} holds a fit that was saved when it had ended; there is nothing to go on with")
    if manifest.get("status") == "complete":
        return load(path, problem.layout.module if isinstance(problem, Problem) else None)  # type: ignore[return-value]
    problem = problem if problem is not None else stored_problem(folder, manifest)
    same_problem(problem, manifest, name)
    if isinstance(problem, Problem):
        fixed = load_tensors(folder / "fixed.safetensors")
        mine = problem.layout.fixed()
        if any(not torch.equal(fixed[f"fixed/{k}"], v.cpu()) for k, v in mine.items()):
            raise StoreError(f"path: the parameters that are not random, or the buffers, differ from those of {name!r}")
    settings = dict(manifest["record"]["settings"])
    if "start.safetensors" in manifest["files"]:
        settings["init"] = "prior"  # the place of a tensor or a posterior, which has been written out
    method: Any = from_spec(settings, kinds_of(*METHODS.values()))
    if "start.safetensors" in manifest["files"]:
        object.__setattr__(method, "init", load_tensors(folder / "start.safetensors")["start"])
    with RunFolder(folder, manifest) as mine_now:
        # Another process may have gone on between our reading and our lock.
        mine_now.manifest = read_manifest(folder)
        return resume_sampler(method, problem, manifest["record"]["seed"], mine_now, progress)


def stored_problem(folder: Path, manifest: dict[str, Any]) -> Problem:
    """The problem of a folder, from the description of its network and the data kept in it."""
    name = os.fspath(folder)
    how = f'Pass the problem: credibly.resume("{name}", problem), or `credibly resume {name} --problem your_script.py:problem`'
    if manifest["kind"] == "density":
        raise StoreError(f"path: {name!r} is of a plain density, which a folder cannot describe. {how}")
    if "data.safetensors" not in manifest["files"]:
        raise StoreError(f"path: the data of {name!r} were too large to be kept in it. {how}")
    net = network_of(manifest, f"{how}")
    data = load_tensors(folder / "data.safetensors")
    initial = load_tensors(folder / "initial.safetensors")["network"]
    fixed = {k.removeprefix("fixed/"): v for k, v in load_tensors(folder / "fixed.safetensors").items()}
    kinds = kinds_of(*LIKELIHOODS.values(), *PRIORS.values())
    form, parts = manifest["row"]["form"], manifest["row"]["parts"]
    columns = [data[f"x/{i}"] for i in range(len(parts))]
    x: Any = dict(zip((p["name"] for p in parts), columns)) if form == "dict" else tuple(columns) if form == "tuple" else columns[0]
    stored = manifest["record"]
    values = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.no_grad():
        place = 0
        for entry in manifest["layout"]:
            if entry["role"] == "random":
                tensor = values[entry["name"]]
                tensor.copy_(initial[place : place + tensor.numel()].reshape(tensor.shape))
                place += tensor.numel()
            elif entry["role"] == "fixed":
                values[entry["name"]].copy_(fixed[entry["name"]])
    return Problem(
        net, (x, data["y"]), from_spec(manifest["likelihood"], kinds), from_spec(stored["prior"], kinds),
        temperature=Tempering(**stored["tempering"]), random=tuple(manifest["random"]), plan=manifest["plan"], micro_batch=manifest["micro_batch"],
    )  # fmt: skip
