"""The posterior that all samplers share: inputs-50-1 with SiLU on a UCI split, its noise scale learned.

The network, the prior (Normal, scaled by the fan-in) and the noise (log scale ~ N(-1, 1)) are those of the UCI study.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import credibly as cr
from benchmarks.jax_client import JaxSide, check_density
from credibly.inference.sampling.starts import starts
from credibly.likelihoods.continuous import STANDARD
from credibly.tables.recipe import Recipe

HIDDEN, MOST_ROWS = 50, 200
# Random points of the prior at which the densities are compared, beside the starting points.
POINTS = 8


@dataclass(frozen=True)
class Posterior:
    """A problem, its starting points, and the test rows whose predictions are measured."""

    name: str
    problem: cr.Problem
    start: Tensor
    start_seconds: float
    x_test: Tensor
    y_test: Tensor
    y_std: float

    @property
    def sizes(self) -> list[int]:
        """Widths of the layers."""
        assert isinstance(self.problem.x, Tensor)
        return [self.problem.x.shape[1], HIDDEN, 1]

    def prior(self) -> tuple[Tensor, Tensor]:
        """Return location and standard deviation of every coordinate; the last is the log of the noise scale."""
        scale = self.problem.prior.std.float().cpu()
        loc = torch.zeros_like(scale)
        loc[-1] = STANDARD.loc
        return loc, scale

    def arrays(self) -> dict[str, Tensor]:
        """Return what the JAX side needs to build the density and the predictions."""
        loc, scale = self.prior()
        assert isinstance(self.problem.x, Tensor)
        return {"x": self.problem.x, "y": self.problem.y, "loc": loc, "scale": scale, "x_test": self.x_test}

    def check(self, side: JaxSide, seed: int = 0) -> None:
        """Exit unless JAX computes the same density at starting points and at random points of the prior."""
        loc, scale = self.prior()
        generator = torch.Generator().manual_seed(seed)
        random = loc + scale * torch.randn(POINTS, len(loc), generator=generator)
        theta = torch.cat([self.start[:POINTS].cpu(), random]).to(self.problem.device)
        check_density(side, {"sizes": self.sizes}, self.problem, theta, module="flat", loc=loc, scale=scale)


def load(root: Path, name: str, chains: int, *, init: str = "fresh", split: int = 0, device: str = "cpu") -> Posterior:
    """Return the posterior of one split with a starting point for each chain.

    `init` is "fresh" (a random initialisation per chain), "prior", or "ensemble" (a MAP fit per chain).
    """
    data = cr.data.uci(root, name, split)
    recipe = Recipe(hidden=(HIDDEN,), noise="learned")
    problem = recipe.problem(data.x_train.numpy(), data.y_train.numpy()[:, 0], seed=0, device=device)
    began = time.perf_counter()
    theta = starts(problem, init, chains, 0, False)
    seconds = time.perf_counter() - began if init == "ensemble" else 0.0
    x, y = data.x_test[:MOST_ROWS].to(device), data.y_test[:MOST_ROWS, 0]
    assert data.y_std is not None
    return Posterior(name, problem, theta, seconds, x, y, float(data.y_std))


def predictions(posterior: Posterior, draws: Tensor, block: int = 4096) -> dict[str, Any]:
    """Return predictions at the test rows (C, n, R) and log noise scales (C, n) of draws (C, n, D)."""
    flat = draws.flatten(0, 1)
    with torch.no_grad():
        parts = [posterior.problem.forward(some, posterior.x_test).flatten(1).cpu() for some in flat.split(block)]
    return {"functions": torch.cat(parts).unflatten(0, draws.shape[:2]), "log_noise": draws[..., -1].cpu()}
