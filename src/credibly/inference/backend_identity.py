"""The backend as part of a run's identity: a run resumes on the backend that it was started on, or not at all.

Backends agree to rounding, and chains magnify rounding until their draws have nothing in common. So a run that was
started with the C++ library is not resumed without it, and one that was started without it resumes without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from credibly.backends.cpp.in_use import library_found, why_missing, without_library
from credibly.core.compilation import compiler_missing, without_compiler
from credibly.distributed.world import World
from credibly.errors import StoreError

WORDS = {"cpp": "the C++ library", "cuda": "a CUDA kernel", "torch": "torch alone"}
EVERYWHERE = (
    "Results would depend on the process that computes them. Install a C++ compiler for every process, or set "
    "CREDIBLY_NATIVE=0 for all of them"
)


def backend_facts(selected: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the entries of a manifest about a run's backend: the one selected, and what was available.

    `selected` has the `name` of the backend, and whether torch has `compiled` the steps.
    """
    return {**selected, "library": library_found(), "compiler": compiler_missing(device) is None}


def check_same_backend(selected: Mapping[str, Any], world: World) -> None:
    """Raise, before the first step, unless all processes have selected the same backend."""
    if world.size > 1:
        world.agree("backend", dict(selected), EVERYWHERE)


@contextmanager
def as_started(manifest: Mapping[str, Any]) -> Iterator[None]:
    """Select backends in this block as when the run was started, without those that were not available then."""
    stored = manifest.get("backend", {})
    with ExitStack() as stack:
        if stored.get("library") is False:
            stack.enter_context(without_library())
        if stored.get("compiler") is False:
            stack.enter_context(without_compiler())
        yield


def check_backend(now: Mapping[str, Any], stored: Mapping[str, Any] | None, name: str, device: torch.device) -> None:
    """Raise, with the reason, unless the run would continue on the backend that it was started on."""
    if stored is None:
        # Written by an earlier version, which did not record it.
        return
    if (now["name"], now["compiled"]) == (stored["name"], stored["compiled"]):
        return
    if stored["name"] != now["name"]:
        lost, reason = WORDS.get(stored["name"], stored["name"]), ""
        if stored["name"] == "cpp":
            reason = f" ({why_missing()})"
        found = f"was started with {lost} and would continue with {WORDS[now['name']]}{reason}"
    elif stored["compiled"]:
        reason = compiler_missing(device) or "torch.compile is switched off"
        found = f"was started with compiled steps and would continue without ({reason})"
    else:
        found = "was started without compiled steps and would continue with them"
    raise StoreError(
        f"path: {name!r} {found}, and its results would not be those of an uninterrupted run. Resume it where "
        f"{'that is available' if stored['name'] != 'torch' or stored['compiled'] else 'it was started'}, or fit again"
    )
