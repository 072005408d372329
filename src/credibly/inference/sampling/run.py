"""What samplers share: checks, the run folder they write to, and going on with one that was stopped."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credibly.core.inputs import tensors_of
from credibly.core.specs import to_spec
from credibly.distributed.world import Mesh, World, current
from credibly.errors import InputError, Interrupted, SamplingError, StoreError, TrainingError
from credibly.inference.agreement import check_same_everywhere
from credibly.inference.density import Density
from credibly.inference.method import Method, check_run
from credibly.inference.sampling.identity import check_same, identity
from credibly.inference.sampling.loop import Process, run
from credibly.inference.sampling.recording import FolderRecorder, Recorder
from credibly.inference.sampling.starts import refuse_random_layers, starts
from credibly.inference.sampling.trajectory import Stopped
from credibly.inference.target import Target, to_target
from credibly.networks.layout import Layout
from credibly.posterior.base import DensityPosterior, DrawsPosterior, Model, SampledPosterior
from credibly.posterior.store import header
from credibly.problem import Problem
from credibly.storage.manifest import join_state, load_tensors, parse_manifest, read_manifest
from credibly.storage.record import Record
from credibly.storage.run_folder import RunFolder, resume_command, state_files

SHARED = "Put the run folder on storage that all hosts share"
KEPT_DATA = 2**28  # bytes of data that a run folder keeps, so that it can be resumed without the program that began it


def check_counts(options: Any, **least: int) -> None:
    """Refuses counts that are not whole numbers from their least value up."""
    for name, low in least.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InputError(name, f"found {value!r}", f"Pass a whole number from {low} up")


def check_dtype(name: str | None) -> None:
    """Refuses what draws cannot be stored as."""
    if name is not None and name not in ("float64", "float32", "float16", "bfloat16"):
        raise InputError("draw_dtype", f"found {name!r}", 'Pass "float64", "float32", "float16", "bfloat16" or None')


def fit_sampler(
    method: Any, problem: Problem | Density, *, seed: int, out: str | os.PathLike[str] | None, progress: bool | None
) -> SampledPosterior:
    """Runs a sampler from its start to its end."""
    world = current()
    with world.propagate_errors():
        mesh, target = _spread(method, problem, world)
        if out is not None and world.restarts and _unfinished(out):
            return _take_up(method, problem, seed, out, progress, world)
        if world.leader:
            _refuse_unfinished(out)
            check_run(seed, out)
        if isinstance(problem, Problem):
            refuse_random_layers(problem)
        check_same_everywhere(world, problem, method, seed)
        process = method.process(target, seed, mesh)
        folder = _create(method, problem, seed, out, process, world) if out is not None else None
        with folder or nullcontext():
            recorder = _recorder(method, process, target, folder, mesh)
            try:
                _begin(method, problem, seed, process, recorder, folder, progress)
            except (InputError, SamplingError, TrainingError):
                if folder is not None:
                    folder.discard()  # there is nothing in it yet that would be worth going on with
                raise
            return _go_on(method, problem, seed, process, recorder, folder, progress)


def resume_sampler(
    method: Any, problem: Problem | Density, seed: int, folder: RunFolder, progress: bool | None
) -> SampledPosterior:
    """Goes on from the last checkpoint of a folder, or from the start where there was none yet."""
    world = current()
    mesh, target = _spread(method, problem, world)
    check_same_everywhere(world, problem, method, seed)
    process = method.process(target, seed, mesh)
    recorder = _recorder(method, process, target, folder, mesh)
    assert isinstance(recorder, FolderRecorder)
    files = state_files(folder.manifest)
    if not files:
        with _initial_network(problem, folder):
            _begin(method, problem, seed, process, recorder, folder, progress)
    else:
        tensors = _own_state([load_tensors(folder.path / file) for file in files], process, recorder)
        recorder.restore(tensors)
        process.restore({k.removeprefix("process."): v for k, v in tensors.items() if k.startswith("process.")})
    if world.leader:
        folder.commit(status="running")
    world.barrier()
    return _go_on(method, problem, seed, process, recorder, folder, progress)


def _spread(method: Any, problem: Problem | Density, world: World) -> tuple[Mesh, Target]:
    """The mesh of a run, and what this process sees of the density: some of the rows, where the method can do with that."""
    to_target(problem)
    mesh = world.mesh(method.chains)
    return mesh, to_target(problem, mesh if getattr(method, "spreads_rows", False) else None)


def _own_state(pieces: list[dict[str, Tensor]], process: Process, recorder: FolderRecorder) -> dict[str, Tensor]:
    """What a checkpoint holds of this process's chains, however many processes wrote it."""

    def axis_of(key: str) -> int | None:
        if key.startswith("process."):
            return process.chain_axis(key.removeprefix("process."))
        return 0 if key in ("recorder.draws", "recorder.noted") else None

    whole = join_state(pieces, axis_of)
    own = recorder.own
    if len(own) == recorder.chains:
        return whole
    axes = {key: axis_of(key) for key in whole}
    return {
        key: values if axes[key] is None else values.narrow(axes[key], own.start, len(own)).clone()  # type: ignore[arg-type]
        for key, values in whole.items()
    }


