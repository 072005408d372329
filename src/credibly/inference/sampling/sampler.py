"""The contract of a sampler: C chains that advance one iteration at a time and can be saved between any two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from credibly.inference.target import Target


class Stopped(Exception):
    """Raised between two steps when the user has asked to stop; the state before the iteration is untouched."""


class Sampler(ABC):
    """C chains that advance one iteration at a time and can be saved between any two.

    Attributes:
        target: the density that is sampled.
        theta: current positions of the chains, (C, D).
        done: iterations so far.
        total: total number of iterations of the run.
        names: the statistics recorded with every draw.
    """

    target: Target
    theta: Tensor
    done: int = 0
    total: int
    names: tuple[str, ...]

    @property
    def backend_name(self) -> str:
        """The backend of the steps, or of full gradients if only those run outside torch."""
        own: str = getattr(getattr(self, "backend", None), "name", "torch")
        return self.target.backend_name if own == "torch" else own

    @property
    def selected(self) -> dict[str, Any]:
        """The name of its backend, and whether its steps are compiled by torch."""
        trajectories = getattr(self, "trajectories", None)
        compiled = self.backend_name == "torch" and bool(getattr(trajectories or self, "compiled", False))
        return {"name": self.backend_name, "compiled": compiled}

    @abstractmethod
    def start(self, theta: Tensor) -> None:
        """Start at theta (C, D). Raise if the density is not finite there."""

    @abstractmethod
    def advance(self, stop: Callable[[], bool]) -> dict[str, Tensor]:
        """Run one iteration and return its statistics, (C,) each.

        Raises `Stopped`, with the state as it was before, once `stop()` is true.
        """

    @abstractmethod
    def keeps(self) -> bool:
        """Return whether the last iteration gives a draw."""

    @abstractmethod
    def prolong(self, draws: int, *, discard: bool) -> None:
        """Add `draws` draws. With `discard`, earlier iterations become warm-up and each draw takes twice the work."""

    @abstractmethod
    def live_values(self) -> dict[str, float | str]:
        """Return the values that the progress bar shows."""

    @abstractmethod
    def history(self) -> dict[str, Any]:
        """Return values for the record, in plain JSON."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the next iteration depends on, `done` included."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Return the progress of each chain, as plain JSON values."""

    @abstractmethod
    def chain_axis(self, name: str) -> int | None:
        """Return the axis of a state tensor that runs over the chains, None if all chains share the tensor."""
