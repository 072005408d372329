"""When to use torch.compile, with a fallback to eager execution that is logged once."""

from __future__ import annotations

import logging
import os
import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

log = logging.getLogger("credibly")
Compile = bool | Literal["auto"]

_EAGER: ContextVar[bool] = ContextVar("eager", default=False)

# Number of calls from which compilation pays off: a cold compile takes 5 to 18 seconds and saves about a millisecond of
# dispatch per call.
CALLS_THAT_PAY = 10_000
# Number of parameters whose eager update takes about as long as the dispatch of one call.
VALUES_OF_A_CALL = 400_000


def compiler_missing(device: torch.device) -> str | None:
    """Return why torch.compile cannot work for this device on this machine, or None if it can."""
    if device.type == "cpu":
        names = [os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl"]
        if not any(name and shutil.which(name) for name in names):
            return "no C++ compiler was found"
    return None


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run everything that is set up in this block eagerly, as if there were no compiler."""
    token = _EAGER.set(True)
    try:
        yield
    finally:
        _EAGER.reset(token)


def compiled(
    function: Callable[..., Any],
    mode: Compile,
    calls: int,
    device: torch.device,
    values: int = 0,
    *,
    short: bool = False,
) -> Callable[..., Any]:
    """Return the function, compiled if requested or if that pays off. Failure to compile is logged and runs eagerly.

    Args:
        function: the function to compile.
        mode: True, False, or "auto" to decide by `calls` and `values`.
        calls: the expected number of calls.
        device: where it runs.
        values: parameters that each call updates; compilation halves the memory traffic of that.
        short: also compile the code between kernels, which takes seconds longer and saves a few microseconds per
            kernel.
    """
    if mode is False or (mode == "auto" and calls * (1 + values / VALUES_OF_A_CALL) < CALLS_THAT_PAY):
        return function
    missing = compiler_missing(device)
    if missing or _EAGER.get():
        log.info("running eagerly: %s", missing or "the run was started without a compiler")
        return function
    return _Fallback(function, {"cpp_wrapper": True} if short and device.type == "cpu" else {})


# Guards are dropped: they cost more than a small step, and each compiled function here belongs to one run, which always
# calls it with the same shapes, dtypes and settings. (Copied at use: torch.compile empties it.)
_UNGUARDED: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a separate code object.

    The compiler caches by code object, with a small limit. Without this, runs would share unguarded cache entries, and
    after a handful of differently shaped runs later ones would silently stay uncompiled.
    """
    plain = getattr(function, "__func__", function)
    own = types.FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    bound_to = getattr(function, "__self__", None)
    return own if bound_to is None else types.MethodType(own, bound_to)


class _Fallback:
    """A compiled function that falls back to the original if its first call fails to compile."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.plain = function
        self.active: Callable[..., Any] = torch.compile(
            _with_own_code(function), dynamic=False, options={**_UNGUARDED, **options}
        )
        self.tried = False

    def __call__(self, *args: Any) -> Any:
        if self.tried:
            return self.active(*args)
        self.tried = True
        try:
            return self.active(*args)
        # Compiler failures have no common type. A genuine error is raised again by the eager call.
        except Exception as error:
            reason = str(error).splitlines()[0][:200]
            log.info("running eagerly: torch.compile failed (%s: %s)", type(error).__name__, reason)
            self.active = self.plain
            return self.plain(*args)
