"""Whatever goes wrong while a run is built from its files is an error of the run, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from credibly.core.allocation import allocation_failure
from credibly.errors import InputError, StoreError


@contextmanager
def as_store_errors(what: str) -> Iterator[None]:
    """Turn any error that reading a modified run raises into a `StoreError`; `what` begins its sentence."""
    try:
        yield
    except (StoreError, InputError):
        raise
    except Exception as error:
        reason = allocation_failure(error) or " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StoreError(f"{what} is invalid ({reason})") from error
