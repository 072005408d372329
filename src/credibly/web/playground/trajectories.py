"""Inside HMC: every leapfrog step of every trajectory on a density of two variables, by the library's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.diagnostics.convergence import MIN_DRAWS, ess, rhat
from credibly.inference.kernels.hmc import LEAPFROG, State, kinetic, metropolis, refresh
from credibly.inference.target import to_target
from credibly.web.playground.bands import finite
from credibly.web.playground.densities import make_plane
from credibly.web.playground.protocol import HMCRequest

# Coordinates beyond which a path is no longer drawn, and maximum number of steps of a trajectory.
FAR, MAX_STEPS = 1e6, 400

Send = Callable[[dict[str, Any]], None]


def run_trajectories(request: HMCRequest, send: Send, cancelled: Callable[[], bool]) -> None:
    """Send the density, then each trajectory of each chain, then a summary of the draws."""
    plane = make_plane(request)
    send({"type": "surface", "id": request.id, **plane.surface()})
    target = to_target(plane.density)
    theta = plane.starts.clone()
    likelihood, gradient = target.likelihood_and_grad(theta)
    state = State(theta, gradient, likelihood, target.log_prior(theta), torch.zeros_like(theta))
    # As in `HMC`: a length of 1.1 is eleven steps of 0.1, although their quotient is rounded up.
    steps = min(MAX_STEPS, max(1, math.ceil(request.trajectory_length / request.step_size - 1e-9)))
    size = torch.full((len(theta), 1), request.step_size, dtype=theta.dtype)
    draws, acceptances, divergences = [], 0.0, 0
    for iteration in range(request.trajectories):
        if cancelled():
            return
        noise = torch.randn(theta.shape, generator=stream(request.seed, "momentum", iteration), dtype=theta.dtype)
        current = state._replace(momentum=refresh(state.momentum, noise, None, 1.0))
        start = _energy(current)
        path, errors, here = [current.theta], [torch.zeros(len(theta), dtype=torch.float64)], current
        for _ in range(steps):
            position, momentum, gradient, likelihood = LEAPFROG.step(
                here.theta, here.momentum, here.gradient, size, None, target.likelihood_and_grad
            )
            here = State(position, gradient, likelihood, target.log_prior(position), momentum)
            path.append(position)
            errors.append(_energy(here) - start)
        uniform = torch.rand(len(theta), generator=stream(request.seed, "accept", iteration), dtype=torch.float64)
        state, info = metropolis(current, here, None, uniform, target.weights)
        draws.append(state.theta)
        acceptances += float(info.acceptance.mean())
        divergences += int(info.divergent.sum())
        for chain in range(len(theta)):
            send(
                {
                    "type": "trajectory",
                    "id": request.id,
                    "chain": chain,
                    "iteration": iteration,
                    **_drawn([point[chain] for point in path], [error[chain] for error in errors]),
                    "acceptance": finite(info.acceptance[chain]),
                    "accepted": bool(info.accepted[chain]),
                    "divergent": bool(info.divergent[chain]),
                }
            )
    kept = torch.stack(draws, 1)
    enough = kept.shape[1] >= MIN_DRAWS
    agreement = finite(rhat(kept).max()) if enough else None
    send(
        {
            "type": "finished",
            "id": request.id,
            "acceptance": acceptances / request.trajectories,
            "divergences": divergences,
            "gradients": steps * request.trajectories * len(theta),
            "rhat": agreement,
            # Chains that never moved have no effective draws, although their autocorrelation suggests some.
            "ess": finite(ess(kept).min()) if agreement is not None else None,
        }
    )


def _energy(state: State) -> Tensor:
    """Return H = -log p + kinetic energy, (C,)."""
    return kinetic(state.momentum, None) - state.log_likelihood - state.log_prior


def _drawn(path: list[Tensor], errors: list[Tensor]) -> dict[str, Any]:
    """Return the points and energy errors up to the first point that is too far to draw."""
    stop = next((i for i, p in enumerate(path) if not bool((p.abs() < FAR).all())), len(path))
    points = [[float(f"{v:.6g}") for v in p.tolist()] for p in path[:stop]]
    return {"path": points, "energy_error": [finite(e) for e in errors[:stop]]}
