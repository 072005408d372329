"""The base class of methods that train: the training settings, and the `fit` that they share."""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from credibly.distributed.world import current
from credibly.errors import Interrupted, StoreError, TrainingError
from credibly.inference.backend_identity import as_started
from credibly.inference.footprint import check_training, training_rows
from credibly.inference.method import Fit, Method, begin_fit
from credibly.inference.run_files import initial_network
from credibly.inference.training.folder_journal import FolderJournal
from credibly.inference.training.journal import keep_journal
from credibly.inference.training.settings import Training
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem
from credibly.storage.record import Record
from credibly.storage.run_folder import RunFolder

P = TypeVar("P", bound=Posterior)


class TrainingMethod(Training, Method, Generic[P]):
    """A method that trains. Subclasses are frozen dataclasses and implement `_fit`."""

    streams: ClassVar[bool] = True

    def fit(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> P:
        """Fit the problem.

        Args:
            problem: the posterior density to infer.
            seed: the source of all randomness; the same seed gives the same result.
            out: a folder to save the posterior in; it must not exist yet. A fit in one process writes checkpoints to
                it, and `credibly resume` continues it after a stop.
            progress: whether to show a progress bar; None shows it on a terminal and in a notebook.
        """
        with begin_fit(self, problem, seed, out, progress) as fit:
            self.check_memory(fit.problem)
            journal = None
            if out is not None and fit.world.size == 1 and self.resumable:
                journal = FolderJournal(self, problem, seed, out)
            return self._run(fit, journal)

    def resume(self, problem: Problem, seed: int, folder: RunFolder, progress: bool | None) -> P:
        """Continue from the last checkpoint of an open run folder."""
        if current().size > 1:
            raise StoreError(f"path: {folder.name!r} is a fit in a single process. Resume it in one")
        with (
            as_started(folder.manifest),
            initial_network(problem, folder.path),
            begin_fit(self, problem, seed, None, progress) as fit,
        ):
            journal = FolderJournal(self, problem, seed, folder.name, folder)
            return self._run(dataclasses.replace(fit, out=folder.name), journal)

    def _run(self, fit: Fit, journal: FolderJournal | None) -> P:
        try:
            with keep_journal(journal):
                posterior = self._fit(fit)
            if journal is not None:
                journal.complete(posterior)
            elif fit.out is not None:
                posterior.save(fit.out)
        except KeyboardInterrupt as error:
            if journal is None or journal.folder is None or isinstance(error, Interrupted):
                raise
            raise Interrupted(f"stopped; {journal.how_to_resume()}") from error
        finally:
            if journal is not None:
                journal.close()
        return posterior

    @property
    def resumable(self) -> bool:
        """Whether a folder can store these settings, which it cannot if one of them is a function."""
        return not callable(self.optimiser) and self.callback is None

    def check_memory(self, problem: Problem) -> None:
        """Raise if a fit would need more memory than is available; by default that of one network."""
        check_training(type(self).__name__, problem, parameters=problem.dim, batch=self.rows_at_once(problem))

    def rows_at_once(self, problem: Problem) -> int:
        """Return the number of rows whose activations a step keeps at a time."""
        return training_rows(self.plan(problem.n, problem.stream)[1], self.accumulate)

    @abstractmethod
    def _fit(self, fit: Fit) -> P:
        """Return the posterior; called in every process of the fit."""


def partial_draws(fit: Fit, theta: Tensor, record: Record, error: TrainingError) -> DrawsPosterior:
    """Return the last members (M, D) of a failed training as a posterior of one draw each."""
    return DrawsPosterior(Model.of(fit.problem), theta.unsqueeze(1), record)
