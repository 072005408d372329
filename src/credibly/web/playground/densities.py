"""Densities of two variables: three textbook shapes, and a plane through the posterior of a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credibly.core.rows import sum_rows
from credibly.inference.density import Density
from credibly.methods import DeepEnsemble
from credibly.problem import Problem
from credibly.web.playground.bands import plain
from credibly.web.playground.models import make_problem
from credibly.web.playground.protocol import HMCRequest

# Maps points (C, 2) to log densities (C,).
LogDensity = Callable[[Tensor], Tensor]

CELLS = 81
# Steps of the MAP fits that span the plane.
PLANE_STEPS = 800


@dataclass(frozen=True, eq=False)
class Plane:
    """A density of two variables, the window in which it is shown, and where chains start."""

    density: Density
    window: tuple[float, float, float, float]
    starts: Tensor

    def surface(self) -> dict[str, Any]:
        """Return the fields of a surface message."""
        low_x, high_x, low_y, high_y = self.window
        return surface(self.density, (low_x, high_x, CELLS), (low_y, high_y, CELLS))


def surface(log_density: LogDensity, x: tuple[float, float, int], y: tuple[float, float, int]) -> dict[str, Any]:
    """Return the log density on a grid, row by row, in the form of a message."""
    with torch.no_grad():
        values = log_density(grid(x, y))
    return {"x": list(x), "y": list(y), "log_density": plain(values)}


def grid(x: tuple[float, float, int], y: tuple[float, float, int]) -> Tensor:
    """Return the points of a grid, (G, 2), in float64; x varies fastest."""
    second, first = torch.meshgrid(
        torch.linspace(*y, dtype=torch.float64), torch.linspace(*x, dtype=torch.float64), indexing="ij"
    )
    return torch.stack([first.flatten(), second.flatten()], 1)


def banana(w: Tensor) -> Tensor:
    """Return -u^2/2 - 2 (v - u^2/2 + 1)^2, a ridge that bends."""
    u, v = w.unbind(-1)
    return -0.5 * u**2 - 2 * (v - 0.5 * u**2 + 1) ** 2


def funnel(w: Tensor) -> Tensor:
    """Return the log density of v ~ N(0, 1.5^2) and u ~ N(0, e^v): no step size suits both of its ends."""
    u, v = w.unbind(-1)
    return -(v**2) / (2 * 1.5**2) - u**2 / (2 * torch.exp(v)) - 0.5 * v


def modes(w: Tensor) -> Tensor:
    """Return the log density of two separate Gaussians of equal weight."""
    u, v = w.unbind(-1)
    left, right = ((-((u - m) ** 2) - v**2) / (2 * 0.6**2) for m in (-2.0, 2.0))
    return torch.logaddexp(left, right) - math.log(2)


SHAPES = {"banana": banana, "funnel": funnel, "modes": modes}
WINDOWS = {"banana": (-4.0, 4.0, -3.0, 5.0), "funnel": (-6.0, 6.0, -5.0, 5.0), "modes": (-4.0, 4.0, -3.0, 3.0)}
STARTS = {
    "banana": [[-1.5, 0.5], [1.5, 0.5], [0.0, -1.0], [-2.0, 1.0]],
    "funnel": [[0.0, 1.0], [1.0, 2.0], [-1.0, 2.0], [0.0, 0.0]],
    "modes": [[-2.0, 0.0], [2.0, 0.0], [-2.0, 0.5], [2.0, 0.5]],
}


def make_plane(request: HMCRequest) -> Plane:
    """Return the density of a request."""
    if request.density != "network":
        shape = SHAPES[request.density]
        points = torch.tensor(STARTS[request.density][: request.chains], dtype=torch.float64)
        return Plane(Density(shape, 2, batched=True, name=request.density), WINDOWS[request.density], points)
    assert request.data is not None
    assert request.model is not None
    return network_plane(make_problem(request.data, request.model, classes=False), request.chains, request.seed)


def network_plane(problem: Problem, chains: int, seed: int) -> Plane:
    """Return the posterior density of a network on the plane through three of its MAP fits.

    The first fit is the origin and the second lies on the first axis. Coordinates are Euclidean distances of weights.
    """
    fitted = DeepEnsemble(members=3, steps=PLANE_STEPS).fit(problem, seed=seed, progress=False)
    origin, second, third = fitted.draws[:, 0].double()
    first_axis = (second - origin) / (second - origin).norm()
    across = third - origin
    across = across - (across @ first_axis) * first_axis
    second_axis = across / across.norm()
    basis, dtype = torch.stack([first_axis, second_axis]), problem.layout.dtype
    likelihood, prior = problem.tempering.likelihood, problem.tempering.prior

    def log_prob(w: Tensor) -> Tensor:
        theta = (origin + w @ basis).to(dtype)
        rows = problem.log_likelihood_rows(theta, problem.x, problem.y)
        value: Tensor = sum_rows(rows) / likelihood + problem.prior.log_prob(theta) / prior
        return value.double()

    modes_at = torch.stack([(m - origin) @ basis.T for m in (origin, second, third)])
    low, high = modes_at.min(0).values, modes_at.max(0).values
    # A square window, so that distances look the same in both directions.
    centre, half = (low + high) / 2, 0.75 * float((high - low).max())
    window = (*(float(v) for v in (centre[0] - half, centre[0] + half)),)
    window += (*(float(v) for v in (centre[1] - half, centre[1] + half)),)
    density = Density(log_prob, 2, batched=True, name="network")
    return Plane(density, window, modes_at[torch.arange(chains) % 3])  # type: ignore[arg-type]
