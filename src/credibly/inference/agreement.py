"""A check that the processes of one fit agree: on data, problem, settings, seed and versions.

Only the initial weights of the network may differ, as they do if a script builds it without a seed. All processes then
copy those of the leader.
"""

from __future__ import annotations

import hashlib
import logging
import re
from typing import Any

import torch
from torch import Tensor

from credibly.core.specs import to_spec
from credibly.distributed.world import World
from credibly.errors import InputError
from credibly.inference.density import Density
from credibly.inference.target import to_target
from credibly.problem import Problem

log = logging.getLogger("credibly")

ADVICE = {
    "credibly": "Install the same version of credibly for every process",
    "torch": "Install the same version of torch for every process",
    "data": "Load the same rows in the same order in every process",
    "problem": "Pass the same network, likelihood, prior and temperature in every process",
    "settings": "Pass the same method and settings in every process",
    "seed": "Pass the same seed in every process",
    "backend": "Install a C++ compiler for every process, or set CREDIBLY_NATIVE=0 for all of them",
}


def check_same_everywhere(world: World, problem: Problem | Density, method_settings: Any, seed: int) -> None:
    """Raise, naming two processes and what differs, unless all processes do the same fit.

    Args:
        world: the processes.
        problem: what is fitted. If only the weights of the networks differ, all processes copy those of the leader.
        method_settings: the method, or its spec (see `to_spec`).
        seed: the seed of the fit.
    """
    if world.size == 1:
        return
    from credibly import __version__

    network = _network(problem)
    mine = {
        "credibly": __version__,
        "torch": torch.__version__,
        "data": (problem if isinstance(problem, Problem) else to_target(problem)).fingerprint(),
        "problem": _plain(_describe(problem)),
        "settings": _plain(to_spec(method_settings)),
        "seed": seed,
        "backend": _backend(problem),
        "network": _hash(network),
    }
    gathered = world.gather(mine)
    for what, advice in ADVICE.items():
        other = next((rank for rank, theirs in enumerate(gathered) if theirs[what] != gathered[0][what]), None)
        if other is not None:
            here, there = _difference(gathered[0][what], gathered[other][what])
            raise InputError(
                what,
                f"must be the same in all processes, got {here} in process 0 and {there} in process {other}",
                advice,
            )
    if any(theirs["network"] != gathered[0]["network"] for theirs in gathered):
        log.info("the networks of the processes differ; all processes copy the weights of process 0")
        for tensor in network:
            world.from_leader(tensor)


def _describe(problem: Problem | Density) -> Any:
    if not isinstance(problem, Problem):
        return {"kind": type(problem).__name__, "dim": problem.dim}
    network = [f"{e['role']} {e['name']} {tuple(e['shape'])}" for e in problem.layout.signature()]
    return {
        "network": network,
        "dtype": str(problem.layout.dtype),
        "likelihood": to_spec(problem.likelihood),
        "prior": to_spec(problem.prior_spec),
        "temperature": to_spec(problem.tempering),
    }


def _backend(problem: Problem | Density) -> str:
    """Return the backend of a small network's steps: results round differently with and without the C++ library."""
    small = isinstance(problem, Problem) and problem.forward.cpp_stack is not None
    return "C++" if small else "torch"


def _network(problem: Problem | Density) -> list[Tensor]:
    """Return the weights and buffers of a problem's own copy of its network."""
    if not isinstance(problem, Problem):
        return []
    module = problem.layout.module
    return [*(p.detach() for p in module.parameters()), *module.buffers()]


def _hash(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _plain(value: Any) -> Any:
    """Remove memory addresses, which the repr of a user's objects may contain, from a description."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return re.sub(r"0x[0-9a-fA-F]+", "0x", value) if isinstance(value, str) else value


def _difference(here: Any, there: Any) -> tuple[str, str]:
    """Return the first part in which two descriptions differ, as text."""
    if isinstance(here, dict) and isinstance(there, dict) and here.keys() == there.keys():
        key = next(k for k in here if here[k] != there[k])
        first, second = _difference(here[key], there[key])
        return f"{key} {first}", f"{key} {second}"
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        return _difference(*next((a, b) for a, b in zip(here, there) if a != b))
    return repr(here)[:200], repr(there)[:200]
