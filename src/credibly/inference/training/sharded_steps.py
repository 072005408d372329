"""A training step whose rows are shared by several processes.

Each process evaluates its part of the minibatch. The gradient and the loss of a batch of B rows are means over its
rows, so they are weighted sums over processes with weights (own rows / B). The prior, or the complexity term, which
every process adds, enters once, because these weights sum to one. One buffer is summed over processes per step, and
the update is then bit-for-bit identical everywhere. From a single process it differs by the rounding of that sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credibly.core.inputs import Inputs
from credibly.distributed.world import Mesh
from credibly.inference.training.objectives import Objective
from credibly.inference.training.settings import Training
from credibly.inference.training.steps import Step
from credibly.problem import Problem


class ShardedStep(Step):
    """A step in three parts: evaluation of this process's rows, the sum over processes, and the update."""

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        options: Training,
        steps: int,
        theta: Tensor,
        batch: int,
        mesh: Mesh,
    ) -> None:
        super().__init__(problem, objective, options, steps, theta)
        # The sum over processes cannot be part of a CUDA graph.
        self.replayed = None
        own = mesh.rows(batch)
        self.mesh, self.shard, self.weight = mesh, slice(own.start, own.stop), len(own) / batch
        objective.shard = self.shard
        # If a batch is all rows of the problem, `advance` gets no indices.
        self.all_rows = torch.arange(own.start, own.stop, device=theta.device)
        self.evaluate = self.backend.compile_step(self._evaluate, steps, theta.device, theta.numel())
        self.update = self.backend.compile_step(self._update, steps, theta.device, theta.numel())
        width = theta.shape[-1] + len(objective.part_names)
        self.sums = torch.zeros(len(theta), width, dtype=theta.dtype, device=theta.device)

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Take step t on theta (M, P), in place: a collective call of all processes of the mesh."""
        with torch.no_grad():
            controls = self._controls_at(t)
            if self.weight:
                self._evaluate_shard(theta, self.all_rows if rows is None else rows[..., self.shard], t, controls)
            else:
                # The batch has fewer rows than there are processes.
                self.sums.zero_()
            self.mesh.sum_rows(self.sums)
            gradient, value = self.sums[:, : theta.shape[-1]], self.sums[:, theta.shape[-1] :]
            self.update(theta, self.state, self.parts, self.first_bad, value, gradient, controls, active)

    def _evaluate_shard(self, theta: Tensor, rows: Tensor, t: int, controls: Tensor) -> None:
        noise, own, x, y = self.objective.noise(t), self.objective.own, self.problem.x, self.problem.y
        if not self.objective.looped or len(theta) == 1:
            self.evaluate(self.sums, theta, own, x, y, rows, noise, controls)
            return
        for m in range(len(theta)):
            one = slice(m, m + 1)
            member, drawn = (tuple(tensor[one] for tensor in some) for some in (own, noise))
            batch = rows[one] if rows.ndim == 2 else rows
            self.evaluate(self.sums[one], theta[one], member, x, y, batch, drawn, controls)

    def _evaluate(
        self,
        sums: Tensor,
        theta: Tensor,
        own: tuple[Tensor, ...],
        x: Inputs,
        y: Tensor,
        rows: Tensor,
        noise: tuple[Tensor, ...],
        controls: Tensor,
    ) -> None:
        value, gradient = self.objective.evaluate(theta, own, x, y, rows, noise, controls[4:])
        sums.copy_(torch.cat([gradient, value], -1) * self.weight)
