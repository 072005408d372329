"""The result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Trained:
    """The trained parameters (M, D), and the history of training."""

    theta: Tensor
    history: dict[str, Any] = field(default_factory=dict)
