"""Resume a run that was stopped: by Ctrl-C, by a lost machine, or by `kill -9` at any moment."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from credibly.core.specs import from_spec, kinds_of, to_spec
from credibly.distributed.world import current
from credibly.errors import InputError, StoreError
from credibly.gaussians.mass import mass_of_tensors
from credibly.inference.density import Density
from credibly.inference.sampling.folder import open_folder
from credibly.inference.sampling.identity import arithmetic, check_fixed, check_same
from credibly.inference.sampling.mass import ADAPTED
from credibly.inference.sampling.run import SamplingMethod
from credibly.inference.target import to_target
from credibly.inference.training.folder_journal import KIND
from credibly.inference.training.method import TrainingMethod
from credibly.likelihoods import LIKELIHOODS
from credibly.likelihoods.base import IndependentTargets
from credibly.methods import METHODS
from credibly.posterior.base import Posterior
from credibly.posterior.loading import load, network_of
from credibly.priors.elementwise import PRIORS
from credibly.problem import Problem, Tempering
from credibly.storage.guarding import as_store_errors
from credibly.storage.manifest import load_tensors, parse_manifest
from credibly.storage.replacing import LOCK
from credibly.storage.run_folder import OWN_FILES, RunFolder, resume_command

log = logging.getLogger("credibly")


def resume(
    path: str | os.PathLike[str], problem: Problem | Density | None = None, *, progress: bool | None = None
) -> Posterior:
    """Run a stopped fit to its end; the result is bit-for-bit that of an uninterrupted run.

    That holds on the same kind of machine with the same torch version and number of threads. Otherwise rounding may
    differ, and a log line reports it. A finished run is loaded.

    Args:
        path: the folder that `fit(..., out=path)` wrote to.
        problem: the problem it was started with. None rebuilds it from the folder, which works for networks made of
            layers that torch and credibly provide; a network of your own class, or a `Density`, must be passed.
        progress: whether to show a progress bar; None shows it on a terminal and in a notebook.
    """
    return resume_with_problem(path, problem, progress=progress)[0]


def resume_with_problem(
    path: str | os.PathLike[str], problem: Problem | Density | None, *, progress: bool | None
) -> tuple[Posterior, Problem | Density | None]:
    """Resume and return posterior and problem; the problem is None if it was neither passed nor needed."""
    if problem is not None:
        to_target(problem)
    folder, name = Path(path), os.fspath(path)
    if resumable_manifest(folder)["status"] == "complete":
        return _load_complete(folder, problem), problem
    world = current()
    # The manifest is read again under the lock: another process may have resumed the run before we acquired it.
    with world.propagate_errors(), open_folder(path, world) as run:
        if run.manifest.get("status", "complete") != "complete":
            with as_store_errors(f"path: the run in {name!r}"):
                problem = problem if problem is not None else stored_problem(folder, run.manifest)
                check_same(problem, run.manifest, name)
                if isinstance(problem, Problem):
                    check_fixed(problem, load_tensors(folder / "fixed.safetensors"), name)
                _log_differences(problem, run.manifest)
                method = _method(folder, run.manifest)
            seed = run.manifest["record"]["seed"]
            if isinstance(method, SamplingMethod):
                return method.resume(problem, seed, run, progress), problem
            if isinstance(problem, Density):
                raise InputError("problem", "must be a credibly.Problem, got a Density")
            return method.resume(problem, seed, run, progress), problem
    return _load_complete(folder, problem), problem


def resumable_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a fit that wrote checkpoints, without checking its files. Raise for other folders."""
    manifest = parse_manifest(folder)
    if not manifest.get("streamed") and manifest["kind"] != KIND:
        raise StoreError(
            f"path: {os.fspath(folder)!r} holds a fit that was saved after it finished; there is nothing to resume"
        )
    return manifest


def _load_complete(folder: Path, problem: Problem | Density | None) -> Posterior:
    manifest = parse_manifest(folder)
    net = problem.layout.module if isinstance(problem, Problem) else None
    own = (
        problem.likelihood
        if isinstance(problem, Problem) and to_spec(problem.likelihood) == manifest["likelihood"]
        else None
    )
    posterior = load(folder, net, likelihood=own)
    files = manifest["files"]
    if any(p.name == LOCK or (OWN_FILES.fullmatch(p.name) and p.name not in files) for p in folder.iterdir()):
        # The run was killed after its last commit.
        with suppress(StoreError), RunFolder(folder, {"files": files}) as run:
            run.sweep()
    return posterior


