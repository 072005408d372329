"""The C++ library: compiled on first use with the machine's own compiler, kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger("credibly")

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=fast")
TIMEOUT = 300  # seconds, of a compiler run


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None without a compiler or with CREDIBLY_NATIVE=0. Loaded once per process."""
    if os.environ.get("CREDIBLY_NATIVE", "1") == "0":
        return None
    compiler = next((path for name in _compiler_names() if (path := shutil.which(name))), None)
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(os.fspath(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("C++ backend not available: %s", str(error).splitlines()[0][:200])
        return None


def _compiler_names() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    return [*given[:1], "g++", "c++", "clang++"]


def _build(compiler: str) -> Path:
    """Return the path of the library, compiled unless the cache has it for these sources, compiler and CPU."""
    folder = _folder()
    target = folder / f"mlp-{_key(compiler)}.so"
    if target.exists():
        return target
    # Compiled to a temporary name: other processes may build at the same time and must not find a half-written file.
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _compile(compiler, name)
        os.replace(name, target)
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return target


def _compile(compiler: str, out: str) -> None:
    """Compile all sources in parallel and link them."""
    with tempfile.TemporaryDirectory(prefix="credibly-") as folder:
        objects = {os.path.join(folder, f"{source.stem}.o"): source for source in sorted(FOLDER.glob("*.cpp"))}
        running: list[subprocess.Popen[bytes]] = []
        try:
            for path, source in objects.items():
                command = [compiler, *FLAGS, "-c", "-o", path, os.fspath(source)]
                running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            for process in running:
                process.wait(TIMEOUT)
        finally:
            for process in running:
                process.kill()
                process.wait()
        failed = next((process.returncode for process in running if process.returncode), 0)
        if failed:
            raise subprocess.CalledProcessError(failed, compiler)
        subprocess.run([compiler, *FLAGS, "-o", out, *objects], capture_output=True, timeout=TIMEOUT, check=True)


def _folder() -> Path:
    """Return the cache folder, or a temporary one if others can write to it: its files are executed."""
    given = os.environ.get("CREDIBLY_CACHE")
    try:
        base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credibly"
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or a read-only one
        return Path(tempfile.mkdtemp(prefix="credibly-"))
    status = base.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Path(tempfile.mkdtemp(prefix="credibly-"))
    return base


def _key(compiler: str) -> str:
    """Return a hash of the sources, the flags, the compiler's version and the CPU's features."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    sources = [path.read_text() for ending in ("cpp", "h") for path in sorted(FOLDER.glob(f"*.{ending}"))]
    text = "\n".join([*sources, *FLAGS, version, platform.machine(), features])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
