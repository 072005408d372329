"""Thompson sampling: choose each candidate with the probability that it is the best (Thompson 1933).

Each draw of the weights is one plausible function; the candidate that maximises it is chosen. Functions are compared by
E(y | x, w), without observation noise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credibly.core.checks import check_choice, check_integer
from credibly.core.rng import check_seed, stream
from credibly.errors import InputError
from credibly.posterior.base import Posterior
from credibly.posterior.draws import WeightDraws
from credibly.posterior.gaussian import GaussianPosterior
from credibly.predictive.base import Predictive

Goal = str  # "max" or "min"


def thompson(
    posterior: Posterior,
    candidates: Any,
    count: int = 1,
    *,
    seed: int = 0,
    goal: Goal = "max",
    value: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the row number of the best candidate under each of `count` draws of the weights, (count,), with repeats.

    Args:
        posterior: posterior over the objective.
        candidates: inputs, one candidate per row; evaluated in blocks.
        count: number of draws.
        seed: random seed of the draws. Change it between calls in a loop.
        goal: "max" or "min".
        value: maps function values (draws, rows, ...) to the objective (draws, rows). Needed for several targets or
            classes.
    """
    check_integer("count", count)
    sign = sign_of(goal)
    predictive, picks = sample_functions(posterior, candidates, count, check_seed(seed))

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor]:
        chosen = picks.to(output.device)
        chosen_extra = {name: values[chosen] for name, values in extra.items()}
        functions = predictive.likelihood.moments(output[chosen], chosen_extra)[0]
        best, row = (sign * scalar_values(predictive, functions, value)).max(1)
        return best, row + start

    best, place = (torch.stack(part) for part in zip(*predictive.map_blocks(block)))
    return place.gather(0, best.argmax(0, keepdim=True))[0]


def sample_functions(posterior: Posterior, x: Any, count: int, seed: int) -> tuple[Predictive, Tensor]:
    """Return a predictive over at least `count` random draws, and the indices of the `count` draws to use.

    Posteriors that sample on demand (dropout, Gaussians) draw that many; from stored draws a random subset is taken.
    """
    settings = inspect.signature(posterior.predict).parameters
    if "seed" not in settings:
        draws = WeightDraws(posterior.model, posterior.sample(count, seed=seed))
        return Predictive(draws, posterior.model.inputs(x)), torch.arange(count)
    # `predict` cycles through the mixture components: draw every component `count` times and pick one at random each.
    components = posterior.components if isinstance(posterior, GaussianPosterior) else 1
    picked = torch.randint(components, (count,), generator=stream(seed, "thompson components"))
    name = "passes" if "passes" in settings else "draws"
    options: dict[str, Any] = {name: count * components, "seed": seed}
    if "joint" in settings:  # each draw must be one function, since its rows are compared with each other
        options["joint"] = True
    return posterior.predict(x, **options), torch.arange(count) * components + picked


def scalar_values(predictive: Predictive, functions: Tensor, value: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Reduce function values (draws, rows, ..., K) to one number per draw and row."""
    rows = functions.shape[:2]
    if value is not None:
        found = value(functions)
        if not isinstance(found, Tensor) or found.shape != rows:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError("value", f"must return shape {tuple(rows)} for {tuple(functions.shape)}, got {shape}")
        return found
    if functions[0, 0].numel() != 1:
        raise InputError(
            "predictive",
            f"has {functions[0, 0].numel()} values per row ({type(predictive.likelihood).__name__})",
            "Candidates are compared by one number each; thompson takes value= to compute it",
        )
    return functions.reshape(rows)


def sign_of(goal: Goal) -> int:
    """Return 1 to maximise, -1 to minimise."""
    check_choice("goal", goal, ("max", "min"))
    return 1 if goal == "max" else -1
