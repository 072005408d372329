"""A callback for the Trainer of transformers that collects snapshots for a posterior.

snapshots = cr.integrations.transformers.Snapshots(every=100, start=0.5)
Trainer(model, args, train_dataset=rows, callbacks=[snapshots]).train()
posterior = snapshots.posterior(problem)
"""

from __future__ import annotations

from typing import Any

from credibly.errors import InputError
from credibly.integrations.snapshots import SnapshotCollector

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise InputError("transformers", "is not installed", "Run pip install transformers") from error


class Snapshots(TrainerCallback, SnapshotCollector):  # type: ignore[misc, unused-ignore]
    """Collect the weights of a model during `Trainer.train`; arguments as in `SnapshotCollector`."""

    def __init__(self, **settings: Any) -> None:
        SnapshotCollector.__init__(self, **settings)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take a snapshot every few steps."""
        if self.every != "epoch" and self.due(state.global_step, state.max_steps, epoch_ends=False):
            self.add(model, state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take a snapshot at the end of an epoch."""
        if self.every == "epoch" and self.due(state.global_step, state.max_steps, epoch_ends=True):
            self.add(model, state.global_step)


__all__ = ["Snapshots"]
