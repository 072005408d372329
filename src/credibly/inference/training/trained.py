"""What training ends with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Trained:
    """The parameters (M, D) that training ended with, and its history."""

    theta: Tensor
    history: dict[str, Any] = field(default_factory=dict)
