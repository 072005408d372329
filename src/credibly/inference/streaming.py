"""Which methods and settings work on a stream, checked before any work."""

from __future__ import annotations

from typing import Any

from credibly.core.stream import needs_memory
from credibly.distributed.world import current
from credibly.errors import InputError
from credibly.problem import Problem

# Settings that need rows in memory: the one value that does not need them, and the reason why others do.
SETTINGS: dict[str, tuple[Any, str]] = {
    "validation": (0.0, "held-out rows are kept in memory"),
    "bootstrap": (False, "resampled rows are kept in memory"),
    "noise_from": ("training", "rows are held out"),
    "control_variate": (False, "every epoch needs the gradient of all rows"),
}


def check_streamable(method: Any, problem: Problem) -> None:
    """Raise if the data are a stream and the method, or one of its settings, needs all rows in memory."""
    if problem.stream is None:
        return
    name = type(method).__name__
    if not getattr(method, "streams", False):
        raise needs_memory(problem.stream, f"{name} needs all rows for every gradient")
    for setting, (value, why) in SETTINGS.items():
        given = getattr(method, setting, value)
        # Laplace chooses the noise from outputs alone, by one pass.
        if given != value and given != "evidence":
            raise needs_memory(problem.stream, f"{name}({setting}={given!r}) needs rows in memory: {why}")
    if current().size > 1:
        raise InputError("data", "is a stream, which one process reads", "Keep the rows in memory, or use one process")
