"""Whether runs use the C++ library, which may be available but switched off for a run that was started without it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from credibly.backends.cpp.library import library as load_library

_OFF: ContextVar[bool] = ContextVar("cpp_off", default=False)
# The result of the first request for the library in this process; empty before it.
_FOUND: list[bool] = []


def library() -> ctypes.CDLL | None:
    """Return the library, or None if it is not available or switched off."""
    if _OFF.get():
        return None
    found = load_library()
    _FOUND[:] = [found is not None]
    return found


@contextmanager
def without_library() -> Iterator[None]:
    """Treat the C++ library as missing when runs that are set up in this block select their backend."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def library_found() -> bool | None:
    """Return whether the library was found when a run requested it; None before the first request."""
    if _OFF.get():
        return False
    return _FOUND[0] if _FOUND else None


def why_missing() -> str:
    """Return why there is no library, for an error message."""
    if os.environ.get("CREDIBLY_NATIVE", "1") == "0":
        return "CREDIBLY_NATIVE=0 switches it off"
    return "it could not be loaded or compiled"
