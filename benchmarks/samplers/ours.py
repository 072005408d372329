"""Our samplers against the clock: warm-up, then draws until the time is up.

The loop is that of `fit`, without its progress bar and checkpoints; `Sampler.prolong` adds draws as long as there is
time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import credibly as cr
from benchmarks.efficiency import compile_clock
from benchmarks.samplers.posterior import HIDDEN, Posterior, predictions
from credibly.inference.sampling.loop import never
from credibly.inference.sampling.run import SamplingMethod
from credibly.tables.recipe import Recipe

# Iterations between two checks of the clock, each of which waits for a GPU; iterations of the run that compiles
# everything.
EVERY, REHEARSED = 5, 3
# Draws that are taken even if warm-up used up the time.
LEAST = 20


def method_of(entry: dict[str, Any], posterior: Posterior) -> SamplingMethod:
    """Return the method of an entry of the table, with a chain per starting point."""
    settings = {k: v for k, v in entry.items() if k != "method"}
    chains = len(posterior.start)
    if entry["method"] == "auto":
        recipe = Recipe(hidden=(HIDDEN,), method="auto")
        chosen = recipe.fitter(posterior.problem.n, posterior.problem.dim)
        assert isinstance(chosen, SamplingMethod)
        return dataclasses.replace(chosen, **{**settings, "chains": chains})  # type: ignore[type-var]
    kind: Any = cr.METHODS[entry["method"]]
    method = kind(chains=chains, **settings)
    assert isinstance(method, SamplingMethod)
    return method


def run(entry: dict[str, Any], posterior: Posterior, seed: int, budget: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return predictions of the draws, and durations and counts, of one run of `budget` seconds."""
    method = method_of(entry, posterior)
    began = time.perf_counter()
    _sample(method, posterior, seed, lambda done, *_: done < REHEARSED)
    rehearsal = time.perf_counter() - began
    with compile_clock() as spent:
        built = spent[0]
        draws, info = _sample(method, posterior, seed, lambda _, seconds, kept: seconds < budget or kept < LEAST)
        compiled = spent[0] - built
    info["seconds"] -= compiled
    info["warmup_seconds"] -= compiled
    return predictions(posterior, draws), {**info, "compile": rehearsal + compiled}


def _sample(
    method: SamplingMethod, posterior: Posterior, seed: int, more: Callable[[int, float, int], bool]
) -> tuple[Tensor, dict[str, Any]]:
    """Advance the chains while `more(iterations, seconds, draws)` holds. Return draws (C, n, D), durations, counts."""
    target = method.target(posterior.problem.reduced(), None)
    sampler = method.sampler(target, seed)
    draws: list[Tensor] = []
    began = time.perf_counter()
    sampler.start(target.encode(posterior.start.to(target.device, target.dtype).clone()))
    warmup_seconds = 0.0
    while sampler.done % EVERY or more(sampler.done, _seconds(began, target.device), len(draws)):
        if sampler.done >= sampler.total:
            sampler.prolong(method.draws, discard=False)
        sampler.advance(never)
        if sampler.keeps():
            warmup_seconds = warmup_seconds or _seconds(began, target.device)
            draws.append(sampler.target.decode(sampler.theta).clone())
    seconds = _seconds(began, target.device)
    history = sampler.history()
    info = {
        "seconds": seconds,
        "warmup_seconds": warmup_seconds or seconds,
        "gradients": float(history["gradients"]),
        "divergences": float(sum(history.get("divergences", [0]))),
        "parallel": "native" if history.get("native") else "batched",
        "settings": {k: v for k, v in dataclasses.asdict(method).items() if k != "init"},  # type: ignore[call-overload]
    }
    empty = torch.empty(len(posterior.start), 0, target.dim)
    return torch.stack(draws, 1) if draws else empty, info


def _seconds(began: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
