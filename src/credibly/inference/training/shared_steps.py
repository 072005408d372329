"""A training step whose rows are shared out over processes.

Each evaluates its share of the minibatch. The gradient and the loss of a batch of B rows are means over its rows, so they are
the sum over processes of their own times (rows they took) / B; the prior or the complexity, which every process adds to its
own, enters once, because these weights sum to one. The sum goes round once a step, in one buffer, and the update is then the
same everywhere, bit for bit. Against one process it differs by the rounding of that sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credibly.core.compilation import compiled
from credibly.core.inputs import Inputs
from credibly.distributed.world import Mesh
from credibly.inference.training.native_steps import native_step
from credibly.inference.training.objectives import Objective
from credibly.inference.training.steps import Step
from credibly.problem import Problem

if TYPE_CHECKING:
    from credibly.inference.training.loop import Training


def make_step(
    problem: Problem, objective: Objective, options: Training, steps: int, theta: Tensor, batch: int, mesh: Mesh | None
) -> Step:
    """The step of one process, or of the processes of a mesh that share the rows of its batches."""
    if mesh is None or mesh.shape[1] == 1:
        native = native_step(problem, objective, options, steps, theta, batch)
        return native or Step(problem, objective, options, steps, theta)
    return SharedStep(problem, objective, options, steps, theta, batch, mesh)


class SharedStep(Step):
    """The step in three: evaluation of this process's rows, the sum over processes, and the update."""

    def __init__(
        self, problem: Problem, objective: Objective, options: Training, steps: int, theta: Tensor, batch: int, mesh: Mesh
    ) -> None:  # fmt: skip
        super().__init__(problem, objective, options, steps, theta)
        self.replayed = None  # the sum is not part of a graph
        taken = mesh.rows(batch)
        self.mesh, self.share, self.weight = mesh, slice(taken.start, taken.stop), len(taken) / batch
        objective.share = self.share
        # Where a batch is all rows of the problem, `advance` gets no indices.
        self.whole = torch.arange(taken.start, taken.stop, device=theta.device)
        self.evaluate = compiled(self._evaluate, options.compile, steps, theta.device, theta.numel())
        self.update = compiled(self._update, options.compile, steps, theta.device, theta.numel())
        width = theta.shape[-1] + len(objective.part_names)
        self.sums = torch.zeros(len(theta), width, dtype=theta.dtype, device=theta.device)

    def advance(self, theta: Tensor, rows: Tensor | None, t: int, active: Tensor) -> None:
        """Step t on theta (M, P), in place; all processes of the mesh take part in it."""
        with torch.no_grad():
            figures = self._figures_at(t)
            if self.weight:
                self._evaluate_share(theta, self.whole if rows is None else rows[..., self.share], t, figures)
            else:  # a batch of fewer rows than there are processes
                self.sums.zero_()
            self.mesh.sum_rows(self.sums)
            gradient, value = self.sums[:, : theta.shape[-1]], self.sums[:, theta.shape[-1] :]
            self.update(theta, self.state, self.parts, self.first_bad, value, gradient, figures, active)

    def _evaluate_share(self, theta: Tensor, rows: Tensor, t: int, figures: Tensor) -> None:
        noise, own, x, y = self.objective.noise(t), self.objective.own, self.problem.x, self.problem.y
        if not self.objective.looped or len(theta) == 1:
            self.evaluate(self.sums, theta, own, x, y, rows, noise, figures)
            return
        for m in range(len(theta)):
            one = slice(m, m + 1)
            mine, drawn = (tuple(tensor[one] for tensor in some) for some in (own, noise))
            batch = rows[one] if rows.ndim == 2 else rows
            self.evaluate(self.sums[one], theta[one], mine, x, y, batch, drawn, figures)

    def _evaluate(
        self, sums: Tensor, theta: Tensor, own: tuple[Tensor, ...], x: Inputs, y: Tensor, rows: Tensor, noise: tuple[Tensor, ...],
        figures: Tensor,
    ) -> None:  # fmt: skip
        value, gradient = self.objective.evaluate(theta, own, x, y, rows, noise, figures[4:])
        sums.copy_(torch.cat([gradient, value], -1) * self.weight)
