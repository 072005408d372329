"""Everything that credibly changes in the process that imports it.

- `MKL_CBWR=AUTO,STRICT` is set unless the variable is set already. Matrix products then round the same way wherever
  their operands are in memory, so a chain is bit-for-bit identical whichever chains and processes run beside it. MKL
  reads the variable at its first product. No cost was measurable.
- glibc is made to keep up to 64 MB of freed memory (`keep_freed_memory`, before the first network is evaluated).
- A module finder is added for a few public names (`credibly.zoo`) whose modules live inside a package
  (`credibly.networks.zoo`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, cast


def set_up() -> None:
    """Set the environment variables that the numerical libraries read on their first call."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def keep_freed_memory() -> None:
    """Allocate and free one untouched block of 32 MB, so that glibc keeps freed memory instead of returning it.

    Small networks allocate arrays of about a megabyte in every call. glibc returns memory at the top of its heap to the
    system once more than twice the largest block that it has mapped and freed is free there, and getting it back page
    by page takes longer than the arithmetic. 32 MB is the largest block that counts. On other platforms this does
    nothing, and the MALLOC_ environment variables take precedence.
    """
    import torch

    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def release_freed_memory() -> None:
    """Return freed memory to the system, before a run that needs most of it: trial passes leave up to 64 MB and more.

    Only glibc keeps any, and elsewhere this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def alias_modules(homes: Mapping[str, str]) -> None:
    """Make `import alias` return the module at `homes[alias]`, imported on first use."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AliasFinder(homes))


class _AliasFinder:
    def __init__(self, homes: Mapping[str, str]) -> None:
        self.homes = homes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # A loader by its methods: importing importlib.abc for a base class would double the time of `import credibly`.
        loader = cast(Any, self)
        return importlib.machinery.ModuleSpec(fullname, loader) if fullname in self.homes else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        home = importlib.import_module(self.homes[spec.name])
        spec.loader_state = home.__spec__
        return home

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module's home, which the import system has overwritten."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state
