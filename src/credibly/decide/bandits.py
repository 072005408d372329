"""Thompson sampling: try each candidate as often as it is likely to be the best (Thompson 1933).

One draw of the weights is one function that may be the true one; the candidate that is best under it is taken. Noise of the
observations plays no part: what is compared is E(y | x, w).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    """The best candidate under each of `count` draws of the weights, (count,) row numbers; the same one may come again.

    Args:
        posterior: over functions of a candidate.
        candidates: inputs, a row each; they are gone through in blocks.
        count: how many to choose.
        seed: of the draws. In a loop it has to change from call to call.
        goal: "max", or "min" where less is better.
        value: what to compare, from function values (draws, rows, ...) to (draws, rows): for several targets or classes.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError("count", f"found {count!r}", "Pass a whole number from 1 up")
    sign = sign_of(goal)
    predictive, picks = drawn_functions(posterior, candidates, count, check_seed(seed))

    def block(output: Tensor, extra: dict[str, Tensor], start: int) -> tuple[Tensor, Tensor]:
        chosen = picks.to(output.device)
        few = {name: drawn[chosen] for name, drawn in extra.items()}
        functions = predictive.likelihood.moments(output[chosen], few)[0]
        best, place = (sign * one_value(predictive, functions, value)).max(1)
        return best, place + start

    best, place = (torch.stack(part) for part in zip(*predictive.map_blocks(block)))
    return place.gather(0, best.argmax(0, keepdim=True))[0]


def drawn_functions(posterior: Posterior, x: Any, count: int, seed: int) -> tuple[Predictive, Tensor]:
    """A predictive over at least `count` random draws, and which of its draws are the ones asked for.

    A posterior that draws by itself (dropout, Gaussians) is asked for that many; of stored draws some are picked.
    """
    settings = inspect.signature(posterior.predict).parameters
    if "seed" not in settings:
        return Predictive(
            WeightDraws(posterior.model, posterior.sample(count, seed=seed)), posterior.model.inputs(x)
        ), torch.arange(count)
    turns = posterior.components if isinstance(posterior, GaussianPosterior) else 1
    own = torch.randint(
        turns, (count,), generator=stream(seed, "thompson components")
    )  # components take turns in a call
    name = "passes" if "passes" in settings else "draws"
    more: dict[str, Any] = {name: count * turns, "seed": seed}
    if "joint" in settings:  # each draw has to be one function: its rows are compared with each other
        more["joint"] = True
    return posterior.predict(x, **more), torch.arange(count) * turns + own


def one_value(predictive: Predictive, functions: Tensor, value: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Function values (draws, rows, ..., K) as one number for each draw and row."""
    rows = functions.shape[:2]
    if value is not None:
        found = value(functions)
        if not isinstance(found, Tensor) or found.shape != rows:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError("value", f"gives {shape} for {tuple(functions.shape)}", f"It has to give {tuple(rows)}")
        return found
    if functions[0, 0].numel() != 1:
        raise InputError(
            "predictive",
            f"has {functions[0, 0].numel()} values a row ({type(predictive.likelihood).__name__})",
            "One number for each candidate can be compared; thompson takes value= for the others",
        )
    return functions.reshape(rows)


def sign_of(goal: Goal) -> int:
    """1 to look for the largest, -1 for the smallest."""
    if goal not in ("max", "min"):
        raise InputError("goal", f"found {goal!r}", 'Pass "max" or "min"')
    return 1 if goal == "max" else -1
