"""SG-MCMC on a stream: chains share the batches, which are read one after another."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from credibly.distributed.world import Mesh
from credibly.inference.sampling.module_langevin import ModuleLangevin
from credibly.inference.sampling.sgmcmc import SGMCMCSampler
from credibly.inference.sampling.sgmcmc_plan import SGMCMCPlan
from credibly.inference.target import ProblemTarget, StreamTarget
from credibly.inference.training.batches import Batches
from credibly.inference.training.stream_batches import StreamBatches

POSITION = "stream_position"


class StreamSampler(SGMCMCSampler):
    """C chains of SGLD or SGHMC whose steps take the batches of a stream.

    Warm-up steps that are repeated with half the size take the batches that follow. The number of batches read so far
    is part of the state, so that a resumed run continues where it stopped.
    """

    target: StreamTarget
    batches: StreamBatches

    def __init__(self, target: StreamTarget, plan: SGMCMCPlan, seed: int, mesh: Mesh) -> None:
        # Each batch is a new tensor, and the last of a pass has another length: nothing to compile or replay.
        super().__init__(target, dataclasses.replace(plan, compile=False), seed, mesh)
        self.replayed = None

    def _make_batches(self) -> Batches | None:
        batches = StreamBatches(self.target.streamed, seed=self.seed, purpose="sampling")
        self.stepped = ProblemTarget(batches.window)
        return batches

    def _advance_one(self, t: int, controls: Tensor) -> None:
        rows = self.batches.at(t)
        self.scale = self.batches.count / len(rows)
        if not self.one_by_one:
            self.step(*self._buffers(), rows, self.noise.at(t), controls)
            return
        if isinstance(self.step, ModuleLangevin):
            # The step takes all rows of the window, so none need to be gathered.
            self.step.scale, rows = self.scale, None  # type: ignore[assignment]
        for c in range(self.chains):
            one = slice(c, c + 1)
            self.step(*(b[one] for b in self._buffers()), rows, self._noise_of(c, t), controls)

    @property
    def gradients(self) -> float:
        """Gradients so far of all chains, in units of full gradients: a minibatch counts as B/N."""
        return self.plan.chains * self.done * self.batches.batch / self.batches.count + self.warm.gradients

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the chains, and the number of batches read."""
        return {**super().tensors(), POSITION: torch.tensor(self.batches.position)}

    def chain_axis(self, name: str) -> int | None:
        """Return 0: all tensors but the counts have a row per chain."""
        return None if name == POSITION else super().chain_axis(name)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned; the batches read by then are skipped."""
        super().restore(tensors)
        self.batches.seek(int(tensors[POSITION]))