def _unfinished(out: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a sampler's run that has not ended."""
    try:
        manifest = parse_manifest(Path(out))
    except StoreError:
        return False
    return bool(manifest.get("streamed")) and manifest["status"] != "complete"


def _take_up(
    method: Any, problem: Problem | Density, seed: int, out: str | os.PathLike[str], progress: bool | None, world: World
) -> SampledPosterior:
    """Goes on with the folder that the same program had begun before its processes were started again."""
    with open_together(out, world) as folder:
        check_same(problem, folder.manifest, os.fspath(out))
        record = folder.manifest["record"]
        if (record["settings"], record["seed"]) != (to_spec(method), seed):
            raise StoreError(f"out: {os.fspath(out)!r} holds a run of other settings. Choose another folder")
        return resume_sampler(method, problem, seed, folder, progress)


def open_together(path: str | os.PathLike[str], world: World) -> RunFolder:
    """A run folder to go on with: locked by one process, seen by all."""
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


def _begin(
    method: Any, problem: Problem | Density, seed: int, process: Process, recorder: Recorder, folder: RunFolder | None, progress: bool | None
) -> None:  # fmt: skip
    """Finds the starting points and writes the first checkpoint."""
    try:
        own = recorder.own
        theta = starts(
            problem,
            method.init,
            method.chains,
            seed,
            progress if recorder.mesh.world.leader else False,
            own,
            getattr(method, "start_steps", 1000),
        )
        process.start(theta)
    except KeyboardInterrupt:
        if folder is None:
            raise
        raise Interrupted(f"stopped before the first iteration; {_how_to_go_on(folder)}") from None
    recorder.checkpoint(process, force=True)


@contextmanager
def _initial_network(problem: Problem | Density, folder: RunFolder) -> Iterator[None]:
    """The network with the weights that the run was begun with: some starts depend on them."""
    if isinstance(problem, Density):
        yield
        return
    layout = problem.layout
    mine, stored = layout.read(layout.module), load_tensors(folder.path / "initial.safetensors")["network"]
    _set_network(layout, stored)
    try:
        yield
    finally:
        _set_network(layout, mine)


def _set_network(layout: Layout, values: Tensor) -> None:
    parameters = dict(layout.module.named_parameters())
    with torch.no_grad():
        for entry in layout.entries:
            if entry.name not in layout.extra:
                parameters[entry.name].copy_(values[entry.start : entry.stop].reshape(entry.shape))


def _go_on(
    method: Any, problem: Problem | Density, seed: int, process: Process, recorder: Recorder, folder: RunFolder | None, progress: bool | None
) -> SampledPosterior:  # fmt: skip
    title = f"{type(method).__name__}, {method.chains} {'chain' if method.chains == 1 else 'chains'}"
    try:
        seconds = run(process, recorder, title=title, progress=progress)
    except Stopped:
        raise _interrupted(method, problem, seed, process, recorder, folder) from None
    record = _record(method, problem, seed, {**process.history(), "seconds": recorder.before + seconds})
    if isinstance(recorder, FolderRecorder):
        record = dataclasses.replace(record, settings=recorder.folder.manifest["record"]["settings"])
        recorder.finish(dataclasses.asdict(record), process)
    draws, noted = recorder.result()
    return _posterior(problem, draws, record, noted)


def _interrupted(
    method: Any, problem: Problem | Density, seed: int, process: Process, recorder: Recorder, folder: RunFolder | None
) -> Interrupted:
    where = f"stopped after {process.done} of {process.total} iterations"
    if folder is not None:
        return Interrupted(f"{where}; {_how_to_go_on(folder)}")
    posterior = None
    if recorder.kept:
        draws, noted = recorder.result()
        record = _record(method, problem, seed, process.history(), "partial")
        assert isinstance(draws, Tensor)
        posterior = _posterior(problem, draws.clone(), record, noted)
    return Interrupted(f"{where}; the {recorder.kept} draws so far are in this error's `posterior`", posterior)


def _posterior(problem: Problem | Density, draws: Any, record: Record, noted: dict[str, Tensor]) -> SampledPosterior:
    if isinstance(problem, Density):
        return DensityPosterior(None, draws, record, noted)
    return DrawsPosterior(Model.of(problem), draws, record, noted)


def _recorder(method: Any, process: Process, target: Target, folder: RunFolder | None, mesh: Mesh) -> Recorder:
    dtype = getattr(torch, method.draw_dtype) if method.draw_dtype else target.dtype
    shape = (method.chains, method.draws, target.dim, process.names, mesh)
    if folder is None:
        return Recorder(*shape, dtype=dtype, device=target.device)
    return FolderRecorder(folder, *shape, dtype=dtype, device=target.device, layout_dtype=target.dtype)


def _record(
    method: Any, problem: Problem | Density, seed: int, history: dict[str, Any], status: str = "complete"
) -> Record:
    if isinstance(problem, Problem):
        record: Record = Method.record(method, problem, seed, history, status)
        return record
    return Record(
        method=method.name, settings=to_spec(method), seed=seed, fingerprint=to_target(problem).fingerprint(), history=history, status=status
    )  # fmt: skip


def _how_to_go_on(folder: RunFolder) -> str:
    return f"go on with {resume_command(folder.name)} or credibly.resume({folder.name!r}, problem)"


def _refuse_unfinished(out: str | os.PathLike[str] | None) -> None:
    """Refuses the folder of a run that waits to be resumed, and says so."""
    if out is not None and _unfinished(out):
        name = os.fspath(out)
        raise StoreError(
            f"out: {name!r} holds a run that has not ended. Go on with it by {resume_command(name)}, or choose another folder"
        )


def _create(
    method: Any, problem: Problem | Density, seed: int, out: str | os.PathLike[str], process: Process, world: World
) -> RunFolder:
    report = process.report()
    folder = _created(method, problem, seed, out, process, report) if world.leader else None
    world.barrier()
    if folder is None:
        try:
            folder = RunFolder(out, parse_manifest(Path(out)), lock=False)
        except StoreError as error:
            raise StoreError(
                f"out: process {world.rank} does not see the folder that process 0 made ({error}). {SHARED}"
            ) from None
    try:
        world.agree("out", {k: folder.manifest["files"][k]["sha256"] for k in sorted(folder.manifest["files"])}, SHARED)
    except BaseException:
        folder.close()
        raise
    return folder


def _created(
    method: Any, problem: Problem | Density, seed: int, out: str | os.PathLike[str], process: Process, report: dict[str, Any]
) -> RunFolder:  # fmt: skip
    record = _record(method, problem, seed, {}, "running")
    model = Model.of(problem) if isinstance(problem, Problem) else None
    facts = {
        **header(model, "density" if model is None else "draws", record), **identity(problem),
        "streamed": True, "status": "running", "noted": list(process.names), "progress": report,
    }  # fmt: skip
    files: dict[str, dict[str, Tensor]] = {"fixed.safetensors": {}}
    if isinstance(problem, Problem):
        layout = problem.layout
        files["fixed.safetensors"] = {f"fixed/{k}": v for k, v in layout.fixed().items()}
        files["initial.safetensors"] = {"network": layout.read(layout.module)}
        data = {**{f"x/{i}": t for i, (_, t) in enumerate(tensors_of(problem.x))}, "y": problem.y}
        if sum(t.numel() * t.element_size() for t in data.values()) <= KEPT_DATA:
            files["data.safetensors"] = data
    if not isinstance(method.init, str):
        files["start.safetensors"] = {"start": starts(problem, method.init, method.chains, seed, False)}
    return RunFolder.create(out, facts, files)
