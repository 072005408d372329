"""The errors that credibly raises on purpose.

A message names the parameter, the constraint, the value received and, where it is not obvious, the way out.
"""

from __future__ import annotations

from typing import Any


class InputError(ValueError):
    """An argument that cannot be used, raised before any work starts.

    Args:
        argument: the name of the parameter, as the caller wrote it.
        found: what is wrong with it. "must be a positive integer, got 0" continues the sentence that the name begins;
            anything else ("has 3 rows, y has 4") follows a colon.
        advice: what to do about it; empty where the constraint already says so.
    """

    def __init__(self, argument: str, found: str, advice: str = "") -> None:
        separator = " " if found.startswith("must ") else ": "
        super().__init__(f"{argument}{separator}{found}" + (f". {advice}" if advice else ""))
        self.argument = argument
        self.found = found
        self.advice = advice


class StoreError(RuntimeError):
    """A run folder that cannot be read or written: missing, truncated, altered, or of the wrong kind or version."""


class TrainingError(RuntimeError):
    """Training that failed, with the parameters as they were when last known to be finite.

    Attributes:
        step: the first step whose loss was not finite.
        member: the index of the member that failed.
        posterior: the posterior at the last check before the failure, or None if there had been no check yet.
    """

    def __init__(self, message: str, *, step: int, member: int, posterior: Any = None) -> None:
        super().__init__(message)
        self.step = step
        self.member = member
        self.posterior = posterior


class SamplingError(RuntimeError):
    """A sampler that failed: a step size that diverges at once, a density that is not finite, or too little memory.

    Attributes:
        posterior: the draws so far if they are in memory; None if they are in a folder, or if there are none.
    """

    def __init__(self, message: str, posterior: Any = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class Interrupted(KeyboardInterrupt):
    """A sampler that was stopped by Ctrl-C between two draws.

    Attributes:
        posterior: the draws so far if they are in memory; None if they are in a folder, or if there are none.
    """

    def __init__(self, message: str, posterior: Any = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class PeerError(RuntimeError):
    """Another process of the same run failed or was lost, so this one stops; the message says which and why."""
