"""The training step of large networks on the batches of a stream: every member is a separate module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from credibly.inference.training.batches import Batches
from credibly.inference.training.in_turn import member_objective
from credibly.inference.training.module_step import ModuleStep
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step
from credibly.inference.training.stream_batches import StreamBatches


class StreamModules(Step):
    """Steps of M members, theta (M, D), in turn on each batch of a stream, which is read once for all of them.

    Args:
        batches: the batches of the stream.
        objective, options, steps: as in `Step`.
        theta: the flat vectors, changed in place.
        scale: preconditioner (D,) of SGD: multiplies the gradients.
    """

    def __init__(
        self,
        batches: StreamBatches,
        objective: NegativeLogDensity,
        options: Training,
        steps: int,
        theta: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        self.parts = torch.zeros(len(theta), len(objective.part_names), dtype=theta.dtype, device=theta.device)
        self.first_bad = torch.full((len(theta),), math.inf, dtype=torch.float64, device=theta.device)
        self.members = []
        for m in range(len(theta)):
            one, own = slice(m, m + 1), member_objective(objective, m)
            assert isinstance(own, NegativeLogDensity)
            member = ModuleStep(batches.window, own, options, steps, theta[one], scale)
            # Batches have their own addresses and, at the end of a pass, their own size.
            member.replayed = None
            member.parts, member.first_bad = self.parts[one], self.first_bad[one]
            self.members.append(member)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides theta."""
        return {
            f"{m}.{name}": tensor for m, member in enumerate(self.members) for name, tensor in member.tensors.items()
        }

    @property
    def backend_facts(self) -> dict[str, Any]:
        """The backend of steps on modules: torch, not compiled."""
        return {"name": "torch", "compiled": False}

    def advance_to(self, theta: Tensor, batches: Batches, t: int, limit: int, active: Tensor) -> int:
        """Take step t on the next batch; the prior's part of the loss is for the last step before `limit`."""
        batches.at(t)
        for m, member in enumerate(self.members):
            one = slice(m, m + 1)
            # The step takes all rows of the window, so none need to be gathered.
            member.advance_on(theta[one], None, t, active[one], with_prior=t + 1 == limit)
        return t + 1

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Take step t on the current batch."""
        for m, member in enumerate(self.members):
            member.advance(theta[m : m + 1], None, t, active[m : m + 1])
