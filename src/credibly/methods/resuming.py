"""Going on with a run that was stopped: by Ctrl-C, by a lost machine, or by `kill -9` at any moment."""

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
from credibly.inference.density import Density
from credibly.inference.sampling.identity import arithmetic, check_fixed, check_same
from credibly.inference.sampling.run import open_together, resume_sampler
from credibly.inference.target import to_target
from credibly.likelihoods import LIKELIHOODS
from credibly.likelihoods.base import IndependentTargets
from credibly.methods import METHODS
from credibly.posterior.base import SampledPosterior
from credibly.posterior.store import load, network_of
from credibly.priors.elementwise import PRIORS
from credibly.problem import Problem, Tempering
from credibly.storage.manifest import load_tensors, parse_manifest
from credibly.storage.run_folder import LOCK, OWN_FILES, RunFolder, resume_command

log = logging.getLogger("credibly")


def resume(
    path: str | os.PathLike[str], problem: Problem | Density | None = None, *, progress: bool | None = None
) -> SampledPosterior:
    """Goes on with a run folder to its end; the draws are those of a run that was never stopped, bit for bit.

    That holds on the same kind of machine with the same torch and number of threads; with others rounding may differ, and a
    line in the log says so. A run that had ended is loaded.

    Args:
        path: the folder that a sampler's `fit(..., out=path)` began.
        problem: the problem it was begun with. None builds it again from the folder, which works for networks made of
            layers that torch and credibly come with; a network of your own class, or a `Density`, has to be passed.
        progress: whether to show a progress line; None shows it on a terminal.
    """
    return go_on(path, problem, progress=progress)[0]


def go_on(
    path: str | os.PathLike[str], problem: Problem | Density | None, *, progress: bool | None
) -> tuple[SampledPosterior, Problem | Density | None]:
    """The same, with the problem beside the posterior; None where it was neither passed nor needed."""
    if problem is not None:
        to_target(problem)
    folder, name = Path(path), os.fspath(path)
    if sampled(folder)["status"] == "complete":
        return _ended(folder, problem), problem
    world = current()
    # The manifest is read again under the lock: another process may have gone on with it until we had that.
    with world.propagate_errors(), open_together(path, world) as run:
        if run.manifest["status"] != "complete":
            problem = problem if problem is not None else stored_problem(folder, run.manifest)
            check_same(problem, run.manifest, name)
            if isinstance(problem, Problem):
                check_fixed(problem, load_tensors(folder / "fixed.safetensors"), name)
            _tell_differences(problem, run.manifest)
            method = _method(folder, run.manifest)
            return resume_sampler(method, problem, run.manifest["record"]["seed"], run, progress), problem
    return _ended(folder, problem), problem


def sampled(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that a sampler wrote, whose files have not been looked at; others are refused."""
    manifest = parse_manifest(folder)
    if not manifest.get("streamed"):
        raise StoreError(
            f"path: {os.fspath(folder)!r} holds a fit that was saved when it had ended; there is nothing to go on with"
        )
    return manifest


def _ended(folder: Path, problem: Problem | Density | None) -> SampledPosterior:
    manifest = parse_manifest(folder)
    net = problem.layout.module if isinstance(problem, Problem) else None
    own = (
        problem.likelihood
        if isinstance(problem, Problem) and to_spec(problem.likelihood) == manifest["likelihood"]
        else None
    )
    posterior = load(folder, net, likelihood=own)
    assert isinstance(posterior, SampledPosterior)
    files = manifest["files"]
    if any(p.name == LOCK or (OWN_FILES.fullmatch(p.name) and p.name not in files) for p in folder.iterdir()):
        with suppress(StoreError), RunFolder(folder, {"files": files}) as run:  # killed after its last commit
            run.sweep()
    return posterior


def _method(folder: Path, manifest: dict[str, Any]) -> Any:
    """The sampler with the settings it had."""
    written = "start.safetensors" in manifest["files"]  # in the place of a tensor or a posterior
    settings = {**manifest["record"]["settings"], **({"init": "prior"} if written else {})}
    method: Any = from_spec(settings, kinds_of(*(m for m in METHODS.values() if hasattr(m, "process"))))
    if written:
        object.__setattr__(method, "init", load_tensors(folder / "start.safetensors")["start"])
    return method


def _tell_differences(problem: Problem | Density, manifest: dict[str, Any]) -> None:
    """A line where the draws will be as good as ever, but not the same bits as without the stop."""
    then, now = manifest["arithmetic"], arithmetic(problem)
    for what in {**then, **now}:
        if then.get(what) != now.get(what):
            log.warning(
                "the run was begun with %s %s and goes on with %s: its draws may differ in rounding from those of a run in one piece",
                what, then.get(what), now.get(what),
            )  # fmt: skip


def stored_problem(folder: Path, manifest: dict[str, Any]) -> Problem:
    """The problem of a folder, from the description of its network and the data kept in it.

    Its random parameters have values of their own: a sampler that is yet to start sets those that it was begun with.
    """
    name = os.fspath(folder)
    how = f"Pass the problem: credibly.resume({name!r}, problem), or {resume_command(name)[:-1]} --problem your_script.py:problem`"
    if manifest["kind"] == "density":
        raise StoreError(f"path: {name!r} is of a plain density, which a folder cannot describe. {how}")
    if "data.safetensors" not in manifest["files"]:
        raise StoreError(f"path: the data of {name!r} were too large to be kept in it. {how}")
    net = network_of(manifest, how)
    kinds = kinds_of(*LIKELIHOODS.values(), *PRIORS.values())
    stored = manifest["record"]
    if isinstance(stored["prior"], dict) and stored["prior"].get("kind") == "gaussian_prior.GaussianPrior":
        raise StoreError(f"path: the prior of {name!r} is a posterior, of which a folder keeps only a checksum. {how}")
    try:
        likelihood, prior = from_spec(manifest["likelihood"], kinds), from_spec(stored["prior"], kinds)
    except StoreError as error:
        raise StoreError(f"path: likelihood or prior of {name!r} are not this package's own: {error}. {how}") from error
    try:
        device = torch.device(manifest["arithmetic"]["device"])
        net.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise StoreError(
            f"path: {name!r} was begun on {manifest['arithmetic']['device']}, which is not here ({reason}). {how}"
        ) from error
    # Copied: in a file they begin at any byte, and products of numbers that are not aligned round otherwise.
    data = {name: values.clone() for name, values in load_tensors(folder / "data.safetensors", device).items()}
    fixed = load_tensors(folder / "fixed.safetensors")
    values = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.no_grad():
        for entry in manifest["layout"]:
            if entry["role"] == "fixed":
                values[entry["name"]].copy_(fixed[f"fixed/{entry['name']}"])
    form, parts = manifest["row"]["form"], manifest["row"]["parts"]
    columns = [data[f"x/{i}"] for i in range(len(parts))]
    x: Any = (
        dict(zip((p["name"] for p in parts), columns))
        if form == "dict"
        else tuple(columns)
        if form == "tuple"
        else columns[0]
    )
    y = (
        likelihood.restore(data["y"]) if isinstance(likelihood, IndependentTargets) else data["y"]
    )  # as the user passed it
    try:
        return Problem(
            net, (x, y), likelihood, prior, temperature=Tempering(**stored["tempering"]), random=tuple(manifest["random"]),
            plan=manifest["plan"], micro_batch=manifest["micro_batch"], precision=manifest["precision"],
        )  # fmt: skip
    except InputError as error:
        raise StoreError(f"path: the problem of {name!r} cannot be built again ({error}). {how}") from error
