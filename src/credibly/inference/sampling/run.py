"""One run of a sampler, from its settings to a posterior, in memory or in a run folder.

SamplingMethod.fit -> Run.begin   starting points, first checkpoint
                   -> Run.finish  the loop, then the posterior
resume             -> Run.restore the last checkpoint, then Run.finish
"""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from credibly.core.checks import check_choice
from credibly.core.specs import to_spec
from credibly.distributed.world import Mesh, World, current
from credibly.errors import InputError, Interrupted, SamplingError, StoreError, TrainingError
from credibly.inference.agreement import check_same_everywhere
from credibly.inference.backend_identity import as_started, check_backend, check_same_backend
from credibly.inference.density import Density
from credibly.inference.footprint import check_sampling, smaller_run
from credibly.inference.method import Method, check_run
from credibly.inference.run_files import initial_network
from credibly.inference.sampling.budget import Budget
from credibly.inference.sampling.folder import (
    check_not_unfinished,
    create_folder,
    is_unfinished,
    open_folder,
    own_state,
    resume_hint,
)
from credibly.inference.sampling.identity import check_same
from credibly.inference.sampling.loop import run_loop
from credibly.inference.sampling.recording import FolderRecorder, Recorder
from credibly.inference.sampling.sampler import Sampler, Stopped
from credibly.inference.sampling.starts import describe_starts, starts
from credibly.inference.sampling.until import Until
from credibly.inference.streaming import check_streamable
from credibly.inference.target import Target, to_target
from credibly.inference.training.settings import Training
from credibly.networks.statistics import refuse_moving
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DensityPosterior, DrawsPosterior, SampledPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem
from credibly.storage.manifest import load_tensors
from credibly.storage.record import Record
from credibly.storage.run_folder import RunFolder, state_files

DRAW_DTYPES = ("float64", "float32", "float16", "bfloat16")


