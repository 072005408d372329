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

from credibly.errors import InputError, Interrupted, SamplingError, StoreError, TrainingError
from credibly.inputs import tensors_of
from credibly.layout import Layout
from credibly.manifest import load_tensors, parse_manifest
from credibly.methods.method import Method, check_run
from credibly.methods.recording import FolderRecorder, Recorder
from credibly.methods.same_problem import identity
from credibly.methods.sampling import Process, run
from credibly.methods.starts import refuse_random_layers, starts
from credibly.methods.trajectory import Stopped
from credibly.posterior import DensityPosterior, DrawsPosterior, Model, Record, SampledPosterior
from credibly.problem import Problem
from credibly.run_folder import RunFolder, resume_command
from credibly.specs import to_spec
from credibly.store import header
from credibly.target import Density, Target, to_target

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
    target = to_target(problem)
    _refuse_unfinished(out)
    check_run(seed, out)
    if isinstance(problem, Problem):
        refuse_random_layers(problem)
    process = method.process(target, seed)
    folder = _create(method, problem, seed, out, process) if out is not None else None
    with folder or nullcontext():
        recorder = _recorder(method, process, target, folder)
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
    target = to_target(problem)
    process = method.process(target, seed)
    recorder = _recorder(method, process, target, folder)
    assert isinstance(recorder, FolderRecorder)
    state = folder.manifest.get("state")
    if state is None:
        with _initial_network(problem, folder):
            _begin(method, problem, seed, process, recorder, folder, progress)
    else:
        tensors = load_tensors(folder.path / state)
        recorder.restore(tensors)
        process.restore({k.removeprefix("process."): v for k, v in tensors.items() if k.startswith("process.")})
    folder.commit(status="running")
    return _go_on(method, problem, seed, process, recorder, folder, progress)


def _begin(
    method: Any, problem: Problem | Density, seed: int, process: Process, recorder: Recorder, folder: RunFolder | None, progress: bool | None
) -> None:  # fmt: skip
    """Finds the starting points and writes the first checkpoint."""
    try:
        process.start(starts(problem, method.init, method.chains, seed, progress))
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


def _recorder(method: Any, process: Process, target: Target, folder: RunFolder | None) -> Recorder:
    dtype = getattr(torch, method.draw_dtype) if method.draw_dtype else target.dtype
    shape = (method.chains, method.draws, target.dim, process.names)
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
    try:
        manifest = parse_manifest(Path(out)) if out is not None else {}
    except StoreError:
        return
    if manifest.get("streamed") and manifest["status"] != "complete":
        name = os.fspath(out)  # type: ignore[arg-type]
        raise StoreError(
            f"out: {name!r} holds a run that has not ended. Go on with it by {resume_command(name)}, or choose another folder"
        )


def _create(
    method: Any, problem: Problem | Density, seed: int, out: str | os.PathLike[str], process: Process
) -> RunFolder:
    record = _record(method, problem, seed, {}, "running")
    model = Model.of(problem) if isinstance(problem, Problem) else None
    facts = {
        **header(model, "density" if model is None else "draws", record), **identity(problem),
        "streamed": True, "status": "running", "noted": list(process.names), "progress": process.report(),
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
