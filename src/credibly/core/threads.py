"""The number of threads that torch's CPU operations use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_NATIVE: ContextVar[int | None] = ContextVar("native_threads", default=None)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch's CPU operations in `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """Run torch's CPU operations in one thread inside the block, or change nothing if `when` is false."""
    if not when or torch.get_num_threads() == 1:
        yield
        return
    with torch_threads(1):
        yield


@contextmanager
def threads_for_native(when: bool = True) -> Iterator[None]:
    """Run torch's operations in one thread inside the block, and the C++ backend in as many as before it.

    After each parallel operation, torch's threads spin for milliseconds on processors that the backend's threads need:
    with small operations between short calls of the backend, these take up to twice as long.
    """
    if not when or torch.get_num_threads() == 1:
        yield
        return
    token = _NATIVE.set(torch.get_num_threads())
    try:
        with torch_threads(1):
            yield
    finally:
        _NATIVE.reset(token)


def native_threads() -> int:
    """Return the number of threads that the C++ backend may use."""
    return _NATIVE.get() or torch.get_num_threads()
