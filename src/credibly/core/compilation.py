"""When to compile, and what to do where it cannot be done: run eagerly, with one line that says so."""

from __future__ import annotations

import logging
import os
import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

log = logging.getLogger("credibly")
Compile = bool | Literal["auto"]

# A cold compile costs 5 to 18 seconds and saves about a millisecond of dispatch a call, so fewer calls do not pay for it.
CALLS_THAT_PAY = 10_000
VALUES_OF_A_CALL = 400_000  # parameters whose eager update takes about as long as the dispatch of a call


def compiler_missing(device: torch.device) -> str | None:
    """Why torch.compile cannot work for this device here, or None."""
    if device.type == "cpu":
        names = [os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl"]
        if not any(name and shutil.which(name) for name in names):
            return "no C++ compiler was found"
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's own operations in one thread, in this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compiled(
    function: Callable[..., Any], mode: Compile, calls: int, device: torch.device, values: int = 0, *, short: bool = False
) -> Callable[..., Any]:  # fmt: skip
    """The function, compiled where that was asked for or pays; a failure to compile falls back to eager with a log line.

    Each call is taken to work on so many parameter values, whose memory traffic a compiled step halves. With `short` the code
    between its kernels is compiled too, which takes seconds more and saves a few microseconds a kernel.
    """
    if mode is False or (mode == "auto" and calls * (1 + values / VALUES_OF_A_CALL) < CALLS_THAT_PAY):
        return function
    missing = compiler_missing(device)
    if missing:
        log.info("running eagerly: %s", missing)
        return function
    return _Fallback(function, {"cpp_wrapper": True} if short and device.type == "cpu" else {})


# Guards are dropped: they cost more than a small step does, and each compiled function here belongs to one run, which calls
# it with the same shapes, dtypes and settings from its first call to its last. (Copied at use: torch.compile empties it.)
_UNGUARDED: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own.

    The compiler keeps its cache by code object, with a small limit: without this, runs would share entries that are not
    guarded, and after a handful of differently shaped ones later runs would silently go uncompiled.
    """
    plain = getattr(function, "__func__", function)
    own = types.FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    bound_to = getattr(function, "__self__", None)
    return own if bound_to is None else types.MethodType(own, bound_to)


class _Fallback:
    """A compiled function that turns into the plain one if its first call cannot be compiled."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.plain = function
        self.active: Callable[..., Any] = torch.compile(
            _own_code(function), dynamic=False, options={**_UNGUARDED, **options}
        )
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
