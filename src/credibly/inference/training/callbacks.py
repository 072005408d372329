"""The training state that is passed to callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from credibly.problem import Problem


@dataclass(frozen=True)
class TrainingState:
    """Training as a callback sees it, between two steps.

    Attributes:
        step, steps: steps taken, and planned.
        loss: the last loss of each member, on its minibatch.
        first: index of the first of these members: large networks are trained one after another.
        title: title of the progress bar.
    """

    step: int
    steps: int
    loss: tuple[float, ...]
    first: int
    title: str
    problem: Problem
    parameters: Tensor

    @property
    def theta(self) -> Tensor:
        """A copy of the weights (M, D); the means of a variational method."""
        return self.parameters[:, : self.problem.dim].detach().clone()

    def network(self, member: int = 0) -> nn.Module:
        """Return a copy of the network with the weights of a member."""
        return self.problem.layout.write(self.parameters[member, : self.problem.dim].detach())


Callback = Callable[[TrainingState], "bool | None"]
