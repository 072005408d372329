"""The part of a problem that outlives its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from credibly.core.inputs import Inputs, describe, map_inputs, to_inputs
from credibly.forward import Forward, try_network
from credibly.likelihoods import Likelihood
from credibly.networks.layout import Layout
from credibly.problem import Problem


@dataclass(frozen=True)
class Model:
    """What prediction needs of a problem: network, flat layout and likelihood, without the data.

    Attributes:
        row: structure, shapes and dtypes of one row of x, as returned by `credibly.core.inputs.describe`.
    """

    layout: Layout
    likelihood: Likelihood
    forward: Forward
    row: dict[str, Any]

    @classmethod
    def of(cls, problem: Problem) -> Model:
        """Return the model of a problem."""
        return cls(problem.layout, problem.likelihood, problem.forward, describe(problem.x))

    def inputs(self, x: Any) -> Inputs:
        """Return x on the model's device; raise on a wrong shape before anything is computed."""
        ready = to_inputs(x, self.layout.device, self.layout.input_dtype, convert=True)
        try_network(self.layout, map_inputs(lambda t: t[:1], ready))
        return ready

    def extra(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the likelihood's own parameters in theta (S, D)."""
        if not self.layout.extra:
            return {}
        return {k.removeprefix("likelihood."): v for k, v in self.layout.split(theta)[1].items()}
