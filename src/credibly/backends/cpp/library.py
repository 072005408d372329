"""The C++ library: compiled with the package by `build.py`, checked, and loaded for this processor."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credibly.backends.cpp.build import FOLDER as COMPILED
from credibly.backends.cpp.build import MANIFEST, PROBE, SOURCES, cpu_level, source_hash, variants
from credibly.errors import InputError

log = logging.getLogger("credibly")

FOLDER = SOURCES / COMPILED


class Unusable(Exception):
    """The library cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Loaded:
    """A loaded library.

    Attributes:
        variant: its instruction set: "baseline", "avx2" or "avx512".
        sha256: checksum of its file. Machines with the same variant and checksum give bit-for-bit identical results.
        functions: the exported functions.
    """

    variant: str
    sha256: str
    functions: ctypes.CDLL


def library() -> ctypes.CDLL | None:
    """Return the library, or None if it was not compiled, is damaged, or is switched off by CREDIBLY_NATIVE=0."""
    found = loaded()
    return None if found is None else found.functions


@functools.cache
def loaded() -> Loaded | None:
    """Load the variant that CREDIBLY_NATIVE names, else the fastest that the processor can run. Once per process."""
    wanted = os.environ.get("CREDIBLY_NATIVE", "1")
    if wanted == "0":
        return None
    if wanted not in ("", "1", *variants()):
        raise InputError("CREDIBLY_NATIVE", f"must be 0, 1 or one of {', '.join(variants())}, got {wanted!r}")
    try:
        return load(FOLDER, None if wanted in ("", "1") else wanted)
    except Unusable as error:
        log.warning("The C++ backend is not available: %s. Small networks run in torch, several times slower.", error)
        return None


def load(folder: Path, variant: str | None = None) -> Loaded:
    """Load a variant from a folder that `build.py` wrote, None for the fastest that the processor can run.

    Raises:
        Unusable: if nothing was compiled, or a file does not match its checksum: mapping a truncated file would
            crash the process at the first access to a missing page.
    """
    manifest = _manifest(folder)
    files = manifest["files"]
    if not files:
        raise Unusable(f"{manifest.get('note', 'it was not compiled')}; install a C++ compiler, then credibly again")
    known = list(variants())
    runnable = known[: cpu_level(_checked(folder, PROBE, files)) + 1]
    usable = [name for name in runnable if name in files and variant in (None, name)]
    if not usable:
        built = ", ".join(name for name in known if name in files)
        raise Unusable(
            f"it was compiled for {built}, and this processor runs {', '.join(runnable)}"
            + (f", not the requested {variant}" if variant else "; install credibly again on this machine")
        )
    path = _checked(folder, usable[-1], files)
    try:
        return Loaded(usable[-1], files[usable[-1]]["sha256"], ctypes.CDLL(os.fspath(path)))
    except OSError as error:
        raise Unusable(f"{path.name} cannot be loaded: {str(error).splitlines()[0][:200]}") from None


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, sources = dict(manifest["files"]), manifest["sources"]
    except FileNotFoundError:
        raise Unusable("it was not compiled; run `pip install .`, or build.py beside its sources") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"its manifest is damaged ({type(error).__name__}); install credibly again") from None
    if sources != source_hash():
        raise Unusable("it was compiled from other sources; run `pip install .`, or build.py beside the sources")
    return {**manifest, "files": files}


def _checked(folder: Path, name: str, files: dict[str, Any]) -> Path:
    """Return the path of a file whose content matches the manifest."""
    path = folder / f"{name}.so"
    try:
        content = path.read_bytes()
        right = hashlib.sha256(content).hexdigest() == files[name]["sha256"]
    except (OSError, KeyError, TypeError):
        right = False
    if not right:
        raise Unusable(f"{path.name} is missing or damaged (its checksum differs); install credibly again")
    return path
