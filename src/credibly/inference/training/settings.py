"""Settings of training: optimiser, schedule, minibatches and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from credibly.core.checks import check_choice, check_integer, check_positive, is_real
from credibly.core.compilation import Compile
from credibly.core.plain_settings import PlainSettings
from credibly.core.stream import BoundStream
from credibly.errors import InputError
from credibly.inference.kernels.optimisers import Optimiser, learning_rates, optimiser

DEFAULT_STEPS = 3_000
# The optimiser whose full-batch steps each solve a linear system.
GAUSS_NEWTON = "gauss-newton"
OPTIMISERS = ("adam", "sgd", GAUSS_NEWTON)


@dataclass(frozen=True, kw_only=True)
class Training(PlainSettings):
    """Training settings, shared by every method that trains.

    Args:
        epochs: passes over the data; None uses `steps`.
        steps: optimiser steps; by default 3,000 or 20 epochs, whichever is more.
        batch_size: rows per minibatch; None uses 128, or all rows if there are fewer.
        lr: learning rate, or {name pattern: learning rate}, where the first pattern that matches a parameter applies:
            {"head.*": 1e-3, "*": 1e-4}.
        optimiser: "adam", "sgd", "gauss-newton" (damped Gauss-Newton steps on all rows, 100 by default, for small
            networks on targets with little noise; it has no learning rate and no minibatches), or a function from the
            parameters to a torch optimiser, such as `lambda p: torch.optim.AdamW(p, lr=1e-3)`. Its learning rates
            follow `schedule`; `lr` and `momentum` are then its own, unless `lr` has patterns, which become its groups.
        mean_first: with "gauss-newton" and a network that predicts its noise, whether to fit the mean by least squares
            first, with as many steps.
        momentum: momentum of SGD, or Adam's beta1.
        schedule: "cosine", "linear" or "constant".
        warmup: steps over which the learning rate rises linearly from zero.
        clip_norm: largest gradient norm of the mean loss, per member; None for no limit.
        validation: fraction of the rows held out; the parameters that are best on them are kept.
        patience: with validation, evaluations without improvement after which a member stops.
        accumulate: microbatches per step: the gradient of a batch is the sum over this many parts of it, which need the
            memory of one.
        callback: a function of a `TrainingState` (steps, losses, a copy of the network) that is called about 20 times
            per run, at least every 500 steps; training stops if it returns True.
        compile: True, False or "auto" (if the run is long enough to pay for it). Networks of a million weights or more
            run without compilation, unless it is True.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float | Mapping[str, float] = 1e-2
    optimiser: str | Callable[[Any], Any] = "adam"
    mean_first: bool = False
    momentum: float = 0.9
    schedule: str = "cosine"
    warmup: int = 0
    clip_norm: float | None = None
    validation: float = 0.0
    patience: int = 20
    accumulate: int = 1
    callback: Callable[[Any], Any] | None = None
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        check_integer("patience", self.patience)
        if self.epochs is not None and self.steps is not None:
            raise InputError("steps", f"must be None with epochs, got {self.steps} and epochs={self.epochs}")
        check_integer("accumulate", self.accumulate)
        rates = self.lr if isinstance(self.lr, Mapping) else {"": self.lr}
        if not rates:
            raise InputError("lr", "must have at least one pattern, got none", 'Such as {"*": 1e-3}')
        for pattern, rate in rates.items():
            check_positive(f"lr[{pattern!r}]" if pattern else "lr", rate)
        if self.callback is not None and not callable(self.callback):
            raise InputError("callback", f"must be a function of a TrainingState, got {self.callback!r}")
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        if not (is_real(self.validation) and 0 <= self.validation < 1):
            raise InputError("validation", f"must be a fraction from 0 to below 1, got {self.validation!r}")
        if not (is_real(self.momentum) and 0 <= self.momentum < 1):
            raise InputError("momentum", f"must be a number from 0 to below 1, got {self.momentum!r}")
        if not (is_real(self.warmup) and self.warmup >= 0):
            raise InputError("warmup", f"must be a non-negative number of steps, got {self.warmup!r}")
        if not callable(self.optimiser):
            check_choice("optimiser", self.optimiser, OPTIMISERS)
        if self.mean_first and self.optimiser != GAUSS_NEWTON:
            raise InputError("mean_first", f'must be False unless optimiser is "{GAUSS_NEWTON}", got True')
        learning_rates(self.schedule, 1.0, 1, 0)
        if self.steps is not None:
            self._check_warmup(self.steps)

    def plan(self, rows: int, stream: BoundStream | None = None) -> tuple[int, int, int]:
        """Return (steps, batch size, batches per epoch) for the given number of training rows, or for a stream."""
        batch = min(rows, self.batch_size or 128)
        per_epoch = max(1, rows // batch)
        if stream is not None:
            batch, per_epoch = stream.batch, stream.batches
        steps = self.steps or (self.epochs * per_epoch if self.epochs else max(DEFAULT_STEPS, 20 * per_epoch))
        self._check_warmup(steps)
        return steps, batch, per_epoch

    def _check_warmup(self, steps: int) -> None:
        """Raise if the learning rate would still be rising when training ends."""
        if self.warmup and self.warmup >= steps:
            found = f"must be below the number of steps, {steps}, got {self.warmup!r}"
            raise InputError("warmup", found, "Pass fewer steps of warm-up, or train for more")

    @property
    def learning_rate(self) -> float:
        """The learning rate of all parameters alike."""
        if isinstance(self.lr, Mapping):
            raise InputError("lr", "must be a single number for this method, got one per group of parameters")
        return self.lr

    @property
    def rule(self) -> Optimiser:
        """The optimiser over flat vectors."""
        if callable(self.optimiser):
            raise InputError("optimiser", 'must be "adam" or "sgd" for this method, got a function')
        if self.optimiser == GAUSS_NEWTON:
            raise InputError("optimiser", f'must be "adam" or "sgd" for this method, got {GAUSS_NEWTON!r}')
        return optimiser(self.optimiser, self.momentum)

    @classmethod
    def table_settings(cls, layers: int, noise: str | float) -> dict[str, Any]:
        """Return clipped training.

        A predicted variance near zero makes gradients arbitrarily large, and one such step can lose a member for good.
        """
        return {"clip_norm": 100.0}

    @classmethod
    def demo_settings(cls, quick: bool) -> dict[str, Any]:
        """Return 1,500 training steps, or 150 for a quick run."""
        return {"steps": 150 if quick else 1500}
