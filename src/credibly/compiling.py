"""When to compile, and what to do where it cannot be done: run eagerly, with one line that says so."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from typing import Any, Literal

import torch

log = logging.getLogger("credibly")
Compile = bool | Literal["auto"]

# A cold compile costs 5 to 18 seconds and saves about a millisecond of dispatch a call, so fewer calls do not pay for it.
CALLS_THAT_PAY = 10_000


def compiler_missing(device: torch.device) -> str | None:
    """Why torch.compile cannot work for this device here, or None."""
    if device.type == "cpu":
        names = [os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl"]
        if not any(name and shutil.which(name) for name in names):
            return "no C++ compiler was found"
    return None


def compiled(function: Callable[..., Any], mode: Compile, calls: int, device: torch.device) -> Callable[..., Any]:
    """The function, compiled where that was asked for or pays; a failure to compile falls back to eager with a log line."""
    if mode is False or (mode == "auto" and calls < CALLS_THAT_PAY):
        return function
    missing = compiler_missing(device)
    if missing:
        log.info("running eagerly: %s", missing)
        return function
    return _Fallback(function)


class _Fallback:
    """A compiled function that turns into the plain one if its first call cannot be compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function
        self.active: Callable[..., Any] = torch.compile(function, dynamic=False)
        self.tried = False

    def __call__(self, *args: Any) -> Any:
        if self.tried:
            return self.active(*args)
        self.tried = True
        try:
            return self.active(*args)
        except (
            Exception
        ) as error:  # the compiler's failures have no common type; a real error comes again from the plain call
            log.info(
                "running eagerly: torch.compile failed (%s: %s)", type(error).__name__, str(error).splitlines()[0][:200]
            )
            self.active = self.plain
            return self.plain(*args)
