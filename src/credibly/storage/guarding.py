"""Conversion of any error while a run is built from its files into a readable error about the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credibly.core.allocation import allocation_failure
from credibly.errors import InputError, StoreError


@contextmanager
def as_store_errors(what: str) -> Iterator[None]:
    """Turn any error from reading a modified run into a `StoreError` whose message begins with `what`."""
    try:
        yield
    except (StoreError, InputError):
        raise
    except Exception as error:
        reason = allocation_failure(error) or " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StoreError(f"{what} is invalid ({reason})") from error
