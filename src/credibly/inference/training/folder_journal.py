"""The journal of a fit that trains, in its run folder: `fit(..., out=)` and `credibly resume`.

The folder is created by the first checkpoint, a few seconds after the start. Until then, and for shorter fits, there
is nothing to resume. When the fit is over, the same folder holds its posterior, as `save` would have written it.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from credibly.core.specs import to_spec
from credibly.errors import StoreError
from credibly.inference.backend_identity import backend_facts, check_backend
from credibly.inference.method import Method
from credibly.inference.run_files import problem_files
from credibly.inference.sampling.identity import identity
from credibly.inference.training.journal import Journal, Saved
from credibly.posterior.base import Posterior
from credibly.posterior.model import Model
from credibly.posterior.saving import header, save, save_into
from credibly.problem import Problem
from credibly.storage.manifest import load_tensors
from credibly.storage.run_folder import RunFolder, resume_command

KIND = "training"


class FolderJournal(Journal):
    """A journal in a run folder.

    Args:
        method, problem, seed: the fit whose stages are kept.
        out: the folder, which is created by the first checkpoint.
        folder: the folder of a fit that is resumed.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        seed: int,
        out: str | os.PathLike[str],
        folder: RunFolder | None = None,
    ) -> None:
        super().__init__()
        self.method, self.problem, self.seed, self.out, self.folder = method, problem, seed, out, folder
        # Results of stages that no checkpoint has stored yet.
        self.pending: dict[int, Saved] = {}
        self.facts: list[dict[str, Any]] = [] if folder is None else list(folder.manifest["stages"])
        self.stopped: dict[str, Any] = {} if folder is None else folder.manifest[KIND]
        self.states = 0 if folder is None else int(self.stopped["states"])

    def result(self, stage: int) -> Saved | None:
        """Return the result of a finished stage; None for any other."""
        if self.folder is None or stage >= len(self.facts):
            return None
        return Saved(load_tensors(self.folder.path / _stage_file(stage), self.problem.device), self.facts[stage])

    def state(self, stage: int) -> Saved | None:
        """Return the state of the stage that was stopped; None for any other."""
        if self.folder is None or self.stopped.get("stage") != stage:
            return None
        file = self.folder.manifest["state"]
        return Saved(load_tensors(self.folder.path / file, self.problem.device), self.stopped["facts"])

    def write(self, stage: int, state: Saved) -> None:
        """Store the state of a stage, and the results of those before it that are not stored yet."""
        if self.folder is None:
            self.folder = self._create(state.facts["backend"])
        folder = self.folder
        for number, result in sorted(self.pending.items()):
            folder.write(_stage_file(number), result.tensors)
            self.facts.append(result.facts)
        self.pending = {}
        old, new = folder.manifest.get("state"), f"state-{self.states:05d}.safetensors"
        folder.write(new, state.tensors)
        if old is not None:
            folder.drop(old)
        self.states += 1
        stopped = {"stage": stage, "states": self.states, "facts": state.facts}
        folder.commit(state=new, stages=self.facts, status="running", **{KIND: stopped})

    def finish(self, stage: int, result: Saved) -> None:
        """Keep the result of a finished stage; the next checkpoint stores it."""
        if stage >= len(self.facts):
            copies: dict[str, Tensor] = {name: tensor.clone() for name, tensor in result.tensors.items()}
            self.pending[stage] = Saved(copies, result.facts)

    def check_backend(self, stored: dict[str, Any], now: dict[str, Any]) -> None:
        """Raise unless a stage continues on the backend that it was started on."""
        check_backend(now, stored, os.fspath(self.out), self.problem.device)

    def how_to_resume(self) -> str:
        """Return how to continue the fit."""
        name = os.fspath(self.out)
        return f"resume with {resume_command(name)} or credibly.resume({name!r}, problem)"

    def complete(self, posterior: Posterior) -> None:
        """Store the posterior in place of everything else."""
        if self.folder is None:
            save(posterior, self.out)
        else:
            save_into(posterior, self.folder)
            self.close()

    def discard(self) -> None:
        """Delete the folder: the fit has failed and would fail again."""
        if self.folder is not None:
            self.folder.discard()
            self.folder = None

    def close(self) -> None:
        """Release the folder."""
        if self.folder is not None:
            self.folder.close()

    def _create(self, selected: dict[str, Any]) -> RunFolder:
        method, problem = self.method, self.problem
        record = method.record(problem, self.seed, {}, "running")
        entries = {
            **header(Model.of(problem), KIND, record),
            **identity(problem),
            "backend": backend_facts(selected, problem.device),
            "status": "running",
            "stages": [],
            KIND: {"states": 0},
        }
        files = problem_files(problem)
        init = getattr(method, "init", None)
        if isinstance(init, Tensor):
            files["start.safetensors"] = {"start": init}
        return RunFolder.create(self.out, entries, files)


def check_resumable(folder: RunFolder, method: Method) -> None:
    """Raise if the folder is not that of this method's fit."""
    if folder.manifest["record"]["settings"].get("kind") != to_spec(method)["kind"]:
        raise StoreError(f"path: {folder.name!r} holds a fit of another method")


def _stage_file(stage: int) -> str:
    return f"stage-{stage:05d}.safetensors"
