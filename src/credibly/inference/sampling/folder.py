"""The run folder of a sampler: created before the first iteration, opened again to resume, seen by every process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from credibly.distributed.world import World
from credibly.errors import StoreError
from credibly.inference.backend_identity import backend_facts
from credibly.inference.density import Density
from credibly.inference.run_files import problem_files
from credibly.inference.sampling.identity import identity
from credibly.inference.sampling.recording import FolderRecorder
from credibly.inference.sampling.sampler import Sampler
from credibly.inference.sampling.starts import starts
from credibly.inference.target import Target
from credibly.posterior.base import Posterior
from credibly.posterior.model import Model
from credibly.posterior.saving import header
from credibly.problem import Problem
from credibly.storage.manifest import join_state, parse_manifest, read_manifest
from credibly.storage.record import Record
from credibly.storage.run_folder import RunFolder, resume_command

SHARED = "Put the run folder on storage that all hosts share"


class Given(Protocol):
    """The inputs of a run that are not plain values: starting points, and a mass."""

    @property
    def init(self) -> str | Tensor | Posterior:
        """`init` as the user gave it."""

    @property
    def chains(self) -> int:
        """The number of chains."""

    def given_mass(self, target: Target) -> dict[str, Tensor]:
        """Return the tensors of a mass that was given as a posterior."""


def create_folder(
    method: Given,
    problem: Problem | Density,
    seed: int,
    out: str | os.PathLike[str],
    sampler: Sampler,
    record: Record,
    world: World,
) -> RunFolder:
    """Create the folder in the leading process and open it in the others. Raise if one of them does not see it."""
    # Every process joins the collective call that reports errors.
    report = sampler.report()
    folder = _create(method, problem, seed, out, sampler, record, report) if world.leader else None
    world.barrier()
    if folder is None:
        try:
            folder = RunFolder(out, parse_manifest(Path(out)), lock=False)
        except StoreError as error:
            raise StoreError(
                f"out: process {world.rank} does not see the folder that process 0 created ({error}). {SHARED}"
            ) from None
    try:
        world.agree("out", {k: folder.manifest["files"][k]["sha256"] for k in sorted(folder.manifest["files"])}, SHARED)
    except BaseException:
        folder.close()
        raise
    return folder


def open_folder(path: str | os.PathLike[str], world: World) -> RunFolder:
    """Open a run folder to continue in: locked by one process, read by all."""
    folder = RunFolder(path, {}) if world.leader else None
    try:
        if folder is not None:
            folder.manifest = read_manifest(Path(path))
        world.barrier()
        if folder is None:
            folder = RunFolder(path, read_manifest(Path(path)), lock=False)
        world.agree("path", folder.manifest["checksum"], SHARED)
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    return folder


def is_unfinished(out: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds an unfinished run of a sampler."""
    try:
        manifest = parse_manifest(Path(out))
    except StoreError:
        return False
    return bool(manifest.get("streamed")) and manifest["status"] != "complete"


def check_not_unfinished(out: str | os.PathLike[str]) -> None:
    """Raise if the folder holds an unfinished run."""
    if is_unfinished(out):
        name = os.fspath(out)
        raise StoreError(
            f"out: {name!r} holds an unfinished run. Resume it with {resume_command(name)}, or choose another folder"
        )


def resume_hint(folder: RunFolder) -> str:
    """Return the phrase that tells the user how to continue a run."""
    return f"resume with {resume_command(folder.name)} or credibly.resume({folder.name!r}, problem)"


def own_state(parts: list[dict[str, Tensor]], sampler: Sampler, recorder: FolderRecorder) -> dict[str, Tensor]:
    """Return this process's part of a checkpoint, however many processes wrote it."""

    def axis_of(key: str) -> int | None:
        if key.startswith("process."):
            return sampler.chain_axis(key.removeprefix("process."))
        return 0 if key in ("recorder.draws", "recorder.noted") else None

    state, own = join_state(parts, axis_of), recorder.own
    if len(own) == recorder.chains:
        return state

    def of_own_chains(key: str, values: Tensor) -> Tensor:
        axis = axis_of(key)
        return values if axis is None else values.narrow(axis, own.start, len(own)).clone()

    return {key: of_own_chains(key, values) for key, values in state.items()}


def _create(
    method: Given,
    problem: Problem | Density,
    seed: int,
    out: str | os.PathLike[str],
    sampler: Sampler,
    record: Record,
    report: dict[str, Any],
) -> RunFolder:
    model = Model.of(problem) if isinstance(problem, Problem) else None
    entries = {
        **header(model, "density" if model is None else "draws", record),
        **identity(problem),
        "backend": backend_facts(sampler.selected, sampler.target.device),
        "streamed": True,
        "status": "running",
        "noted": list(sampler.names),
        "progress": report,
    }
    files = problem_files(problem)
    if not isinstance(method.init, str):
        files["start.safetensors"] = {"start": starts(problem, method.init, method.chains, seed, False)}
    if mass := method.given_mass(sampler.target):
        files["mass.safetensors"] = mass
    return RunFolder.create(out, entries, files)
