"""What samplers share: checks, the run folder they write to, and going on with one that was stopped."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from credibly.errors import InputError, Interrupted, StoreError
from credibly.inputs import tensors_of
from credibly.methods.method import Method, check_run
from credibly.methods.recording import FolderRecorder, Recorder
from credibly.methods.sampling import Process, run
from credibly.methods.starts import refuse_random_layers, starts
from credibly.methods.trajectory import Stopped
from credibly.posterior import DensityPosterior, DrawsPosterior, Model, Posterior, Record, SampledPosterior
from credibly.problem import Problem
from credibly.run_folder import RunFolder
from credibly.specs import to_spec
from credibly.store import header, load_tensors
from credibly.target import Density, Target, to_target

KEPT_DATA = 2**28  # bytes of data that a run folder keeps, so that it can be resumed without the program that began it


class Sampler(Protocol):
    """The settings that samplers have in common."""

    name: Any
    chains: int
    draws: int
    init: str | Tensor | Posterior
    draw_dtype: str | None

    def process(self, target: Target, seed: int) -> Process:
        """The sampler itself."""


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
    check_run(seed, out)
    if isinstance(problem, Problem):
        refuse_random_layers(problem)
    process = method.process(target, seed)
    folder = _create(method, problem, seed, out, process.names) if out is not None else None
    try:
        recorder = _recorder(method, process, target, folder)
        process.start(starts(problem, method.init, method.chains, seed, progress))
        recorder.checkpoint(process, force=True)
        return _go_on(method, problem, seed, process, recorder, folder, progress)
    finally:
        if folder is not None:
            folder.close()


def resume_sampler(
    method: Any, problem: Problem | Density, seed: int, folder: RunFolder, progress: bool | None
) -> SampledPosterior:
    """Goes on from the last checkpoint of a folder, or from the start where there was none yet."""
    target = to_target(problem)
    process = method.process(target, seed)
    folder.sweep()
    recorder = _recorder(method, process, target, folder)
    assert isinstance(recorder, FolderRecorder)
    state = folder.manifest.get("state")
    if state is None:
        process.start(starts(problem, method.init, method.chains, seed, progress))
        recorder.checkpoint(process, force=True)
    else:
        tensors = load_tensors(folder.path / state)
        recorder.restore(tensors)
        process.restore({k.removeprefix("process."): v for k, v in tensors.items() if k.startswith("process.")})
    return _go_on(method, problem, seed, process, recorder, folder, progress)


def _go_on(
    method: Any, problem: Problem | Density, seed: int, process: Process, recorder: Recorder, folder: RunFolder | None, progress: bool | None
) -> SampledPosterior:  # fmt: skip
    title = f"{type(method).__name__}, {method.chains} {'chain' if method.chains == 1 else 'chains'}"
    try:
        seconds = run(process, recorder, title=title, progress=progress)
    except Stopped:
        raise _interrupted(method, problem, seed, process, recorder, folder) from None
    record = _record(method, problem, seed, {**process.history(), "seconds": seconds})
    if isinstance(recorder, FolderRecorder):
        recorder.finish(dataclasses.asdict(record), process)
    draws, noted = recorder.result()
    return _posterior(problem, draws, record, noted)


def _interrupted(
    method: Any, problem: Problem | Density, seed: int, process: Process, recorder: Recorder, folder: RunFolder | None
) -> Interrupted:
    where = f"stopped after {process.done} of {process.total} iterations"
    if folder is not None:
        place = os.fspath(folder.path)
        return Interrupted(f'{where}; go on with `credibly resume {place}` or credibly.resume("{place}", problem)')
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


def _record(method: Any, problem: Problem | Density, seed: int, history: dict[str, Any], status: str = "complete") -> Record:
    if isinstance(problem, Problem):
        record: Record = Method.record(method, problem, seed, history, status)
        return record
    return Record(
        method=method.name, settings=to_spec(method), seed=seed, fingerprint=to_target(problem).fingerprint(), history=history, status=status
    )  # fmt: skip


def _create(
    method: Any, problem: Problem | Density, seed: int, out: str | os.PathLike[str], names: tuple[str, ...]
) -> RunFolder:
    record = _record(method, problem, seed, {}, "running")
    model = Model.of(problem) if isinstance(problem, Problem) else None
    kind = "density" if model is None else "draws"
    facts = {**header(model, kind, record), "streamed": True, "status": "running", "noted": list(names)}
    files: dict[str, dict[str, Tensor]] = {"fixed.safetensors": {}}
    if isinstance(problem, Problem):
        layout = problem.layout
        files["fixed.safetensors"] = {f"fixed/{k}": v for k, v in layout.fixed().items()}
        files["initial.safetensors"] = {"network": layout.read(layout.module)}
        data = {**{f"x/{i}": t for i, (_, t) in enumerate(tensors_of(problem.x))}, "y": problem.y}
        if sum(t.numel() * t.element_size() for t in data.values()) <= KEPT_DATA:
            files["data.safetensors"] = data
        facts |= {"plan": "looped" if problem.forward.looped else "batched", "micro_batch": problem.micro_batch}
    else:
        facts |= {"density": {"name": problem.name, "dim": problem.dim}}
    if not isinstance(method.init, str):
        files["start.safetensors"] = {"start": starts(problem, method.init, method.chains, seed, False)}
    return RunFolder.create(Path(out), facts, files)


def same_problem(problem: Problem | Density, manifest: dict[str, Any], folder: str) -> None:
    """Refuses a problem other than the one the folder was begun with, and says what differs."""
    stored = manifest["record"]
    target = to_target(problem)
    differs = None
    if isinstance(problem, Problem) != (manifest["kind"] != "density"):
        differs = "one is a network's posterior, the other a plain density"
    elif isinstance(problem, Problem):
        now = header(Model.of(problem), "draws", _record_of(problem, stored["seed"]))
        checks = [
            ("the layout of the network", now["layout"], manifest["layout"]),
            ("the likelihood", now["likelihood"], manifest["likelihood"]),
            ("the prior", now["record"]["prior"], stored["prior"]),
            ("the temperature", now["record"]["tempering"], stored["tempering"]),
            ("the dtype", now["dtype"], manifest["dtype"]),
        ]
        differs = next((name for name, a, b in checks if a != b), None)
    if differs is None and target.fingerprint() != stored["fingerprint"]:
        differs = "the data" if isinstance(problem, Problem) else "the density"
    if differs:
        raise StoreError(
            f"path: {folder!r} was begun with another problem ({differs} differ{'s' if not differs.startswith('the data') else ''}). "
            "Pass the problem it was begun with, or choose another folder"
        )


def _record_of(problem: Problem, seed: int) -> Record:
    tempering = {"likelihood": problem.tempering.likelihood, "prior": problem.tempering.prior}
    return Record(seed=seed, prior=to_spec(problem.prior_spec), tempering=tempering)
