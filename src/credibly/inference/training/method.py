"""The base class of methods that train: the settings of training, and the one `fit` that they share."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from credibly.errors import TrainingError
from credibly.inference.footprint import check_training, training_rows
from credibly.inference.method import Fit, Method, begin_fit
from credibly.inference.training.settings import Training
from credibly.posterior.base import Posterior
from credibly.posterior.draws import DrawsPosterior
from credibly.posterior.model import Model
from credibly.problem import Problem
from credibly.storage.record import Record

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
            problem: the density.
            seed: the source of all randomness; the same seed gives the same result.
            out: a folder to save the posterior in; it must not exist yet.
            progress: whether to show a progress bar; None shows it on a terminal and in a notebook.
        """
        with begin_fit(self, problem, seed, out, progress) as fit:
            self.check_memory(fit.problem)
            posterior = self._fit(fit)
            if fit.out is not None:
                posterior.save(fit.out)
        return posterior

    def check_memory(self, problem: Problem) -> None:
        """Raise if a fit would need more memory than there is; by default that of one network."""
        check_training(type(self).__name__, problem, parameters=problem.dim, batch=self.rows_at_once(problem))

    def rows_at_once(self, problem: Problem) -> int:
        """Return the rows whose activations a step holds at a time."""
        return training_rows(self.plan(problem.n, problem.stream)[1], self.accumulate)

    @abstractmethod
    def _fit(self, fit: Fit) -> P:
        """Return the posterior; called in every process of the fit."""


def partial_draws(fit: Fit, theta: Tensor, record: Record, error: TrainingError) -> DrawsPosterior:
    """Return the members (M, D) that a failed training had reached, as a posterior of one draw each."""
    return DrawsPosterior(Model.of(fit.problem), theta.unsqueeze(1), record)
