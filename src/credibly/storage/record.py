"""The record that every posterior carries, and that its run folder stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Record:
    """How a posterior was obtained, as plain JSON values.

    Attributes:
        method: the name of the method.
        settings: the method's settings.
        seed: the seed of the fit.
        n: the number of training rows.
        fingerprint: a checksum of the training data.
        prior: the prior's spec.
        tempering: the temperatures of likelihood and prior.
        history: what was recorded during the fit.
        status: "complete", or how far the run is.
    """

    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    n: int = 0
    fingerprint: str = ""
    prior: Any = None
    tempering: dict[str, float] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    status: str = "complete"
