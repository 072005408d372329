"""A Lightning callback that collects snapshots for a posterior.

snapshots = cr.integrations.lightning.Snapshots(every="epoch", start=0.5)
lightning.Trainer(callbacks=[snapshots]).fit(module, loader)
posterior = snapshots.posterior(problem)
"""

from __future__ import annotations

from typing import Any

from credibly.errors import InputError
from credibly.integrations.snapshots import SnapshotCollector

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise InputError("lightning", "is not installed", "Run pip install lightning") from error


class Snapshots(Callback, SnapshotCollector):  # type: ignore[misc, unused-ignore]
    """Collect the weights of a LightningModule during `Trainer.fit`; arguments as in `SnapshotCollector`."""

    def __init__(self, **settings: Any) -> None:
        SnapshotCollector.__init__(self, **settings)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Take a snapshot every few steps."""
        if self.every != "epoch" and self.due(trainer.global_step, _total(trainer), epoch_ends=False):
            self.add(pl_module, trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Take a snapshot at the end of an epoch."""
        if self.every == "epoch" and self.due(trainer.global_step, _total(trainer), epoch_ends=True):
            self.add(pl_module, trainer.global_step)


def _total(trainer: Any) -> float | None:
    total = trainer.estimated_stepping_batches
    return None if total is None else float(total)


__all__ = ["Snapshots"]