def _method(folder: Path, manifest: dict[str, Any]) -> SamplingMethod | TrainingMethod[Any]:
    """Return the method with the settings it had."""
    if manifest["kind"] == KIND:
        return _training_method(folder, manifest)
    # Starting points that were a tensor or a posterior are in a separate file.
    stored = "start.safetensors" in manifest["files"]
    settings = {**manifest["record"]["settings"], **({"init": "prior"} if stored else {})}
    # So is a mass that was a posterior.
    given = "mass_start" if settings.get("mass") in ADAPTED else "mass"
    if "mass.safetensors" in manifest["files"]:
        settings[given] = None if given == "mass_start" else "prior"
    samplers = (method for method in METHODS.values() if issubclass(method, SamplingMethod))
    method: SamplingMethod = from_spec(settings, kinds_of(*samplers))
    if stored:
        object.__setattr__(method, "init", load_tensors(folder / "start.safetensors")["start"])
    if "mass.safetensors" in manifest["files"]:
        mass = mass_of_tensors(load_tensors(folder / "mass.safetensors"), torch.device("cpu"))
        object.__setattr__(method, given, mass)
    return method


def _training_method(folder: Path, manifest: dict[str, Any]) -> TrainingMethod[Any]:
    """Return a method that trains with the settings it had; starting points that were a tensor are in a file."""
    settings, stored = dict(manifest["record"]["settings"]), "start.safetensors" in manifest["files"]
    if stored:
        settings.pop("init", None)
    trains = (method for method in METHODS.values() if issubclass(method, TrainingMethod))
    method: TrainingMethod[Any] = from_spec(settings, kinds_of(*trains))
    if stored:
        object.__setattr__(method, "init", load_tensors(folder / "start.safetensors")["start"])
    return method


def _log_differences(problem: Problem | Density, manifest: dict[str, Any]) -> None:
    """Log what may keep the draws from being bit-for-bit those of an uninterrupted run."""
    then, now = manifest["arithmetic"], arithmetic(problem)
    for what in {**then, **now}:
        if then.get(what) != now.get(what):
            log.warning(
                "the run was started with %s %s and resumes with %s: draws may differ in rounding",
                what,
                then.get(what),
                now.get(what),
            )


def stored_problem(folder: Path, manifest: dict[str, Any]) -> Problem:
    """Rebuild the problem of a folder from the description of its network and the stored data.

    The values of its random parameters do not matter: a sampler that has not started restores those it was started
    with.
    """
    name = os.fspath(folder)
    command = f"{resume_command(name)[:-1]} --problem your_script.py:problem`"
    how = f"Pass the problem: credibly.resume({name!r}, problem), or {command}"
    if manifest["kind"] == "density":
        raise StoreError(f"path: {name!r} is a run on a plain density, which a folder cannot describe. {how}")
    if "data.safetensors" not in manifest["files"]:
        raise StoreError(f"path: the data of {name!r} were too large to be stored in it. {how}")
    net = network_of(manifest, how)
    kinds = kinds_of(*LIKELIHOODS.values(), *PRIORS.values())
    stored = manifest["record"]
    if isinstance(stored["prior"], dict) and stored["prior"].get("kind") == "gaussian_prior.GaussianPrior":
        raise StoreError(
            f"path: the prior of {name!r} is a posterior, of which the folder stores only a checksum. {how}"
        )
    try:
        likelihood, prior = from_spec(manifest["likelihood"], kinds), from_spec(stored["prior"], kinds)
    except StoreError as error:
        raise StoreError(f"path: likelihood or prior of {name!r} are not credibly's own: {error}. {how}") from error
    try:
        device = torch.device(manifest["arithmetic"]["device"])
        net.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise StoreError(
            f"path: {name!r} was started on {manifest['arithmetic']['device']}, which is not available ({reason}). "
            f"{how}"
        ) from error
    # Copied: tensors in a file may be unaligned, and products of unaligned operands round differently.
    data = {name: values.clone() for name, values in load_tensors(folder / "data.safetensors", device).items()}
    fixed = load_tensors(folder / "fixed.safetensors")
    values = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.no_grad():
        for entry in manifest["layout"]:
            if entry["role"] == "fixed":
                values[entry["name"]].copy_(fixed[f"fixed/{entry['name']}"])
    form, parts = manifest["row"]["form"], manifest["row"]["parts"]
    columns = [data[f"x/{i}"] for i in range(len(parts))]
    x: Any = columns[0]
    if form == "dict":
        x = dict(zip((p["name"] for p in parts), columns))
    elif form == "tuple":
        x = tuple(columns)
    # As the user passed it.
    y = likelihood.restore(data["y"]) if isinstance(likelihood, IndependentTargets) else data["y"]
    try:
        return Problem(
            net,
            (x, y),
            likelihood,
            prior,
            sample_weight=data.get("sample_weight"),
            temperature=Tempering(**stored["tempering"]),
            random=tuple(manifest["random"]),
            plan=manifest["plan"],
            micro_batch=manifest["micro_batch"],
            precision=manifest["precision"],
        )
    except InputError as error:
        raise StoreError(f"path: the problem of {name!r} cannot be rebuilt ({error}). {how}") from error
