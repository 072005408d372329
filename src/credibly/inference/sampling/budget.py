"""The budget of a run with `until="mixed"`: time, or iterations, whose number does not depend on the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from credibly.core.durations import parse_seconds, to_text
from credibly.errors import InputError

_ITERATIONS = re.compile(r"\s*([0-9][0-9_,]*)\s*iterations?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A limit on a run.

    Attributes:
        amount: the limit, positive.
        timed: whether it is in seconds; else in iterations of every chain, warm-up included.
    """

    amount: float
    timed: bool

    @classmethod
    def parse(cls, name: str, value: object) -> Budget:
        """Return the budget that a setting describes. Raise, with the setting's name, if it describes none."""
        match = _ITERATIONS.fullmatch(value) if isinstance(value, str) else None
        if match:
            count = int(re.sub("[_,]", "", match[1]))
            if count > 0:
                return cls(float(count), timed=False)
        elif (seconds := parse_seconds(value)) is not None:
            return cls(seconds, timed=True)
        advice = 'Pass seconds, or text such as "90s", "10min", "1.5h" or "5000 iterations"'
        raise InputError(name, f"must be a positive duration or number of iterations, got {value!r}", advice)

    def spent(self, seconds: float, iterations: int) -> float:
        """Return how much of the budget a run has used."""
        return seconds if self.timed else float(iterations)

    def __str__(self) -> str:
        return to_text(self.amount) if self.timed else f"{self.amount:,.0f} iterations"
