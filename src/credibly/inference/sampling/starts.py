"""Starting points of samplers, and checks that a density can be sampled from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from credibly.core.rng import stream
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.method import initial
from credibly.inference.target import Target
from credibly.inference.training.data import split
from credibly.inference.training.loop import train
from credibly.inference.training.objectives import NegativeLogDensity
from credibly.inference.training.settings import Training
from credibly.posterior.base import Posterior
from credibly.problem import Problem

# A predicted variance near zero makes gradients arbitrarily large, and one such step can lose a chain for good.
CLIP_NORM = 100.0
STARTS = ("prior", "map", "ensemble", "network", "fresh")
# Number of random starting points to try for a chain whose density is zero or undefined at the first.
TRIES = 100


def check_init(init: object) -> None:
    """Raise unless `init` describes starting points."""
    if isinstance(init, (Tensor, Posterior)) or (isinstance(init, str) and init in STARTS):
        return
    known = ", ".join(repr(start) for start in STARTS)
    raise InputError("init", f"must be one of {known}, a (chains, D) tensor or a posterior, got {init!r}")


def starts(
    problem: Problem | Density,
    init: str | Tensor | Posterior,
    chains: int,
    seed: int,
    progress: bool | None,
    own: range | None = None,
    steps: int = 1000,
) -> Tensor:
    """Return the starting points (C, D) of all chains, or of the chains in `own`.

    "prior": draws from the prior, which are more dispersed than the posterior, as R-hat requires. "map": all chains at
    one MAP fit. "ensemble": each chain at its own MAP fit from the initial values of "fresh", all trained as one batch.
    A posterior: at draws from it. `steps` is the length of those fits, which need not reach the mode.
    """
    chosen = slice(own.start, own.stop) if own is not None else slice(None)
    if isinstance(init, Posterior):
        init = init.sample(chains, seed=seed)
    if isinstance(problem, Density):
        return _density_start(problem, init, chains, seed)[chosen]
    if isinstance(init, Tensor) or init in ("prior", "network", "fresh"):
        return initial(problem, init, chains, seed)[chosen]
    members = 1 if init == "map" else chains
    theta = initial(problem, "network" if init == "map" else "fresh", members, seed)
    first = 0
    if init != "map" and own is not None:
        theta, first = theta[chosen].clone(), own.start
    fit = Training(steps=steps, clip_norm=CLIP_NORM)
    data = split(problem, fit, seed)
    objective = NegativeLogDensity(problem, data.count)
    title = "MAP start" if members == 1 else f"{members} MAP starts"
    done = train(problem, objective, theta, fit, data, seed=seed, title=title, progress=progress, first=first)
    return done.theta.expand(chains, -1)[chosen].clone() if init == "map" else done.theta


def describe_starts(
    problem: Problem | Density, init: str | Tensor | Posterior, chains: int, seed: int
) -> dict[str, Any]:
    """Return where the chains start, for the record, and whether all of them start at the same point."""
    if isinstance(init, str):
        # A density has no network: its chains start at random points, whatever `init` is.
        known = isinstance(problem, Problem)
        return {"init": init if known else "random", "identical": known and chains > 1 and init in ("map", "network")}
    points = init.sample(chains, seed=seed) if isinstance(init, Posterior) else init
    same = chains > 1 and points.ndim == 2 and bool((points == points[:1]).all())
    return {"init": "posterior" if isinstance(init, Posterior) else "tensor", "identical": same}


def _density_start(density: Density, init: str | Tensor, chains: int, seed: int) -> Tensor:
    if isinstance(init, Tensor):
        if init.shape != (chains, density.dim) or not bool(torch.isfinite(init).all()):
            found = f"must be a finite tensor of shape ({chains}, {density.dim}), got shape {tuple(init.shape)}"
            raise InputError("init", found)
        return init.detach().to(density.device, density.dtype).clone()
    theta = torch.stack([_random_point(density, stream(seed, "start", c)) for c in range(chains)])
    for attempt in range(1, TRIES):
        outside = (~torch.isfinite(density(theta))).nonzero().flatten().tolist()
        if not outside:
            break
        for c in outside:
            theta[c] = _random_point(density, stream(seed, "start again", c, attempt))
    return theta


def _random_point(density: Density, generator: torch.Generator) -> Tensor:
    point = torch.randn(density.dim, generator=generator, dtype=torch.float64)
    return (point.to(density.device) * density.scale).to(density.dtype)


def evaluate_start(target: Target, theta: Tensor, slices: list[slice], first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log likelihood, gradient and log prior at the starting points.

    Raise if the density is not finite or not deterministic there.
    """
    with torch.no_grad():
        parts = [target.likelihood_and_grad(theta[part]) for part in slices]
        log_lik, gradient = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        log_prior = target.log_prior(theta)
        again = target.likelihood_and_grad(theta[slices[0]])[0]
        gap = (again - log_lik[slices[0]]).abs().max()
        exact = [target.full_likelihood(theta[part]) for part in slices]
        full = [value for value in exact if value is not None]
        log_lik = torch.cat(full) if full else log_lik
    check_start({"likelihood": log_lik, "prior": log_prior, "gradient": gradient.sum(-1)}, gap, first)
    return log_lik, gradient, log_prior


def check_start(parts: dict[str, Tensor], gap: Tensor, first: int = 0) -> None:
    """Raise if a part of the density, (C,), is not finite, or the likelihood changed by `gap` when evaluated again."""
    for name, values in parts.items():
        bad = ~torch.isfinite(values)
        if bool(bad.any()):
            chain = int(bad.int().argmax())
            raise InputError(
                "init",
                f"the {name} is {float(values[chain])} at the starting point of chain {first + chain}",
                'Start elsewhere (init="prior", "ensemble" or a tensor), and check data and network for NaN values',
            )
    if bool(gap > 1e-4 * (1 + parts["likelihood"].abs().max())):
        raise InputError(
            "net",
            f"its log likelihood changed by {float(gap):.3g} between two evaluations at one point",
            "The density must be deterministic: remove random layers (such as dropout inside forward) from the network",
        )
