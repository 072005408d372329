"""Compile the C++ library when the package is built: one file per instruction set, and a manifest with their checksums.

`setup.py` runs this. In a checkout that is not installed, `python src/credibly/backends/cpp/build.py` builds in place.
Only the standard library is imported: no other package is available when a wheel is built.

Files are compiled to a plain C interface, without Python's, so one wheel per platform serves all versions of Python.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
FOLDER = "compiled"
MANIFEST = "manifest.json"
TIMEOUT = 600  # time limit of a compiler run, in seconds

# Variants from the slowest to the fastest, in the order of `cpu_level` in cpu.cpp. 512-bit vectors are requested
# explicitly: the loops that the compiler vectorises itself would use 256 bits.
X86_VARIANTS: dict[str, tuple[str, ...]] = {
    "baseline": ("-march=x86-64",),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
OTHER_VARIANTS: dict[str, tuple[str, ...]] = {"baseline": ()}
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast")
# A separate library that every processor can run: it reports which variants this processor supports.
PROBE = "cpu"
# Sources of a variant, those that take longest to compile first.
SLOW = ("mlp_f64", "mlp_f32", "wide")
UNITS = (*SLOW, *sorted({path.stem for path in SOURCES.glob("*.cpp")} - {PROBE, *SLOW}))
POSITION = () if sys.platform == "win32" else ("-fPIC", "-pthread")
# -s: symbols would depend on the build folder. -Bsymbolic: a library never calls into another one's copy.
LINK = ("-shared", *POSITION, *(("-Wl,-s", "-Wl,-Bsymbolic") if sys.platform == "linux" else ()))


class BuildError(Exception):
    """The library cannot be compiled here; the message is one line."""


def variants() -> dict[str, tuple[str, ...]]:
    """Return the variants of this architecture, from the slowest to the fastest, with their flags."""
    return X86_VARIANTS if platform.machine().lower() in ("x86_64", "amd64") else OTHER_VARIANTS


def source_hash() -> str:
    """Return a hash of the C++ sources and the flags."""
    digest = hashlib.sha256(repr((X86_VARIANTS, OTHER_VARIANTS, FLAGS)).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def build(folder: Path, which: str = "") -> None:
    """Compile the library into a folder. Without a usable compiler, record the reason there instead.

    Args:
        folder: receives one file per variant and the manifest, each renamed into place when complete.
        which: "all" variants, as in wheels, or names with commas. Default: the best for this processor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, object] = {"sources": source_hash()}
    try:
        compiler = find_compiler()
        manifest |= {"compiler": _version(compiler), "files": _compile(compiler, folder, which)}
    except BuildError as error:
        manifest |= {"files": {}, "note": str(error)}
        print(f"credibly: {error}. Without the C++ backend, small networks run in torch", file=sys.stderr)
    with _replacing(folder / MANIFEST) as path:
        path.write_text(json.dumps(manifest, indent=1) + "\n")
    files: dict[str, object] = manifest["files"]  # type: ignore[assignment]
    for path in folder.glob("*.so"):
        if path.stem not in files:  # left over from an earlier build
            path.unlink()


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: `CXX`, or the first of the usual names."""
    given = shlex.split(os.environ.get("CXX", ""))
    # On Windows, GCC does not align AVX registers that it stores on the stack; clang does.
    names = ("clang++",) if sys.platform == "win32" else ("g++", "c++", "clang++")
    for command in [given] if given else [[name] for name in names]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler was found (looked for {shlex.join(given) or ', '.join(names)})")


def _version(compiler: Sequence[str]) -> str:
    return _run([*compiler, "--version"]).splitlines()[0]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {command[0]} cannot be run: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise BuildError(f"the C++ compiler {command[0]} failed with status {done.returncode}: {lines[0][:200]}")
    return done.stdout or " "


def _compile(compiler: list[str], folder: Path, which: str) -> dict[str, dict[str, object]]:
    """Compile the sources for each variant, in parallel, and link them. Return sizes and checksums of the files."""
    with tempfile.TemporaryDirectory(prefix="credibly-build-") as scratch:

        def compiled(name: str, source: str) -> str:
            target = os.path.join(scratch, f"{name}-{source}.o")
            flags = variants()[next(iter(variants())) if name == PROBE else name]
            _run([*compiler, *FLAGS, *POSITION, *flags, "-c", "-o", target, os.fspath(SOURCES / f"{source}.cpp")])
            return target

        files = {PROBE: _link(compiler, folder, PROBE, [compiled(PROBE, PROBE)])}
        chosen = _chosen(folder / f"{PROBE}.so", which)
        units = [(name, source) for name in chosen for source in UNITS]
        with concurrent.futures.ThreadPoolExecutor(_cores()) as pool:
            objects = list(pool.map(lambda unit: compiled(*unit), units))
        for name in chosen:
            own = [path for (variant, _), path in zip(units, objects) if variant == name]
            files[name] = _link(compiler, folder, name, own)
    return files


def _chosen(probe: Path, which: str) -> list[str]:
    known = list(variants())
    if which == "all":
        return known
    names = which.split(",") if which else [known[min(cpu_level(probe), len(known) - 1)]]
    if not set(names) <= set(known):
        raise BuildError(f"CREDIBLY_VARIANTS={which} is not available on this architecture, only {', '.join(known)}")
    return [name for name in known if name in names]


def cpu_level(probe: Path) -> int:
    """Return the position among `variants` of the fastest one that this processor can run."""
    library = ctypes.CDLL(os.fspath(probe))
    library.cpu_level.restype = ctypes.c_int64
    return int(library.cpu_level())


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _link(compiler: list[str], folder: Path, name: str, objects: list[str]) -> dict[str, object]:
    target = folder / f"{name}.so"
    with _replacing(target) as path:
        _run([*compiler, *LINK, "-o", os.fspath(path), *objects])
    content = target.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class _replacing:
    """Yield a temporary name in the same folder, and rename it to the file unless the block raises."""

    def __init__(self, target: Path) -> None:
        self.target, self.path = target, target.with_name(f".{target.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.replace(self.path, self.target)
        else:
            self.path.unlink(missing_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the C++ library in place.")
    parser.add_argument("--variants", default=os.environ.get("CREDIBLY_VARIANTS", ""), help='names, or "all"')
    build(SOURCES / FOLDER, parser.parse_args().variants)
