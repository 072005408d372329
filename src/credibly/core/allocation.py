"""Recognise out-of-memory errors, which have no common type, and describe them."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

# What torch, safetensors, pyarrow and the C++ library say when an allocation fails.
REFUSED = re.compile(
    r"out of memory|not enough memory|can(not|'t|t) allocate|unable to (allocate|mmap)|bad_alloc|os error 12\b"
    r"|(malloc|realloc) of size \d+ failed",
    re.IGNORECASE,
)
SIZE = re.compile(r"allocate (?P<size>\d[\d.]*) ?(?P<unit>bytes|[KMGT]i?B)?", re.IGNORECASE)


def allocation_failure(error: BaseException) -> str | None:
    """Describe a failed allocation, with its size if known. Return None for any other error."""
    for one in _causes(error):
        known = isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        text = str(one)
        if known or (type(one).__name__ in ("RuntimeError", "OutOfMemoryError", "SafetensorError", "ArrowMemoryError")
                     and REFUSED.search(text)):  # fmt: skip
            size = SIZE.search(text)
            return "out of memory" + (f" (asked for {size['size']} {size['unit'] or 'bytes'} at once)" if size else "")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
