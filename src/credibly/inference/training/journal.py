"""The journal of a fit that trains, so that it can be stopped and resumed bit-for-bit.

A fit calls `train` once or several times: a MAP start, members of an ensemble in turn, further fits to folds. Each
call is a stage. A journal keeps the result of every finished stage and, at intervals, the state of the running one. A
resumed fit runs from its beginning: finished stages return their result immediately, and the one that was stopped
continues. Randomness needs no state, as it derives from (seed, purpose, step).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Seconds between two checkpoints.
EVERY_SECONDS = 10.0
# Fraction of the time that checkpoints may take: a slow disk gets fewer of them.
FRACTION = 0.01

_CURRENT: ContextVar[Journal | None] = ContextVar("training_journal", default=None)


@dataclass(frozen=True)
class Saved:
    """A stage as it was stored: its tensors, and plain JSON values."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Journal(ABC):
    """The stages of one fit."""

    def __init__(self) -> None:
        self.stages = 0
        self.saved_at = time.monotonic()
        self.pause = EVERY_SECONDS

    def begin(self) -> int:
        """Return the number of the new stage."""
        self.stages += 1
        return self.stages - 1

    def due(self) -> bool:
        """Return whether the last checkpoint is old enough."""
        return time.monotonic() - self.saved_at >= self.pause

    def checkpoint(self, stage: int, state: Saved) -> None:
        """Store the state of the running stage."""
        began = time.monotonic()
        self.write(stage, state)
        self.saved_at = time.monotonic()
        self.pause = max(EVERY_SECONDS, (self.saved_at - began) / FRACTION)

    @abstractmethod
    def result(self, stage: int) -> Saved | None:
        """Return the result of a finished stage; None for any other."""

    @abstractmethod
    def state(self, stage: int) -> Saved | None:
        """Return the state of the stage that was stopped; None for any other."""

    @abstractmethod
    def write(self, stage: int, state: Saved) -> None:
        """Store the state of a stage, which makes it the one to continue with."""

    @abstractmethod
    def finish(self, stage: int, result: Saved) -> None:
        """Keep the result of a finished stage; the next checkpoint stores it."""

    @abstractmethod
    def check_backend(self, stored: dict[str, Any], now: dict[str, Any]) -> None:
        """Raise unless a stage continues on the backend that it was started on."""

    @abstractmethod
    def how_to_resume(self) -> str:
        """Return how to continue the fit."""

    @abstractmethod
    def discard(self) -> None:
        """Discard everything: the fit has failed and would fail again."""


def current_journal() -> Journal | None:
    """Return the journal of the current fit, if it keeps one."""
    return _CURRENT.get()


@contextmanager
def keep_journal(journal: Journal | None) -> Iterator[None]:
    """Use this journal for every training in the block."""
    token = _CURRENT.set(journal)
    try:
        yield
    finally:
        _CURRENT.reset(token)
