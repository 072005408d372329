"""Settings of training: optimiser, schedule, minibatches and early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from credibly.core.checks import check_integer, check_positive, is_real
from credibly.core.compilation import Compile
from credibly.core.stream import BoundStream
from credibly.errors import InputError
from credibly.inference.kernels.optimisers import learning_rates, optimiser

DEFAULT_STEPS = 3_000


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of an optimisation, shared by every method that trains.

    Args:
        epochs: passes over the data; None uses `steps`.
        steps: optimiser steps; by default 3,000 or 20 epochs, whichever is more.
        batch_size: rows per minibatch; None takes 128, or all rows if there are fewer.
        lr: learning rate.
        optimiser: "adam" or "sgd".
        momentum: momentum of SGD, or Adam's beta1.
        schedule: "cosine", "linear" or "constant".
        warmup: steps over which the learning rate rises linearly from zero.
        clip_norm: largest gradient norm of the mean loss, per member; None for no limit.
        validation: fraction of the rows held out; the parameters that are best on them are kept.
        patience: with validation, evaluations without improvement after which a member stops.
        compile: True, False or "auto" (if the run is long enough to pay for it).
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float = 1e-2
    optimiser: str = "adam"
    momentum: float = 0.9
    schedule: str = "cosine"
    warmup: int = 0
    clip_norm: float | None = None
    validation: float = 0.0
    patience: int = 20
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        check_integer("patience", self.patience)
        if self.epochs is not None and self.steps is not None:
            raise InputError("steps", f"must not be given beside epochs, got {self.steps} and epochs={self.epochs}")
        check_positive("lr", self.lr)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        if not (is_real(self.validation) and 0 <= self.validation < 1):
            raise InputError("validation", f"must be a fraction from 0 to below 1, got {self.validation!r}")
        if not (is_real(self.momentum) and 0 <= self.momentum < 1):
            raise InputError("momentum", f"must be a number from 0 to below 1, got {self.momentum!r}")
        if not (is_real(self.warmup) and self.warmup >= 0):
            raise InputError("warmup", f"must be a non-negative number of steps, got {self.warmup!r}")
        optimiser(self.optimiser, self.momentum)
        learning_rates(self.schedule, self.lr, 1, 0)

    def plan(self, rows: int, stream: BoundStream | None = None) -> tuple[int, int, int]:
        """Return (steps, batch size, batches per epoch) for the given number of training rows, or for a stream."""
        batch = min(rows, self.batch_size or 128)
        per_epoch = max(1, rows // batch)
        if stream is not None:
            batch, per_epoch = stream.batch, stream.batches
        steps = self.steps or (self.epochs * per_epoch if self.epochs else max(DEFAULT_STEPS, 20 * per_epoch))
        return steps, batch, per_epoch

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return clipped training.

        A predicted variance near zero makes gradients of any size, and one such step can lose a member for good.
        """
        return {"clip_norm": 100.0}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return 1,500 training steps, or 150 for a quick run."""
        return {"steps": 150 if quick else 1500}