class SamplingMethod(Method):
    """A method whose posterior is the draws of a `Sampler`: its settings, and the `fit` that all samplers share.

    Attributes:
        shards_rows: whether processes that hold the same chains may each evaluate a part of the rows.
        chains, draws: number of chains, and of draws per chain.
        init, start_steps: starting points, see `credibly.inference.sampling.starts`.
        draw_dtype: dtype of the stored draws; None for the network's.
        until, budget: whether to continue until the chains agree, and how long at most, see `inference.sampling.until`.
    """

    shards_rows: ClassVar[bool] = False
    chains: int
    draws: int
    init: str | Tensor | Posterior
    start_steps: int
    draw_dtype: str | None
    until: str | None
    budget: float | str | None

    @abstractmethod
    def sampler(self, target: Target, seed: int, mesh: Mesh | None = None) -> Sampler:
        """Return the sampler of all chains, or of those that a mesh assigns to this process."""

    def target(self, problem: Problem | Density, mesh: Mesh | None) -> Target:
        """Return the density that is sampled."""
        return to_target(problem, mesh)

    def check_problem(self, problem: Problem | Density) -> None:
        """Raise if these settings do not fit the problem; by default they always do."""

    def given_mass(self, target: Target) -> dict[str, Tensor]:
        """Return the tensors of a mass that was given as a posterior, which a run folder keeps; by default none."""
        return {}

    def start_points(self, problem: Problem | Density) -> str | Tensor | Posterior:
        """Return `init` as it applies to the problem."""
        return self.init

    def fit(
        self,
        problem: Problem | Density,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> SampledPosterior:
        """Sample the posterior.

        With `out`, draws are streamed to that folder, and `credibly resume` continues the run after a stop.
        """
        if isinstance(problem, Problem) and problem.stream is not None:
            check_streamable(self, problem)
        self.check_problem(problem)
        world = current()
        with world.propagate_errors():
            to_target(problem)
            if out is not None and world.restarts and is_unfinished(out):
                return self._resume_after_restart(problem, seed, out, progress, world)
            if world.leader:
                if out is not None:
                    check_not_unfinished(out)
                check_run(seed, out)
            if isinstance(problem, Problem):
                refuse_moving(problem.moving)
            if world.size > 1:
                check_same_everywhere(world, problem, self, seed)
            share = -(-self.chains // world.mesh(self.chains).shape[0])
            check_sampling(type(self).__name__, problem, share, self.draws, self.draw_dtype, out)
            run = Run(self, problem, seed, progress, world)
            check_same_backend(run.sampler.selected, world)
            with run.create(out) if out is not None else nullcontext():
                run.begin()
                return run.finish()

    def resume(
        self, problem: Problem | Density, seed: int, folder: RunFolder, progress: bool | None
    ) -> SampledPosterior:
        """Continue from the last checkpoint of an open run folder, or from the start if there is none yet."""
        world = current()
        check_same_everywhere(world, problem, self, seed)
        with as_started(folder.manifest):
            run = Run(self, problem, seed, progress, world, folder)
            check_backend(run.sampler.selected, folder.manifest.get("backend"), folder.name, run.target.device)
            check_same_backend(run.sampler.selected, world)
            run.restore()
            return run.finish()

    def _resume_after_restart(
        self, problem: Problem | Density, seed: int, out: str | os.PathLike[str], progress: bool | None, world: World
    ) -> SampledPosterior:
        """Continue in the folder that this program wrote to before its processes were restarted."""
        with open_folder(out, world) as folder:
            check_same(problem, folder.manifest, os.fspath(out))
            record = folder.manifest["record"]
            if (record["settings"], record["seed"]) != (to_spec(self), seed):
                raise StoreError(f"out: {os.fspath(out)!r} holds a run with other settings. Choose another folder")
            return self.resume(problem, seed, folder, progress)


class Run:
    """One run: its settings, its target, this process's chains, and where their draws go."""

    def __init__(
        self,
        method: SamplingMethod,
        problem: Problem | Density,
        seed: int,
        progress: bool | None,
        world: World,
        folder: RunFolder | None = None,
    ) -> None:
        self.method, self.problem, self.seed = method, problem, seed
        self.progress = progress if world.leader else False
        self.world, self.mesh = world, world.mesh(method.chains)
        # The target is what is evaluated; records and folders describe the problem itself.
        self.work = problem.reduced() if isinstance(problem, Problem) else problem
        self.target = method.target(self.work, self.mesh if method.shards_rows else None)
        self.sampler = method.sampler(self.target, seed, self.mesh)
        self.folder = folder
        self.until: Until | None = None
        if method.until is not None:
            budget = None if method.budget is None else Budget.parse("budget", method.budget)
            self.until = Until(self.target, self.mesh, method.chains, method.draws, budget)
        self.recorder: Recorder
        if folder is not None:
            self.recorder = self._recorder()

    def create(self, out: str | os.PathLike[str]) -> RunFolder:
        """Create the run folder that draws are streamed to."""
        record = self.record({"starts": self.starts()}, "running")
        self.folder = create_folder(self.method, self.problem, self.seed, out, self.sampler, record, self.world)
        return self.folder

    def begin(self) -> None:
        """Find the starting points and write the first checkpoint; a run that cannot start leaves no folder behind."""
        self.recorder = self._recorder()
        try:
            self._start()
        except (InputError, SamplingError, TrainingError):
            if self.folder is not None:
                self.folder.discard()
            raise

    def restore(self) -> None:
        """Restore sampler and recorder from the last checkpoint of the folder, or start if there is none."""
        folder, recorder = self.folder, self.recorder
        assert folder is not None
        assert isinstance(recorder, FolderRecorder)
        files = state_files(folder.manifest)
        if not files:
            with initial_network(self.problem, folder.path):
                self._start()
        else:
            tensors = own_state([load_tensors(folder.path / file) for file in files], self.sampler, recorder)
            recorder.restore(tensors)
            if self.until is not None:
                self.until.restore(recorder.so_far(), recorder.before, recorder.rounds)
            own = {k.removeprefix("process."): v for k, v in tensors.items() if k.startswith("process.")}
            try:
                self.sampler.restore(own)
            except KeyError as missing:
                raise StoreError(
                    f"the checkpoint in {os.fspath(folder.path)!r} has no {missing}: another version of credibly wrote "
                    "it. Resume with that version, or fit again"
                ) from missing
        if self.world.leader:
            folder.commit(status="running")
        self.world.barrier()

    def finish(self) -> SampledPosterior:
        """Run the chains to the end and return their posterior."""
        chains = self.method.chains
        title = f"{type(self.method).__name__}, {chains} {'chain' if chains == 1 else 'chains'}"
        try:
            seconds = run_loop(self.sampler, self.recorder, title=title, progress=self.progress, until=self.until)
        except Stopped:
            raise self._interrupted() from None
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from None
        history = {**self.history(), "start_gradients": self._start_gradients()}
        record = self.record({**history, "seconds": self.recorder.before + seconds})
        if isinstance(self.recorder, FolderRecorder):
            record = dataclasses.replace(record, settings=self.recorder.folder.manifest["record"]["settings"])
            self.recorder.finish(dataclasses.asdict(record), self.sampler)
        draws, statistics = self.recorder.result()
        return self._posterior(draws, record, statistics)

    def history(self) -> dict[str, Any]:
        """Return the entries that describe the run in the record."""
        reached = {} if self.until is None else {"until": self.until.history()}
        return {**self.sampler.history(), **reached, "starts": self.starts()}

    def starts(self) -> dict[str, Any] | None:
        """Return where the chains started, as the run folder records it if there is one."""
        if self.folder is not None:
            known: dict[str, Any] | None = self.folder.manifest["record"]["history"].get("starts")
            return known
        return describe_starts(self.problem, self.method.init, self.method.chains, self.seed)

    def record(self, history: dict[str, Any], status: str = "complete") -> Record:
        """Return the record of how the posterior was made."""
        if isinstance(self.work, Problem):
            return self.method.record(self.work, self.seed, history, status)
        return Record(
            method=self.method.name,
            settings=to_spec(self.method),
            seed=self.seed,
            fingerprint=self.target.fingerprint(),
            history=history,
            status=status,
        )

    def _start(self) -> None:
        method, own = self.method, self.recorder.own
        try:
            init = method.start_points(self.problem)
            theta = starts(self.work, init, method.chains, self.seed, self.progress, own, method.start_steps)
            self.sampler.start(self.target.encode(theta))
        except KeyboardInterrupt:
            if self.folder is None:
                raise
            raise Interrupted(f"stopped before the first iteration; {resume_hint(self.folder)}") from None
        self.recorder.checkpoint(self.sampler, force=True)

    def _start_gradients(self) -> float:
        """Return the gradients of the MAP fits at which the chains start, in units of full gradients."""
        init = self.method.start_points(self.problem)
        if isinstance(self.problem, Density) or not isinstance(init, str) or init not in ("ensemble", "map"):
            return 0.0
        steps, batch, _ = Training(steps=self.method.start_steps).plan(self.problem.n, self.problem.stream)
        return round(steps * batch / self.problem.n * (self.method.chains if init == "ensemble" else 1), 2)

    def _out_of_memory(self, error: Exception) -> SamplingError:
        """Return the error with what would fit, and with the draws so far."""
        stopped = self._interrupted()
        ways = ""
        if isinstance(self.work, Problem):
            batch = getattr(getattr(self.sampler, "plan", None), "batch_size", None) or self.work.n
            ways = f". Use fewer chains or smaller batches: {smaller_run(self.work, self.method.chains, batch)}"
        reason = str(error).splitlines()[0][:120]
        return SamplingError(f"out of memory ({reason}){ways}. Run {stopped}", stopped.posterior)

    def _interrupted(self) -> Interrupted:
        message = f"stopped after {self.sampler.done} of {self.sampler.total} iterations"
        if self.folder is not None:
            return Interrupted(f"{message}; {resume_hint(self.folder)}")
        posterior = None
        if self.recorder.kept:
            draws, statistics = self.recorder.result()
            assert isinstance(draws, Tensor)
            posterior = self._posterior(draws.clone(), self.record(self.history(), "partial"), statistics)
        kept = self.recorder.kept
        return Interrupted(f"{message}; the {kept} draws so far are in the `posterior` of this error", posterior)

    def _posterior(self, draws: Any, record: Record, statistics: dict[str, Tensor]) -> SampledPosterior:
        if isinstance(self.work, Density):
            return DensityPosterior(None, draws, record, statistics)
        return DrawsPosterior(Model.of(self.work), draws, record, statistics)

    def _recorder(self) -> Recorder:
        method, target = self.method, self.target
        dtype = getattr(torch, method.draw_dtype) if method.draw_dtype else target.dtype
        shape = (method.chains, method.draws, target.dim, self.sampler.names, self.mesh)
        if self.folder is None:
            return Recorder(*shape, dtype=dtype, device=target.device)
        return FolderRecorder(self.folder, *shape, dtype=dtype, device=target.device, layout_dtype=target.dtype)


def check_draw_dtype(name: str | None) -> None:
    """Raise unless draws can be stored in this dtype."""
    if name is not None:
        check_choice("draw_dtype", name, DRAW_DTYPES)
